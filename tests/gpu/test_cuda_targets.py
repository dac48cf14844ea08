"""Code for each GPU: what is in it, what it takes of the machine, and which of a bundle's variants a GPU runs."""

import subprocess
import sys
from importlib import metadata

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.small_models import array, close
from vmfb.simulated_gpu import install
from vmfb.test_cuda import CASES, gpu

import aotc
from aotc.diagnostics import CompileError
from aotc.kernels.cuda.nvvm import oldest_cuda_driver
from aotc.targets import TARGETS, resolve_targets
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.devices.cuda import device as cuda
from aotc.vmfb.errors import BundleError

pytest.importorskip("numba_cuda")

sim = pytest.mark.cudasim
EM_CUDA = 190
CUBINS = [t.cpu for t in TARGETS.values() if t.kind == "cuda" and not t.portable]
REGISTERS = {"softmax_long_rows": 40, "sum_of_columns": 40, "tiled_product": 64, "tiled_convolution": 64, "scans": 40}
"""The most that a kernel of a case takes, on any target: the machine's 65,536 then do for 1,024 threads or more."""


def variant_of(data, number=0):
    """Return the bundle, and an entry of its variants."""
    bundle = open_bundle(data)
    return bundle, bundle.manifest["variants"][number]


@sim
@pytest.mark.parametrize("architecture", CUBINS)
def test_cubins_hold_their_kernels(architecture):
    function, args, _ = CASES["softmax_long_rows"]
    data, again = (aotc.compile(jax.jit(function), *args, target=f"cuda:{architecture}") for _ in range(2))
    assert data == again
    bundle, variant = variant_of(data)
    cubins = bytes(bundle.verified_segment(variant["cubin"]))
    for kernel in variant["kernels"]:
        begin, size = kernel["image"]
        image = cubins[begin : begin + size]
        assert image[:4] == b"\x7fELF"
        assert int.from_bytes(image[18:20], "little") == EM_CUDA
        assert b".text." + kernel["symbol"].encode() in image


@sim
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", pytest.param("sm_120", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", REGISTERS)
def test_kernels_stay_within_their_registers_and_shared_memory(name, architecture):
    function, args, _ = CASES[name]
    _, variant = variant_of(aotc.compile(jax.jit(function), *args, target=f"cuda:{architecture}"))
    for kernel in variant["kernels"]:
        taken = kernel["resources"]
        assert 0 < taken["registers"] <= REGISTERS[name], kernel["name"]
        assert taken["spills"] == taken["stack"] == 0, kernel["name"]
        assert taken["shared"] <= TARGETS[f"cuda:{architecture}"].shared


@sim
def test_text_for_the_driver(monkeypatch):
    function, args, tolerance = CASES["softmax_long_rows"]
    data, again = (aotc.compile(jax.jit(function), *args, target="cuda:compute_80", cache=c) for c in (False, True))
    assert data == again
    bundle, variant = variant_of(data)
    text = bytes(bundle.verified_segment(variant["ptx"]))
    for kernel in variant["kernels"]:
        begin, size = kernel["image"]
        image = text[begin : begin + size].decode()
        assert image.endswith("\0")
        assert ".target sm_80" in image
        assert f".entry {kernel['symbol']}(" in image
        assert "resources" not in kernel
    assert variant["driver"] == [13, 0]  # another libNVVM than the extra's makes text for newer drivers alone
    install(monkeypatch, data, capability=(12, 1))
    close(aotc.load(data).invoke("main", *args), jax.jit(function)(*args), tolerance)
    install(monkeypatch, data, driver=(12, 9))
    with pytest.raises(BundleError, match=r"needs a driver for CUDA 13\.0 or newer, this one is for 12\.9"):
        aotc.load(data)


def variant(name, **more):
    return {"target": f"cuda:{name}", **more}


RUNS = {
    "sm_80": [(8, 0), (8, 6), (8, 9)],
    "sm_86": [(8, 6), (8, 9)],
    "sm_90": [(9, 0)],
    "sm_90a": [(9, 0)],
    "sm_100": [(10, 0), (10, 3)],
    "sm_120": [(12, 0), (12, 1)],
    "compute_80": [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)],
}
GPUS = [(7, 5), *RUNS["compute_80"]]


