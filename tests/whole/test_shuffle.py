"""Random schedules: results are the same bits, and what ran after what is right, whatever order a seed makes."""

import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from support.schedules.trials import Watched, check_order, random_dag, trial
from support.small_models import array

import aotc
from aotc.lowering.cost_model.model import Costs
from aotc.lowering.program import tile_dependences as tile_edges
from aotc.options import Options
from aotc.vmfb import abi

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("bundles_anew")]

PROGRAMS = Path(__file__).parents[1] / "support" / "programs"
DIAMOND = (PROGRAMS / "diamond.mlir").read_text().replace("1024x1024", "96x96")
LOOP = """
func.func public @main(%x: tensor<64x64xf32>, %n: tensor<i32>) -> (tensor<64x64xf32>, tensor<64x64xf32>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %r:3 = stablehlo.while(%i = %zero, %a = %x, %b = %x) : tensor<i32>, tensor<64x64xf32>, tensor<64x64xf32>
    cond {
      %c = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %c : tensor<i1>
    } do {
      %p = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0]
        : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
      %q = stablehlo.tanh %p : tensor<64x64xf32>
      %m = stablehlo.dot_general %b, %x, contracting_dims = [1] x [0]
        : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
      %s = stablehlo.sine %m : tensor<64x64xf32>
      %j = stablehlo.add %i, %one : tensor<i32>
      stablehlo.return %j, %q, %s : tensor<i32>, tensor<64x64xf32>, tensor<64x64xf32>
    }
  return %r#1, %r#2 : tensor<64x64xf32>, tensor<64x64xf32>
}
"""
THREADS = 4
CLAIMS = 1 << 15


def some_seeds(few: int, many: int) -> list:
    return [pytest.param(few, id="few"), pytest.param(many, id="many", marks=pytest.mark.slow)]


def run_shuffled(text, name, arguments, seeds, level):
    """Call a model with each seed; return how many different orders of its claims there were."""
    return run_bundle(aotc.compile(text, options=Options(opt_level=level)), name, arguments, seeds)


def run_bundle(data, name, arguments, seeds):
    want = [x.tobytes() for x in aotc.load(data, threads=1).invoke(name, *arguments)]
    watched = Watched(data, THREADS)
    orders: set = set()
    with trial(CLAIMS) as chance:
        for seed in seeds:
            chance.shuffle(seed)
            got = watched.module.invoke(name, *arguments)
            claims = chance.claims()
            if not orders:  # results are placed anew in each call, but what depends on what stays
                conflicts, items = watched.conflicts(), watched.items()
            assert [x.tobytes() for x in got] == want, seed
            assert claims
            check_order(claims, conflicts, items, not watched.overlaps)
            orders.add(tuple((claim.command, claim.first) for claim in claims))
    return len(orders)


@pytest.mark.parametrize("level", [0, 2])
@pytest.mark.parametrize("seeds", some_seeds(40, 1000))
def test_shuffled_schedules_of_a_diamond_have_the_same_bits(seeds, level):
    arguments = array(96, 96, scale=0.1), array(64, 32, seed=1)
    assert run_shuffled(DIAMOND, "diamond", arguments, range(seeds), level) > seeds // 2


@pytest.mark.parametrize("seeds", some_seeds(40, 1000))
def test_shuffled_schedules_of_random_graphs_have_the_same_bits(seeds):
    arguments = array(24, 24, scale=0.1), array(24, 24, seed=1, scale=0.1)
    each, orders = 20, 0
    for first in range(0, seeds, each):
        level = first // each % 2
        orders += run_shuffled(random_dag(first), "main", arguments, range(first, first + each), level)
    assert orders > seeds // 2


@pytest.mark.parametrize("seeds", some_seeds(20, 200))
def test_shuffled_schedules_of_a_loop_have_the_same_bits(seeds):
    assert run_shuffled(LOOP, "main", (array(64, 64, scale=0.1), np.int32(5)), range(seeds), 2) > seeds // 2


def loops_and_branches(x, w, p):
    def iterations(x):
        return jax.lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c @ w * 0.1), x)

    def arm(x):
        return jax.lax.cond(p > 0, lambda: jnp.sin(iterations(x) @ w), lambda: jnp.cos(x @ w))

    left, right = iterations(x), arm(x + 1)
    return left @ right, iterations(left) - arm(right), jnp.sort(x @ w)


