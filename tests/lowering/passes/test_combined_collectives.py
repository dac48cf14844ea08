"""combine_collectives: several small collectives become one call, with the same bits and in an order without cycles."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from support.rank_cases import run_threads
from support.sharded_models import CASES, GRID, LINE, check, f32, over, run_on_threads

import aotc
from aotc.frontend.importer import import_raw
from aotc.frontend.mlir import fetch
from aotc.ir.tensor.ir import walk
from aotc.lowering.passes.combine_collectives import LARGEST_CALL, LARGEST_OPERAND
from aotc.options import Options
from aotc.pipeline import PASSES, run_passes
from aotc.vmfb.ranks.collectives import Collective, run_collective
from aotc.vmfb.ranks.threads import thread_links

pytestmark = pytest.mark.cpu

BEFORE = [step.name for step in PASSES].index("combine-collectives")


def compiled(function, *args, combine=True, **options):
    """Compile with no optional pass but this one and those before it, or with those before it alone."""
    return aotc.compile(function, *args, bisect=BEFORE + combine, verify_each=True, source=False, **options)


def calls(function, *args, combine=True):
    """Return op and number of operands of each collective after the pass."""
    raw = fetch(function, args)
    module = run_passes(import_raw(raw), Options(bisect=BEFORE + combine, stop_after="combine-collectives"))
    names = {"all_reduce", "all_gather", "reduce_scatter"}
    every = [op for f in module.functions.values() for op in walk(f.body) if op.name in names]
    return [(op.name, len(op.operands)) for op in every]


def same_results(function, *args):
    """Return the calls of a function, whose results have the same bits on all ranks with and without the pass."""
    found = [compiled(function, *args, combine=combine) for combine in (True, False)]
    results = [run_on_threads(data, args) for data in found]
    for mine, other in zip(*results, strict=True):
        for x, want in zip(mine, other, strict=True):
            assert x.tobytes() == want.tobytes()
    assert all(count == 1 for _, count in calls(function, *args, combine=False))
    return calls(function, *args)


def on_line(function, *specs):
    return over(LINE, specs, P("data"))(function)


def test_independent_sums_become_one_call():
    def sums(x, y):
        a, b = lax.psum(x, "data"), lax.psum(y * 2, "data")
        return jnp.concatenate([a.sum(1) + b[0], a[:, 0] * b.sum()])

    assert same_results(on_line(sums, P("data"), P("data")), f32(16, 4), f32(8, 2)) == [("all_reduce", 2)]


def test_dependent_sums_stay_separate_calls():
    def sums(x):
        first = lax.psum(x, "data")
        return lax.psum(jnp.exp(-first * first) * x, "data") + lax.psum(x * x, "data") + first

    assert sorted(same_results(on_line(sums, P("data")), f32(16, 4))) == [("all_reduce", 1), ("all_reduce", 2)]


def test_combining_never_creates_a_cycle():
    """a and c of one kind, b and d of another; b needs a and c needs d: both pairs together would be a cycle."""

    def exchanges(x):
        a = lax.psum(x, "data")
        b = lax.pmax(jnp.cos(a), "data")
        d = lax.pmax(jnp.sin(x), "data")
        c = lax.psum(d * x, "data")
        return a + b + c + d

    found = same_results(on_line(exchanges, P("data")), f32(16, 4))
    assert sum(count for _, count in found) == 4
    assert len(found) == 3


@pytest.mark.parametrize(("other", "count"), [
    (lambda x: lax.psum(x.astype(jnp.float16), "data").astype(jnp.float32), 2),
    (lambda x: lax.pmax(x, "data"), 2),
    (lambda x: lax.all_gather(x, "data").sum(0), 2),
    (lambda x: lax.psum(x * 3, "data"), 1),
])  # fmt: skip
def test_only_collectives_of_one_kind_are_combined(other, count):
    def both(x):
        return lax.psum(x, "data") + other(jnp.sin(x))

    assert len(same_results(on_line(both, P("data")), f32(16, 4))) == count


def test_sums_over_different_ranks_stay_separate_calls():
    def sums(x):
        return lax.psum(x, "data") + lax.psum(x * x, "model")

    function = over(GRID, (P("data", "model"),), P("data", "model"))(sums)
    assert calls(function, f32(16, 8)) == [("all_reduce", 1), ("all_reduce", 1)]


def test_gathers_and_reduce_scatters_are_combined():
    def exchanges(x, y):
        gathered = lax.all_gather(x, "data", axis=1, tiled=True).sum() + lax.all_gather(y, "data", axis=1, tiled=True)
        parts = lax.psum_scatter(x.T, "data", tiled=True).sum() + lax.psum_scatter(y @ y.T, "data", tiled=True)
        return jnp.concatenate([gathered.reshape(-1), parts.reshape(-1)])

    found = same_results(on_line(exchanges, P("data"), P("data")), f32(16, 8), f32(64, 3))
    assert sorted(found) == [("all_gather", 2), ("reduce_scatter", 2)]


def test_sums_in_loops_and_branches_are_combined():
    def repeated(x):
        def step(c, _):
            a, b = lax.psum(jnp.sin(c), "data"), lax.psum(jnp.cos(c).sum(0), "data")
            return c * 0.5 + a * 1e-3 + b * 1e-3, None

        return lax.scan(step, x, None, length=3)[0]

    assert same_results(on_line(repeated, P("data")), f32(16, 4)) == [("all_reduce", 2)]


def test_large_operands_and_large_calls_are_not_combined():
    rows = LARGEST_OPERAND // 4
    count = LARGEST_CALL // LARGEST_OPERAND + 1

    def sums(x):
        small = [lax.psum(x[:rows] * k, "data") for k in range(count)]
        return sum(small) + lax.psum(x, "data")[:rows]

    found = calls(on_line(sums, P("data")), f32(8 * (rows + 1)))
    assert sorted(count for _, count in found) == [1, 1, LARGEST_CALL // LARGEST_OPERAND]


def test_gradients_of_a_model_share_collective_calls():
    """XLA gathers some weights twice: one call has each operand once."""
    case = CASES["training"]
    rows = {n: aotc.explain("collectives", case.compile(source=False, bisect=BEFORE + n)).rows for n in (0, 1)}
    assert 2 * len(rows[1]) < len(rows[0])
    assert sum(len(row.types) for row in rows[1]) == len(rows[0])
    check(case, run_on_threads(case.compile(source=False), case.args))


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize("dtypes", [(np.float32, np.float32), (np.float16, np.float16), (np.float32, np.int32)])
@pytest.mark.parametrize("rows", [0, 8])
def test_combined_calls_give_the_bits_of_single_calls(op, dtypes, rows):
    groups = ((3, 0), (1, 2))
    c = Collective(op, 0, groups, reduction="" if op == "all_gather" else "add")
    shapes = [(8, 3), (rows, 2)]

    def work(link):
        random = np.random.default_rng(link.rank)
        xs = [(random.standard_normal(s) * 100).astype(d) for s, d in zip(shapes, dtypes)]
        factor = {"all_gather": 2, "all_reduce": 1, "reduce_scatter": 0.5}[op]
        results = [[np.ones((int(x.shape[0] * factor), *x.shape[1:]), x.dtype) for x in xs] for _ in range(2)]
        run_collective(c, link, xs, results[0])
        for x, out in zip(xs, results[1]):
            run_collective(c, link, [x], [out])
        return [a.tobytes() == b.tobytes() for a, b in zip(*results)]

    assert run_threads(thread_links(4), work) == [[True, True]] * 4