@pytest.mark.ir
@pytest.mark.parametrize("name", RUNS)
def test_which_gpus_run_it(name):
    assert [have for have in GPUS if cuda._can_run_variant(variant(name), have)] == RUNS[name]


@pytest.mark.ir
@pytest.mark.parametrize("name", ["cuda", "cuda:sm_90", "cuda:sm_90a", "cuda, cuda:sm_90,cuda:sm_90a"])
def test_one_target_of_capability_9_0(name):
    assert resolve_targets(name) == (TARGETS["cuda:sm_90a"],)


@pytest.mark.ir
def test_variants_are_ranked_by_architecture():
    names = ["compute_80", "sm_80", "sm_86", "sm_90", "sm_90a", "sm_100"]
    assert sorted(names, key=lambda n: cuda.rank(variant(n))) == names


@sim
def test_the_best_variant_runs(monkeypatch):
    data = aotc.compile(jax.jit(jnp.sin), array(3), target="cuda:compute_80,cuda:sm_90a")
    for capability, target in (((9, 0), "cuda:sm_90a"), ((8, 9), "cuda:compute_80"), ((12, 0), "cuda:compute_80")):
        install(monkeypatch, data, capability=capability)
        module = aotc.load(data)
        assert f" on {target}>" in repr(module)
        np.testing.assert_allclose(module(array(3)), np.sin(array(3)), rtol=1e-6)


@sim
@pytest.mark.parametrize("missing", ["numba-cuda", "cuda.bindings.nvvm", "cuda.bindings.nvjitlink"])
def test_missing_packages_are_named(missing, monkeypatch):
    real = metadata.version

    def version(name):
        if name == missing:
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    if missing != "numba-cuda":
        monkeypatch.setitem(sys.modules, missing, None)
        monkeypatch.delattr(missing, raising=False)
    with pytest.raises(CompileError, match=r"sm_90a needs numba-cuda, (?s:.*)\[cuda-compile\]"):
        aotc.compile(jax.jit(jnp.sin), array(3), target="cuda:sm_90a", cache=False)


WITHOUT_NUMBA_CUDA = """
import sys
from importlib import metadata
real = metadata.version
def version(name):
    if name == "numba-cuda":
        raise metadata.PackageNotFoundError(name)
    return real(name)
metadata.version = version
sys.modules["aotc.kernels.cuda.front_end"] = None  # Numba's own numba.cuda lacks what it imports
import aotc
TEXT = b"func.func @main(%x: tensor<f32>) -> tensor<f32> { %y = stablehlo.sine %x : tensor<f32> return %y: tensor<f32>}"
try:
    aotc.compile(TEXT, target=sys.argv[1], cache=False)
except aotc.CompileError as error:
    print(error)
"""


@sim
@pytest.mark.parametrize("target", ["cuda:sm_90a", "cuda:compute_80", "cpu,cuda:sm_90a"])
def test_numba_without_numba_cuda(target):
    command = [sys.executable, "-c", WITHOUT_NUMBA_CUDA, target]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "needs numba-cuda" in done.stdout
    assert "[cuda-compile]" in done.stdout


@sim
def test_which_drivers_compile_a_text():
    assert oldest_cuda_driver(b"//\n.version 9.0\n.target sm_80") == (13, 0)
    assert oldest_cuda_driver(b"//\n.version 9.4\n.target sm_80") == (13, 4)
    assert oldest_cuda_driver(b"//\n.version 8.8\n.target sm_80") == (12, 8)


@pytest.mark.ir
def test_an_unknown_architecture_is_an_error():
    with pytest.raises(BundleError, match="no GPU that this aotc knows"):
        cuda.rank(variant("sm_90x"))


class TestOnAGpu:
    """The driver's own compiler."""

    pytestmark = gpu

    @pytest.mark.parametrize("target", ["cuda:compute_80", "cuda:sm_90a"])
    @pytest.mark.parametrize("name", CASES)
    def test_results_agree_with_jax(self, name, target):
        function, args, tolerance = CASES[name]
        module = aotc.load(aotc.compile(jax.jit(function), *args, target=target), devices="cuda")
        with jax.default_device(jax.devices("cpu")[0]):
            want = jax.jit(function)(*args)
        close(module.invoke("main", *jax.tree.leaves(args)), want, tolerance)
