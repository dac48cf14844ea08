"""Scatters on a GPU whose updates may be applied in parallel: a thread for each element of the updates.

If many updates go to few elements, threads would wait for each other at global memory. A block therefore combines its
updates in shared memory first, then each of its sums with the result. If all updates to an element are adjacent, one
thread applies them in order, whatever the combiner.
"""

from __future__ import annotations

from collections.abc import Sequence

from aotc.ir.dims.algebra import Dim, ceildiv, maximum, product, sym
from aotc.ir.loop.ir import Alloc, Apply, Barrier, Buffer, Const, For, If, Kernel, Load, Scalar, Stmt, Store, While
from aotc.ir.loop.ir import Index as IndexScalar
from aotc.lowering.analysis.index_maps import Index, delinearize, linearize
from aotc.lowering.analysis.prefix_scans import combiner_op_name, neutral_value
from aotc.lowering.cost_model.work import SCATTER_WORK
from aotc.lowering.elements.builder import RegionBuilder, grid_item, store_combined
from aotc.lowering.elements.elements import Elements, conjunction_of_tests, constant_scalar, test_index
from aotc.lowering.plans.gpu_scatters import (
    BlockScatterPlan,
    ParallelScatterPlan,
    RunScatterPlan,
    updated_elements,
)
from aotc.lowering.regions.scatter.places import combine_updates_into, place_of_update


def lower_parallel_scatter(b: RegionBuilder, plan: ParallelScatterPlan) -> Kernel:
    """Lower a scatter whose updates are disjoint or combine atomically."""
    op = b.region_root_op("scatter")
    updates, size = op.operands[len(op.inputs) + 1 :], updated_elements(op)
    if size == 0:
        return b.grid(0, [], 0)
    at = delinearize(grid_item(size), updates[0].type.shape)
    e = b.elements()
    body = e.new_block()
    where, tests = place_of_update(e, op, list(at))
    inner = e.new_block()
    values: list[Scalar] = [e.bind(e.at(u, at)) for u in updates]
    if plan.atomic:
        inner += _atomic_combination(b.outputs[0], where, values[0], combiner_op_name(op) or "")
    else:
        combine_updates_into(b, e, op, where, values)
    body += [If(conjunction_of_tests(tests), tuple(inner))] if tests else inner
    return b.grid(size, body, size * SCATTER_WORK.value)


def _atomic_combination(to: Buffer, at: Index, value: Scalar, name: str) -> Sequence[Stmt]:
    """Return the atomic combination of ``value`` with an element; a max or min without effect is skipped."""
    store = Store(to, at, value, name, atomic=True)
    compare = {"max": "gt", "min": "lt"}.get(name)
    return [store] if compare is None else [If(Apply(compare, (value, Load(to, at)), "i1"), (store,))]


