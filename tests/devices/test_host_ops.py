"""Programs for a GPU whose LAPACK calls, and calls of the user's functions, run on the host beside it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices.mixes import run_everywhere
from jax import lax
from lowering.test_devices import inputs_of
from support.lapack import agree
from vmfb.simulated_gpu import install

import aotc
from aotc.diagnostics import CompileError
from aotc.lowering.placement import host_side
from aotc.lowering.threshold import Limit
from aotc.vmfb import custom_calls
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.errors import BundleError

pytest.importorskip("numba_cuda")
pytestmark = [pytest.mark.cudasim, pytest.mark.usefixtures("bundles_anew")]

GPU = "cuda:sm_90a"


@pytest.fixture(autouse=True)
def wide_types():
    """64-bit types, for these tests only."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def eager(monkeypatch):
    """All that can be is on the GPU, as if the arrays were large: nothing weighs less on the host."""
    monkeypatch.setattr(host_side, "move_nanoseconds", lambda *_: 0.0)
    monkeypatch.setattr(host_side._HostGpuCut, "_set_costs", _forced_alone)


def _forced_alone(self, op, thing, iterations):
    only = host_side.host_only(op)
    if only is not None:
        self.forced[op] = only.what
        self.cut.fix_to_side(thing, host_side.FIRST)
    else:
        self.cut.set_side_costs(thing, 1e6, 0.0)


def square(*batch, dtype="f8", n=4):
    """Matrices whose decompositions are no matter of luck: well-conditioned, determinants of the order of 1."""
    x = np.random.default_rng(n).normal(size=(*batch, n, n)) * 0.3 / n**0.5
    x = x + 1j * x[..., ::-1] if np.dtype(dtype).kind == "c" else x
    return (x + 1.2 * np.eye(n)).astype(dtype)


def around(function):
    """A function of a product of its argument, between what a GPU does."""
    return lambda x: jax.tree.map(jnp.sin, function(jnp.tanh(x) @ x))


def symmetric(function):
    return lambda x: function(x + jnp.swapaxes(x, -1, -2))


CASES = {
    "lu": around(lambda x: jax.scipy.linalg.lu(x, permute_l=True)),
    "qr": around(jnp.linalg.qr),
    "solve": around(lambda x: jnp.linalg.solve(x, x.T)),
    "det": around(jnp.linalg.det),
    "eigh": around(symmetric(jnp.linalg.eigvalsh)),
    "svd": around(lambda x: jnp.linalg.svd(x, compute_uv=False)),
    "two": around(lambda x: jnp.linalg.inv(jnp.cos(jnp.linalg.inv(x)))),
    "tridiagonal": around(lambda x: jax.lax.linalg.tridiagonal_solve(x[0], x[1] + 4, x[2], x[:, :2])),
}


def export(function, *arrays):
    return jax.jit(function).lower(*arrays).as_text()


def kinds(data):
    """The devices of the variant's transfers, and how many kernels are for each."""
    (variant,) = [v for v in open_bundle(data).manifest["variants"] if "implied" in v]
    moved = [(t["from"], t["to"]) for t in variant["transfers"]]
    return variant, moved, {part["kind"]: part["count"] for part in variant["parts"]}


@pytest.fixture(autouse=True)
def all_factors_are_the_hosts(monkeypatch):
    """Small ones are as good as large ones for what is tested here."""
    for module in ("placement.host_only", "plans.linalg.gpu_jacobi"):
        monkeypatch.setattr(f"aotc.lowering.{module}.BLOCK_FACTOR", Limit(0, "elements", "a test"))


def simulated(monkeypatch, function, *arrays, **flags):
    """What a function gives as always, whatever order a GPU works in, with its LAPACK calls on the host."""
    data = aotc.compile(export(function, *arrays), target=GPU, verify_each=True, **flags)
    want = [np.asarray(x) for x in jax.tree.leaves(jax.jit(function)(*arrays))]
    return data, run_everywhere(monkeypatch, data, arrays, want, count=1)


