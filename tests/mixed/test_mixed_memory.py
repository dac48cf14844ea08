"""What programs for several memories take of each, and under a limit on all of them."""

import numpy as np
import pytest
from lowering.test_devices import FIRST, SECOND, T, product, to
from mixed.mixes import HALVES, alone, run_everywhere, simulate
from vmfb.simulated_gpu import install

import aotc
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.devices.buffers import load_buffers

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
    """How many graphs the command buffers have, and what a call takes."""
    bundle = open_bundle(data)
    (variant,) = bundle.manifest["variants"]
    memory = variant["memory"]["main"]
    assert memory["arena"] == variant["arena_peak"]
    return sum(map(len, load_buffers(bundle, variant).nodes)), memory["arena"] + memory["scratch"]


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


def test_a_limit_that_cannot_be_kept_counts_all_memories():
    with pytest.raises(aotc.CompileError, match="the memory limit is 300;"):
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
    with pytest.raises(aotc.VmError, match="memory can be limited on the CPU only"):
        aotc.load(small, memory_limit=limit)
