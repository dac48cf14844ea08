"""LAPACK and functions of the user's on the host beside a GPU, on the hardware."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices.test_host_ops import CALL, CASES, around, branched, counted, export, kinds, looped, square
from support.lapack import agree

import aotc
from aotc.lowering.threshold import Limit
from aotc.vmfb import custom_calls
from aotc.vmfb.devices.cuda import driver
from aotc.vmfb.memory.arena import ARENAS

pytest.importorskip("numba_cuda")
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(bool(driver.missing()), reason="no GPU")]

GPU = "cuda:sm_90"


@pytest.fixture(autouse=True)
def all_factors_are_the_hosts(monkeypatch):
    """Small ones too, which a GPU could do itself; what is compiled so is never cached."""
    monkeypatch.setattr("aotc.lowering.placement.host_only.BLOCK_FACTOR", Limit(0, "elements", "a test"))


@pytest.fixture(autouse=True)
def wide_types():
    """64-bit types, for these tests only."""
    with jax.enable_x64(True):
        yield


def check(function, *arrays, calls=3, **flags):
    """The same from NumPy and from arrays on the GPU, call after call; f32 is multiplied as f32."""
    with jax.default_matmul_precision("highest"):
        data = aotc.compile(export(function, *arrays), target=GPU, cache=False, **flags)
    want = [np.asarray(x) for x in jax.tree.leaves(jax.jit(function)(*arrays))]
    module = aotc.load(data)
    held = [module.put(x) for x in arrays]
    for _ in range(calls):
        agree([np.asarray(x) for x in module.invoke("main", *arrays)], want)
        made = module.invoke("main", *held, results="device")
        assert [x.device for x in made] == ["cuda:0"] * len(want)
        agree([x.numpy() for x in made], want)
    return data, module


@pytest.mark.parametrize("n", [4, 300])
@pytest.mark.parametrize("name", CASES)
def test_decompositions(name, n):
    data, _ = check(CASES[name], square(n=n), opt_level=len(name) % 4)
    if n > 4:
        assert kinds(data)[2]["cuda"] >= 1


@pytest.mark.parametrize("dtype", ["f4", "c8", "c16"])
def test_batches_of_all_dtypes(dtype):
    check(around(jnp.linalg.inv), square(5, dtype=dtype, n=40))


@pytest.mark.parametrize("n", [4, 64])
@pytest.mark.parametrize("function", [looped, counted, branched])
def test_loops_and_branches(function, n):
    check(function, square(n=n))


def test_functions_of_the_users(monkeypatch):
    def mine(x, out):
        out[...] = 2 * x

    monkeypatch.setattr(custom_calls, "_REGISTRY", {})
    aotc.register_custom_call("mine", mine, native=False)
    module = aotc.load(aotc.compile(CALL, target=GPU, cache=False), custom_calls={"mine": mine})
    x = np.linspace(-2, 2, 12, dtype="f4").reshape(3, 4)
    for _ in range(3):
        np.testing.assert_allclose(module.invoke("main", x)[0], np.cos(2 * np.sin(x)), rtol=1e-5, atol=1e-6)


def test_pages_of_working_memory_are_locked(monkeypatch):
    """Once for the shapes of a plan; they are unlocked when the memory is given back."""
    made = []

    class Counted(driver.PageLock):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(arguments[-1])

    ARENAS.trim()
    monkeypatch.setattr(driver, "PageLock", Counted)
    _, module = check(CASES["qr"], square(n=300))
    assert len(made) == 1
    module.trim()
    check(CASES["qr"], square(n=300), calls=1)
    assert len(made) == 2


def test_a_process_that_ends_with_locked_pages_says_nothing(tmp_path):
    (tmp_path / "model.vmfb").write_bytes(aotc.compile(export(CASES["qr"], square(n=300)), target=GPU, cache=False))
    script = (
        "import aotc, numpy as np\n"
        "module = aotc.load('model.vmfb')\n"
        "module.invoke('main', np.eye(300))\n"
        "print('done')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr, done.returncode) == ("done\n", "", 0)