@pytest.mark.parametrize("name", CASES)
def test_decompositions(name, eager, monkeypatch):
    data, _ = simulated(monkeypatch, CASES[name], square(), opt_level=len(name) % 4)
    variant, moved, counts = kinds(data)
    assert set(moved) == {("device", "host"), ("host", "device")}
    assert counts["cpu"] >= 1
    assert counts["cuda"] >= 2
    assert all(row["op"].startswith("LAPACK's ") for row in variant["on_host"])


@pytest.mark.parametrize("dtype", ["f4", "c8", "c16"])
def test_batches_of_all_dtypes(dtype, eager, monkeypatch):
    simulated(monkeypatch, around(jnp.linalg.inv), square(3, dtype=dtype))


@pytest.mark.parametrize("name", CASES)
def test_as_the_cost_model_places_them(name, monkeypatch):
    simulated(monkeypatch, CASES[name], square())


def test_signature_is_that_of_the_gpu_alone(monkeypatch):
    data, module = simulated(monkeypatch, CASES["qr"], square())
    variant, *_ = kinds(data)
    assert (variant["kind"], variant["target"]) == ("cuda", GPU)
    assert "devices" not in variant
    assert not any("device" in v for v in open_bundle(data).manifest["functions"]["main"]["results"])
    assert (module.devices, module.home) == ({}, "cuda:0")
    assert isinstance(module.invoke("main", square())[0], np.ndarray)
    held = module.put(square())
    made = module.invoke("main", held, results="device")
    assert [x.device for x in made] == ["cuda:0", "cuda:0"]
    agree([x.numpy() for x in made], jax.tree.leaves(CASES["qr"](square())))


@pytest.mark.parametrize("asked", ["cuda", "cuda:0", ["cuda:0"]])
def test_only_the_gpu_is_named(asked, monkeypatch):
    data = aotc.compile(export(CASES["det"], square()), target=GPU)
    install(monkeypatch, data, count=1)
    assert aotc.load(data, devices=asked, verify=True).home == "cuda:0"
    with pytest.raises(BundleError, match="no GPU 1"):
        aotc.load(data, devices="cuda:1")


def test_beside_a_cpu_target(monkeypatch):
    data = aotc.compile(export(CASES["det"], square()), target=f"cpu,{GPU}")
    module = aotc.load(data, devices="cpu")
    assert module.home == "cpu:0"
    here = open_bundle(data).manifest["variants"][0]["target"]
    assert [part["target"] for part in kinds(data)[0]["parts"]] == [here, GPU]
    install(monkeypatch, data, count=1)
    assert aotc.load(data).home == "cuda:0"
    agree(aotc.load(data).invoke("main", square()), module.invoke("main", square()))


def test_sizes_that_a_call_knows(eager, monkeypatch):
    scope = jax.export.SymbolicScope()
    b, n = jax.export.symbolic_shape("b, n", scope=scope)
    function = around(jnp.linalg.inv)
    exported = jax.export.export(jax.jit(function))(jax.ShapeDtypeStruct((b, n, n), "f8"))
    data = aotc.compile(exported, target=GPU, verify_each=True)
    assert kinds(data)[2]["cuda"] >= 2
    for sizes in ((2, 3), (1, 5), (3, 1)):
        x = square(sizes[0], n=sizes[1])
        run_everywhere(monkeypatch, data, [x], [np.asarray(function(x))], count=1)


def looped(x):
    """Newton steps, each of which solves a system."""
    return lax.fori_loop(0, 3, lambda _, y: jnp.linalg.solve(jnp.cos(y) @ x, y), x)


def counted(x):
    """A loop that ends by what LAPACK makes."""
    return lax.while_loop(lambda s: jnp.linalg.det(s) > 1e-3, lambda s: jnp.sin(s) * 0.5, x)[0]


def branched(x):
    return lax.cond(x[0, 0] > 0, lambda y: jnp.linalg.inv(y @ x), lambda y: jnp.sin(y), x)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("function", [looped, counted, branched])
def test_loops_and_branches(function, sign, eager, monkeypatch):
    data, _ = simulated(monkeypatch, function, square() * sign)
    assert kinds(data)[2]["cuda"] >= 1


