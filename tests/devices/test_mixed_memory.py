"""What programs for several memories take of each, and under a limit on all of them."""

import jax
import numpy as np
import pytest
from devices.mixes import HALVES, alone, run_everywhere, simulate
from devices.test_mixed_programs import COMPUTED
from lowering.test_devices import FIRST, SECOND, T, product, to
from support.small_models import array
from vmfb.simulated_gpu import install

import aotc
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.verify.buffers import load_command_buffers

pytest.importorskip("numba_cuda")
pytestmark = pytest.mark.cudasim

COUNT = 5
PRODUCTS = "\n".join(f"%a{n} = {product(f'%a{n - 1}' if n else '%x', '%x')}" for n in range(COUNT))
MORE = "\n".join(f"""%t{n} = {to("d1", f"%a{n}")}
  %b{n} = {product(f"%t{n}", f"%b{n - 1}" if n else "%w")}""" for n in range(COUNT))  # fmt: skip
MOVED = f"""func.func public @main(%x: {T} {FIRST}, %w: {T} {SECOND}) -> {T} {{
  {PRODUCTS}
  {MORE}
  return %b{COUNT - 1} : {T} }}"""


def graphs(data):
    """How many graphs the command buffers have, and what a call takes of the memory of which it takes most."""
    bundle = open_bundle(data)
    (variant,) = bundle.manifest["variants"]
    memory = variant["memory"]["main"]
    arenas = [row["arena"] for row in variant["spaces"]]
    assert memory["arena"] == variant["arena_peak"] == sum(arenas)
    return sum(map(len, load_command_buffers(bundle, variant).nodes)), max(arenas) + memory["scratch"]


@pytest.mark.parametrize("halves", HALVES)
def test_the_order_goes_to_and_fro_for_a_limit_alone(halves, monkeypatch):
    """The products of a device are one graph as long as there is room for all of them."""
    free = aotc.compile(MOVED, devices=HALVES[halves], verify_each=True)
    count, peak = graphs(free)
    limit = 4 * peak // 5
    small = aotc.compile(MOVED, devices=HALVES[halves], verify_each=True, memory_limit=limit)
    more, less = graphs(small)
    assert count == COUNT + 2 < more
    assert less <= limit
    arrays = [np.eye(8, dtype=np.float32), np.arange(64, dtype=np.float32).reshape(8, 8)]
    run_everywhere(monkeypatch, small, arrays, alone(MOVED, *arrays))


def test_a_limit_that_cannot_be_kept_is_that_of_one_memory():
    with pytest.raises(aotc.CompileError, match=r"needs \d+ bytes( on d1)?, \d+ more than the memory limit of 300;"):
        aotc.compile(MOVED, devices=HALVES["cpu, cuda"], memory_limit=300)


@pytest.mark.parametrize("halves", HALVES)
def test_marks_of_each_device(halves, monkeypatch):
    module = simulate(monkeypatch, MOVED, HALVES[halves])
    memory = module.stats()["memory"]
    kinds = {place.partition(":")[0] for place in memory}
    assert kinds == {part["kind"] for part in module._bundle.manifest["variants"][0]["parts"]}
    for place, row in memory.items():
        assert row["high_water"] > 0 or place == "cpu"
        assert 0 <= row["in_use"] <= row["high_water"]


SORTS = f"""func.func public @main(%x: tensor<32x2000xf32> {FIRST}, %i: tensor<32x2000xi32> {FIRST}, %w: {T} {SECOND})
    -> (tensor<32x2000xi32>, {T}) {{
  %0:2 = "stablehlo.sort"(%x, %i) <{{dimension = 1 : i64, is_stable = true}}> ({{
  ^bb0(%a: tensor<f32>, %b: tensor<f32>, %c: tensor<i32>, %d: tensor<i32>):
    %1 = stablehlo.compare LT, %a, %b, TOTALORDER : (tensor<f32>, tensor<f32>) -> tensor<i1>
    stablehlo.return %1 : tensor<i1>
  }}) : (tensor<32x2000xf32>, tensor<32x2000xi32>) -> (tensor<32x2000xf32>, tensor<32x2000xi32>)
  %2 = stablehlo.sine %w : {T}
  return %0#1, %2 : tensor<32x2000xi32>, {T} }}"""


def test_threads_of_the_host_keep_within_the_limit(monkeypatch):
    """One that has no room for its scratch memory takes no part; a GPU's threads have none of it."""
    free = aotc.compile(SORTS, devices=HALVES["cpu, cuda"])
    (variant,) = open_bundle(free).manifest["variants"]
    memory = variant["memory"]["main"]
    assert memory["scratch"] == max(k["scratch"] for k in variant["kernels"])
    limit = memory["arena"] + 2 * memory["scratch"]
    small = aotc.compile(SORTS, devices=HALVES["cpu, cuda"], memory_limit=limit)
    install(monkeypatch, small)
    assert aotc.load(small, threads=4).stats()["threads"] == 2
    assert aotc.load(small, threads=1).stats()["threads"] == 1
    assert aotc.load(free, threads=4).stats()["threads"] == 4
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((32, 2000)).astype(np.float32), np.ones((8, 8), np.float32)
    got = aotc.load(small, threads=4).invoke("main", x, np.tile(np.arange(2000, dtype=np.int32), (32, 1)), w)
    np.testing.assert_array_equal(got[0], np.argsort(x, axis=1, kind="stable"))