def lower_run_scatter(b: RegionBuilder, plan: RunScatterPlan) -> Kernel:
    """Lower a scatter of sorted updates: the threads of a run's first update apply the whole run in order."""
    op = b.region_root_op("scatter")
    size = updated_elements(op)
    indices, update = op.operands[len(op.inputs) : len(op.inputs) + 2]
    count, width = update.type.shape[0], plan.lanes
    *lead, last = update.type.shape
    first, *window = delinearize(grid_item(size // width), (*lead, last // width))
    lane = b.fresh("u")
    u = sym(lane, 0, width) if width > 1 else 0
    window[-1:] = [w * width for w in window[-1:]]  # empty if a row has only one element
    e = b.elements()
    body = e.new_block()
    where, tests = place_of_update(e, op, [first, *window])

    def adjacent_index(at: Sequence[Dim]) -> Index:
        """Return the index of lane ``u`` of a thread's adjacent elements."""
        return (*at[:-1], at[-1] + u) if width > 1 else tuple(at)

    def loop_over_lanes(block: Sequence[Stmt]) -> list[Stmt]:
        return [For(lane, 0, width, tuple(block), "lanes")] if width > 1 else list(block)

    row, before = e.bind(e.at(indices, (first,))), e.at(indices, (maximum(first - 1, 0),))
    is_first = Apply("eq", (IndexScalar(first), Const(0, "i64")), "i1")
    begins = Apply("or", (is_first, Apply("ne", (before, row), "i1")), "i1")
    at = Buffer(b.fresh("at"), "i64", (), "private")
    test = e.new_block()
    next_ = e.bind(e.at(indices, (_load_index_below(e, at, count, count - 1),)))
    continue_while = Apply("lt", (Load(at, ()), IndexScalar(count)), "i1")
    own = (u,) if width > 1 else ()
    sums = [Buffer(b.fresh("sum"), out.dtype, (width,) if width > 1 else (), "private") for out in b.outputs]
    iteration = e.new_block()
    position = _load_index_below(e, at, count, None)
    one = e.new_block()
    place = adjacent_index((position, *window))
    store_combined(b, e, op, sums, [e.bind(e.at(x, place)) for x in op.operands[len(op.inputs) + 1 :]], [], own)
    iteration += [*loop_over_lanes(one), Store(at, (), Apply("add", (Load(at, ()), Const(1, "i64")), "i64"))]
    same = Apply("and", (continue_while, Apply("eq", (next_, row), "i1")), "i1")
    pairs = list(zip(sums, b.outputs, strict=True))
    run: list[Stmt] = [Alloc(buffer) for buffer in (at, *sums)]
    run += loop_over_lanes([Store(acc, own, Load(out, adjacent_index(where))) for acc, out in pairs])
    run += [Store(at, (), IndexScalar(first)), While(tuple(test), same, tuple(iteration))]
    run += loop_over_lanes([Store(out, adjacent_index(where), Load(acc, own)) for acc, out in pairs])
    body.append(If(conjunction_of_tests([*tests, begins]), tuple(run)))
    return b.grid(size // width, body, size * SCATTER_WORK.value)


def _load_index_below(e: Elements, at: Buffer, count: Dim, most: Dim | None) -> Dim:
    """Return the integer in ``at`` as an index below ``count``, limited to ``most`` if that is not None."""
    number: Scalar = Load(at, ())
    if most is not None:
        number = Apply("min", (number, IndexScalar(most)), "i64")
    return sym(e.bind(number, "n").name, 0, count)


def lower_block_scatter(b: RegionBuilder, plan: BlockScatterPlan) -> Kernel:
    """Lower a scatter to few elements: a block combines its updates in shared memory first."""
    op = b.region_root_op("scatter")
    size = updated_elements(op)
    (update,) = op.operands[len(op.inputs) + 1 :]
    out, name = b.outputs[0], combiner_op_name(op) or ""
    cells, threads, each = product(out.shape), plan.threads, plan.each
    assert isinstance(cells, int)
    items = ceildiv(size, threads * each)
    shared = Buffer(b.fresh("held"), out.dtype, (cells,), "shared")
    neutral = constant_scalar(neutral_value(name, out.dtype), out.dtype)  # type: ignore[arg-type]
    t, f = sym("t", 0, threads), sym("f", 0, cells)
    clear = For("f", t, cells, (Store(shared, (f,), neutral),), step=threads)
    flat = grid_item(items) * (threads * each) + sym("q", 0, each) * threads + t
    e = b.elements()
    one = e.new_block()
    at = delinearize(flat, update.type.shape)
    where, tests = place_of_update(e, op, list(at))
    inner = e.new_block()
    inner += _atomic_combination(shared, (linearize(where, out.shape),), e.bind(e.at(update, at)), name)
    one += [If(conjunction_of_tests(tests), tuple(inner))] if tests else inner
    in_bounds = test_index(flat, size, "lt")
    guarded = [If(conjunction_of_tests(in_bounds), tuple(one))] if in_bounds else one
    last = e.new_block()
    total = e.bind(Load(shared, (f,)))
    place = delinearize(f, out.shape)
    last.append(If(Apply("ne", (total, neutral), "i1"), (Store(out, place, total, name, atomic=True),)))
    body: list[Stmt] = [Alloc(shared), For("t", 0, threads, (clear,), "thread"), Barrier()]
    body += [For("t", 0, threads, (For("q", 0, each, tuple(guarded)),), "thread"), Barrier()]
    body.append(For("t", 0, threads, (For("f", t, cells, tuple(last), step=threads),), "thread"))
    return b.grid(items, body, size * SCATTER_WORK.value)