@pytest.mark.parametrize("seeds", some_seeds(20, 300))
def test_shuffled_schedules_of_loops_and_branches_have_the_same_bits(seeds):
    arguments = array(128, 128, scale=0.1), array(128, 128, seed=1, scale=0.1), np.float32(1)
    text = export.export(jax.jit(loops_and_branches))(*arguments).mlir_module()
    assert Watched(aotc.compile(text), THREADS).calls(arguments).overlaps
    assert run_shuffled(text, "main", arguments, range(seeds), 2) > seeds // 2


def sorts(x):
    for _ in range(3):
        x = jnp.sort(jnp.tanh(x), -1)
    return x


@pytest.mark.parametrize("seeds", some_seeds(20, 300))
def test_shuffled_schedules_of_tiles_have_the_same_bits(seeds, monkeypatch):
    monkeypatch.setattr(tile_edges, "tile_edge_pays", lambda *_: True)
    monkeypatch.setattr(Costs, "is_serial", lambda *_: False)
    arguments = (array(300, 96),)
    data = aotc.compile(sorts, *arguments)
    watched = Watched(data, THREADS).calls(arguments)
    assert any(node.tiled for node, *_ in watched.nodes() if isinstance(node, abi.Graph))
    assert run_bundle(data, "main", arguments, range(seeds)) > seeds // 2