@pytest.fixture
def sized(monkeypatch):
    """A function of any number of rows on a GPU, and what a call of ten takes."""
    n = jax.export.symbolic_shape("n")[0]
    exported = jax.export.export(jax.jit(jax.nn.softmax))(jax.ShapeDtypeStruct((n, 16), "float32"))
    data = aotc.compile(exported, target="cuda:sm_90")
    install(monkeypatch, data)
    module = aotc.load(data)
    module.invoke("main", array(10, 16))
    return data, module.stats()["memory"]["cuda:0"]["high_water"] - module.stats()["constants_bytes"]


def test_a_gpu_keeps_within_the_limit(sized):
    """What is kept for plans of other sizes goes; nothing is wrong afterwards."""
    data, need = sized
    module = aotc.load(data, memory_limit=2 * need)
    for count in (10, 9, 8, 10, 7, 6, 5, 10, 10):
        x = array(count, 16, seed=count)
        for results in ("numpy", "device", "device"):
            (made,) = module.invoke("main", x, results=results)
            np.testing.assert_allclose(np.asarray(made), jax.nn.softmax(x), rtol=1e-5)
            del made
        row = module.stats()["memory"]["cuda:0"]
        assert row["in_use"] <= row["high_water"] <= 2 * need + module.stats()["constants_bytes"]
        assert row["limit"] == 2 * need
    assert module.trim() > 0
    assert module.stats()["memory"]["cuda:0"]["in_use"] == module.stats()["constants_bytes"]
    np.testing.assert_allclose(module.invoke("main", x)[0], jax.nn.softmax(x), rtol=1e-5)


def test_arrays_on_the_gpu_and_not(sized):
    """What a plan has for arrays of the process is given back where they are on the GPU now, and the other way."""
    data, need = sized
    module = aotc.load(data, memory_limit=need)
    x = array(10, 16)
    want = jax.nn.softmax(x)
    for _ in range(3):
        (made,) = module.invoke("main", x, results="device")
        np.testing.assert_allclose(made.numpy(), want, rtol=1e-5)
        np.testing.assert_allclose(module.invoke("main", made)[0], jax.nn.softmax(want), rtol=1e-5)
        (again,) = module.invoke("main", made, results="device")
        np.testing.assert_allclose(again.numpy(), jax.nn.softmax(want), rtol=1e-5)
        np.testing.assert_allclose(module.invoke("main", x)[0], want, rtol=1e-5)
        row = module.stats()["memory"]["cuda:0"]
        assert row["high_water"] <= need + module.stats()["constants_bytes"]


def test_a_call_that_takes_more_than_the_limit(sized):
    data, need = sized
    module = aotc.load(data, memory_limit=need)
    needs = r"needs [\d,]+ bytes of working memory on GPU 0(.|\n)*at most memory_limit"
    with pytest.raises(aotc.CallError, match=needs):
        module.invoke("main", array(11, 16))
    np.testing.assert_allclose(module.invoke("main", array(10, 16))[0], jax.nn.softmax(array(10, 16)), rtol=1e-5)


def test_calls_at_the_same_time_keep_within_the_limit(sized):
    data, need = sized
    module = aotc.load(data, memory_limit=need)
    fences = [module.submit("main", array(5 + n % 6, 16, seed=n), results="device") for n in range(30)]
    for n, fence in enumerate(fences):
        np.testing.assert_allclose(fence.result(60)[0].numpy(), jax.nn.softmax(array(5 + n % 6, 16, seed=n)), rtol=1e-5)
    assert module.stats()["memory"]["cuda:0"]["high_water"] <= need + module.stats()["constants_bytes"]


@pytest.mark.parametrize("halves", HALVES)
def test_each_memory_of_a_mix_has_the_limit(halves, monkeypatch):
    data = aotc.compile(MOVED, devices=HALVES[halves])
    install(monkeypatch, data, count=2)
    free = aotc.load(data)
    arrays = [np.eye(8, dtype=np.float32), np.arange(64, dtype=np.float32).reshape(8, 8)]
    want = alone(MOVED, *arrays)[0]
    free.invoke("main", *arrays)
    limit = max(256, *(row["high_water"] for place, row in free.stats()["memory"].items() if place != "cpu"))
    module = aotc.load(data, memory_limit=max(limit, 4096))
    fences = [module.submit("main", *arrays, results="numpy") for _ in range(12)]
    for fence in fences:
        np.testing.assert_allclose(fence.result(60)[0], want, rtol=1e-4)
    for row in module.stats()["memory"].values():
        assert row["high_water"] <= row["limit"] == max(limit, 4096)
    with pytest.raises(aotc.CallError, match="bytes of working memory"):
        aotc.load(data, memory_limit=64).invoke("main", *arrays)


@pytest.mark.parametrize("halves", HALVES)
def test_sizes_that_are_values_under_a_limit(halves, monkeypatch):
    """Calls that take memory bit by bit."""
    data = aotc.compile(COMPUTED, devices=HALVES[halves])
    install(monkeypatch, data, count=2)
    module, x = aotc.load(data, memory_limit=100_000), array(8)
    fences = [(n, module.submit("main", x, np.int32(n), results="numpy")) for n in (3, 0, 9, 3)]
    for n, fence in fences:
        want = np.concatenate([np.sin(x), np.full(n + 1, 1.5, "f4")])
        np.testing.assert_allclose(fence.result(60)[0], want, rtol=1e-5)
    with pytest.raises(aotc.CallError, match="bytes of working memory"):
        module.invoke("main", x, np.int32(100_000))
    np.testing.assert_allclose(module.invoke("main", x, np.int32(3), results="numpy")[0][:8], np.sin(x), rtol=1e-5)
