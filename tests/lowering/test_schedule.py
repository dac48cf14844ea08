"""Memory plans and dependency edges, against brute force on random programs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aotc.diagnostics import UNKNOWN
from aotc.ir.dims.algebra import static, sym
from aotc.ir.dims.symbols import evaluate
from aotc.ir.loop.ir import Kernel
from aotc.ir.program.ir import Copy, Launch, Storage
from aotc.lowering.cost_model.model import Costs
from aotc.lowering.program.plan_memory import plan_memory
from aotc.lowering.program.schedule import CommandBufferEncoder
from aotc.targets import TARGETS
from aotc.vmfb.abi import ALIGNMENT, Slots

pytestmark = pytest.mark.ir

B = sym("b", 1)
KERNEL = Kernel("k", (), (), (), 1, ())
SIZES = st.one_of(st.integers(0, 300), st.sampled_from([B * 4, B * 8, B * 4 + 64]))


def scheduler():
    return CommandBufferEncoder(Slots(0, 0), lambda k: 0, Costs(TARGETS["cpu:x86-64-v4"]))


@st.composite
def storages(draw, sizes=SIZES):
    first = draw(st.integers(0, 12))
    return Storage("arena", draw(sizes), first=first, last=first + draw(st.integers(0, 6)))


def together(a, b):
    return a.first <= b.last and b.first <= a.last


def span(s, b):
    at = evaluate(s.offset, {"b": b}) if not isinstance(s.offset, int) else s.offset
    size = evaluate(s.size, {"b": b}) if not isinstance(s.size, int) else s.size
    return int(at), int(at) + int(size)


@settings(max_examples=200, deadline=None)
@given(st.lists(storages(), max_size=14), st.integers(1, 90))
def test_storages_with_overlapping_lives_do_not_overlap(arena, b):
    total = plan_memory(arena)
    end = evaluate(total, {"b": b}) if not isinstance(total, int) else total
    for n, s in enumerate(arena):
        lo, hi = span(s, b)
        assert lo % ALIGNMENT == 0
        assert 0 <= lo <= hi <= end
        for t in arena[:n]:
            if together(s, t):
                lo2, hi2 = span(t, b)
                assert hi <= lo2 or hi2 <= lo or lo == hi or lo2 == hi2


@settings(max_examples=100, deadline=None)
@given(st.lists(storages(st.integers(1, 500)), min_size=1, max_size=12))
def test_the_arena_is_at_most_the_sum_of_all_storages(arena):
    total = static(plan_memory(arena))
    aligned = [-(-static(s.size) // ALIGNMENT) * ALIGNMENT for s in arena]
    assert max(aligned) <= total <= sum(aligned)


@st.composite
def programs(draw):
    """Launches and copies over an arena as plan_memory lays it out, arguments, results and constants."""
    arena = draw(st.lists(storages(), min_size=1, max_size=6))
    plan_memory(arena)
    fixed = [Storage("argument", 64, 0), Storage("argument", 64, 1), Storage("constant", 64, 0)]
    results = [Storage("result", 64, 0), Storage("result", 64, 1)]
    written = [*arena, *results]
    steps = []
    for _ in range(draw(st.integers(1, 10))):
        reads = tuple(draw(st.lists(st.sampled_from([*written, *fixed]), max_size=3)))
        if draw(st.booleans()):
            steps.append(
                Launch(KERNEL, reads, tuple(draw(st.lists(st.sampled_from(written), min_size=1, max_size=2))), UNKNOWN)
            )
        else:
            source = reads[0] if reads else fixed[0]
            steps.append(Copy(source, draw(st.sampled_from(written)), source.size))
    return steps


def reads_writes(step):
    return (step.reads, step.writes) if isinstance(step, Launch) else ((step.source,), (step.target,))


def meet(a, b, size):
    if a.kind != b.kind:
        return False
    if a.kind != "arena":
        return a.number == b.number
    (lo, hi), (lo2, hi2) = span(a, size), span(b, size)
    return lo < hi2 and lo2 < hi


@settings(max_examples=300, deadline=None)
@given(programs(), st.integers(1, 90))
def test_dependence_edges_cover_every_hazard(steps, size):
    edges = scheduler()._command_predecessors(steps)
    reach = []
    for n, preds in enumerate(edges):
        assert all(0 <= p < n for p in preds)
        reach.append({p for q in preds for p in (q, *reach[q])})
    for n, step in enumerate(steps):
        reads, writes = reads_writes(step)
        for m, earlier in enumerate(steps[:n]):
            before_reads, before_writes = reads_writes(earlier)
            hazard = any(meet(a, b, size) for a in before_writes for b in (*reads, *writes)) or any(
                meet(a, b, size) for a in before_reads for b in writes
            )
            assert not hazard or m in reach[n]


def test_readers_do_not_wait_for_each_other():
    x, y, z = (Storage("arena", 64, offset=64 * n) for n in range(3))
    steps = [
        Launch(KERNEL, (), (x,), UNKNOWN),
        Launch(KERNEL, (x,), (y,), UNKNOWN),
        Launch(KERNEL, (x,), (z,), UNKNOWN),
    ]
    assert scheduler()._command_predecessors(steps) == [[], [0], [0]]


def test_implied_edges_are_dropped():
    x, y = (Storage("arena", 64, offset=64 * n) for n in range(2))
    steps = [
        Launch(KERNEL, (), (x,), UNKNOWN),
        Launch(KERNEL, (x,), (y,), UNKNOWN),
        Launch(KERNEL, (y,), (x,), UNKNOWN),
    ]
    assert scheduler()._command_predecessors(steps) == [[], [0], [1]]