def test_a_missing_edge_is_found():
    """The last command of the graph begins when the graph does; results may happen to be right all the same."""
    watched = Watched(aotc.compile(random_dag(3), options=Options(opt_level=0)), THREADS)
    arguments = array(24, 24), array(24, 24, seed=1)
    watched.module.invoke("main", *arguments)
    conflicts, items = watched.conflicts(), watched.items()
    (number, _, _), last = watched.submissions[0], max(items)
    buffer = watched.executable._buffers[number]
    assert last in dict(zip([b for _, b in conflicts], conflicts))
    buffer.words[(last - buffer.address) // 8 + abi.PREDECESSORS] = 0
    found = 0
    with trial(CLAIMS) as chance:
        for seed in range(20):
            chance.shuffle(seed)
            watched.module.invoke("main", *arguments)
            try:
                check_order(chance.claims(), conflicts, items)
            except AssertionError as error:
                found += "before one that it depends on" in str(error)
    assert found > 10


def test_a_seed_gives_the_same_order_on_one_thread():
    watched = Watched(aotc.compile(DIAMOND), 1)
    arguments = array(96, 96, scale=0.1), array(64, 32, seed=1)
    orders = []
    with trial(CLAIMS) as chance:
        for seed in (5, 6, 5):
            chance.shuffle(seed)
            watched.module.invoke("diamond", *arguments)
            orders.append([(c.run, c.command, c.first, c.last) for c in chance.claims()])
    assert orders[0] == orders[2] != orders[1]


def test_more_claims_than_recorded_are_an_error():
    module = aotc.load(aotc.compile(DIAMOND), threads=2)
    with trial(4) as chance:
        chance.shuffle(0)
        module.invoke("diamond", array(96, 96), array(64, 32))
        with pytest.raises(OverflowError, match="4 are recorded"):
            chance.claims()


CHILD = """
import sys, numpy as np, aotc
module = aotc.load(sys.argv[1], threads=2)
a = np.load(sys.argv[2])
print(all(module.invoke("diamond", a, a[:64, :32])[0].tobytes() == np.load(sys.argv[3]).tobytes() for _ in range(20)))
"""


@pytest.mark.parametrize(("seed", "said"), [("7", "True"), ("x", "AOTC_SHUFFLE is not a seed")])
def test_the_environment_variable_shuffles_schedules(tmp_path, seed, said):
    a = array(96, 96, scale=0.1)
    bundle, argument, want = tmp_path / "d.vmfb", tmp_path / "a.npy", tmp_path / "want.npy"
    bundle.write_bytes(aotc.compile(DIAMOND))
    np.save(argument, a)
    np.save(want, aotc.load(bundle, threads=1).invoke("diamond", a, a[:64, :32])[0])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "AOTC_SHUFFLE": seed}
    command = [sys.executable, "-c", CHILD, *map(str, (bundle, argument, want))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert said in done.stdout + done.stderr


def test_a_slow_thread_changes_no_result():
    """How little it runs is in tests/kernels/executor/test_executor_balance.py; what threads do is counted."""
    data = aotc.compile(DIAMOND)
    x = array(96, 96, scale=0.1), array(64, 32, seed=1)
    module = aotc.load(data, threads=2)
    want = [r.tobytes() for r in module.invoke("diamond", *x)]
    before = module.stats()
    with trial(CLAIMS) as slow:
        for who in (0, 1):
            slow.slow_down(who, 10)
            for _ in range(5):
                assert [r.tobytes() for r in module.invoke("diamond", *x)] == want
                assert slow.claims()
    after = module.stats()
    assert all(after[name] >= before[name] >= 0 for name in ("steals", "idle", "wakeups"))


def owners(watched, claims):
    """Return pairs of the participant whose command it is and the one that claimed from it, without stealing."""
    numbers = {at: n for graph in watched.graphs(tiled=True) for n, at in enumerate(sorted(graph))}
    return {(numbers[c.command] % THREADS, c.who) for c in claims}


def check_owners(data, name, arguments):
    """Results are the same without stealing, and each command of a graph is run by one participant."""
    want = [x.tobytes() for x in aotc.load(data, threads=1).invoke(name, *arguments)]
    watched = Watched(data, THREADS)
    with trial(CLAIMS) as chance:
        chance.forbid_stealing(THREADS)
        for _ in range(20):
            assert [x.tobytes() for x in watched.module.invoke(name, *arguments)] == want
            found = owners(watched, chance.claims())
            assert {owner for owner, _ in found} == set(range(THREADS))
            assert all(owner == who for owner, who in found)


def test_without_stealing_each_command_is_run_by_one_thread(monkeypatch):
    monkeypatch.setattr(Costs, "is_serial", lambda *_: False)
    check_owners(aotc.compile(DIAMOND), "diamond", (array(96, 96, scale=0.1), array(64, 32, seed=1)))


def test_without_stealing_tiles_are_run_by_one_thread(monkeypatch):
    monkeypatch.setattr(tile_edges, "tile_edge_pays", lambda *_: True)
    monkeypatch.setattr(Costs, "is_serial", lambda *_: False)
    check_owners(aotc.compile(sorts, array(300, 96)), "main", (array(300, 96),))


def test_without_stealing_loops_and_branches_end():
    arguments = array(128, 128, scale=0.1), array(128, 128, seed=1, scale=0.1), np.float32(1)
    data = aotc.compile(loops_and_branches, *arguments)
    want = [x.tobytes() for x in aotc.load(data, threads=1).invoke("main", *arguments)]
    module = aotc.load(data, threads=THREADS)
    with trial() as chance:
        chance.forbid_stealing(THREADS)
        for _ in range(20):
            assert [x.tobytes() for x in module.invoke("main", *arguments)] == want


def test_a_slow_command_takes_longer(monkeypatch):
    monkeypatch.setattr(Costs, "is_serial", lambda *_: False)
    watched = Watched(aotc.compile(DIAMOND), 2)
    arguments = array(96, 96, scale=0.1), array(64, 32, seed=1)
    with trial(CLAIMS) as chance:

        def seconds():
            start = time.perf_counter()
            watched.module.invoke("diamond", *arguments)
            return time.perf_counter() - start

        plain = min(seconds() for _ in range(10))
        (graph,) = watched.graphs()
        chance.slow_down_command(min(graph), 3000)
        assert seconds() > 3 * plain


def test_items_of_a_slow_command_are_stolen(monkeypatch):
    """One branch ten times as slow: a thread runs more of it than its share, sooner or later."""
    monkeypatch.setattr(Costs, "is_serial", lambda *_: False)
    watched = Watched(aotc.compile(DIAMOND.replace("96x96", "256x256")), 2)
    arguments = array(256, 256, scale=0.1), array(64, 32, seed=1)
    watched.module.invoke("diamond", *arguments)
    (graph,) = watched.graphs()
    with trial(CLAIMS) as chance:
        chance.slow_down_command(min(graph), 10)
        for _ in range(100):
            before = watched.module.stats()["steals"]
            watched.module.invoke("diamond", *arguments)
            if watched.module.stats()["steals"] > before:
                return
    raise AssertionError("nothing was stolen")