@pytest.mark.parametrize("function", [looped, counted, branched])
def test_small_loops_are_the_hosts(function, monkeypatch):
    """Of small matrices nothing is worth a transfer in each turn."""
    data, _ = simulated(monkeypatch, function, square())
    _, moved, _ = kinds(data)
    assert sorted(moved) == [("device", "host"), ("host", "device")]


CALL = """
func.func public @main(%x: tensor<3x4xf32>) -> tensor<3x4xf32> {
  %0 = stablehlo.sine %x : tensor<3x4xf32>
  %1 = stablehlo.custom_call @mine(%0) : (tensor<3x4xf32>) -> tensor<3x4xf32>
  %2 = stablehlo.cosine %1 : tensor<3x4xf32>
  return %2 : tensor<3x4xf32>
}
"""


@pytest.mark.parametrize("native", [True, False])
def test_functions_of_the_users(native, eager, monkeypatch):
    def mine(x, out):
        for row in range(x.shape[0]):
            for column in range(x.shape[1]):
                out[row, column] = 2 * x[row, column]

    monkeypatch.setattr(custom_calls, "_REGISTRY", {})
    aotc.register_custom_call("mine", mine, native=native)
    data = aotc.compile(CALL, target=GPU, verify_each=True)
    assert kinds(data)[0]["on_host"] == [{"function": "main", "op": "custom call @mine", "loc": "<model>:4:8"}]
    install(monkeypatch, data, count=1)
    options = {} if native else {"custom_calls": {"mine": mine}}
    (x,) = inputs_of(aotc.load(data, **options))
    run_everywhere(monkeypatch, data, [x], [np.cos(2 * np.sin(x))], count=1, **options)


@pytest.mark.parametrize("n", [4, 40, 64, 300])
def test_results_are_no_matter_of_luck(n):
    """Arguments that are a hundred roundings farther give the same: so other orders of sums on a GPU may, too."""
    loops = [looped, counted, branched]
    cases = {4: [*CASES.values(), *loops], 40: [around(jnp.linalg.inv)], 64: loops, 300: CASES.values()}
    for function in cases[n]:
        for dtype in ("f4", "c8", "c16") if n == 40 else ("f8",):
            x = square(dtype=dtype, n=n)
            step = 100 * np.finfo(dtype).eps * np.random.default_rng(1).choice([-1, 1], x.shape).astype(x.real.dtype)
            agree(jax.jit(function)(x * (1 + step)), jax.jit(function)(x))


def test_what_is_refused():
    text = export(CASES["two"], square())
    with pytest.raises(CompileError, match="LAPACK's getrf is not supported on target cuda:sm_90a"):
        aotc.compile(text, target=GPU, host_fallback=False)
    with pytest.raises(CompileError, match="transfers between devices: found 2, expected at most 1"):
        aotc.compile(text, target=GPU, max_transfers=1)
    with pytest.raises(CompileError, match="the host's target is 'cuda'"):
        aotc.compile(text, target=GPU, host_target="cuda")


def test_the_target_of_the_host():
    text = export(CASES["det"], square())
    for target, asked, want in (
        (GPU, "", "cpu:x86-64-v3"),
        (GPU, "cpu:x86-64-v2", "cpu:x86-64-v2"),
        (f"cpu:x86-64-v4,cpu:x86-64-v2,{GPU}", "", "cpu:x86-64-v2"),
    ):
        parts = kinds(aotc.compile(text, target=target, host_target=asked))[0]["parts"]
        assert parts[0]["target"] == want


def test_what_is_not_read_needs_no_host():
    text = export(lambda x: jnp.linalg.svd(x, compute_uv=False), square())
    other = "%c = stablehlo.constant dense<1.0> : tensor<4xf64> return %c : tensor<4xf64>"
    text = text.replace("return %0 : tensor<4xf64>", other)
    (variant,) = open_bundle(aotc.compile(text, target=GPU)).manifest["variants"]
    assert "spaces" not in variant
