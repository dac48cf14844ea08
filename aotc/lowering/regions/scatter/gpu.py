"""Scatters on a GPU whose updates may be applied in parallel: a thread for each element of the updates.

If many updates go to few elements, threads would wait for each other at global memory. A block therefore combines its
updates in shared memory first, then each of its sums with the result. If all updates to an element are adjacent, one
thread applies them in order, whatever the combiner.
"""

from __future__ import annotations

from collections.abc import Sequence

from aotc.ir.dims.algebra import Dim, ceildiv, maximum, mod, product, sym
from aotc.ir.loop.ir import Alloc, Apply, Barrier, Buffer, Const, For, If, Kernel, Load, Scalar, Stmt, Store, While
from aotc.ir.loop.ir import Index as IndexScalar
from aotc.ir.tensor.ir import Op
from aotc.lowering.analysis.index_maps import Index, delinearize, linearize
from aotc.lowering.analysis.parallel_scatters import is_apart, is_atomic
from aotc.lowering.analysis.prefix_scans import combiner, neutral_value
from aotc.lowering.cost_model.work import SCATTER_WORK
from aotc.lowering.elements.builder import RegionBuilder, combine, grid_item
from aotc.lowering.elements.elements import Elements, all_of, constant_scalar, test_index
from aotc.lowering.regions.scatter.places import combine_into, place_of_update
from aotc.lowering.threshold import BlockSize, Limit
from aotc.targets import Target
from aotc.vmfb.abi import GPU_ALIGNMENT
from aotc.vmfb.dtypes import size_of


def lower_scatter_cuda(b: RegionBuilder, op: Op) -> Kernel:
    """Lower a scatter whose updates are disjoint, combine atomically, or are sorted into runs."""
    updates = op.operands[len(op.inputs) + 1 :]
    size: Dim = 0 if 0 in op.operands[0].type.shape else product(updates[0].type.shape)
    if size == 0:
        return b.grid(0, [], 0)
    if not is_apart(op) and not is_atomic(op):
        return _along_runs(b, op, size)
    if not is_apart(op) and _is_crowded(op, size, b.target):
        return _in_blocks(b, op, size)
    at = delinearize(grid_item(size), updates[0].type.shape)
    e = b.elements()
    body = e.new_block()
    where, tests = place_of_update(e, op, list(at))
    inner = e.new_block()
    values: list[Scalar] = [e.bind(e.at(u, at)) for u in updates]
    if is_apart(op):
        combine_into(b, e, op, where, values)
    else:
        inner += _atomic(b.outputs[0], where, values[0], combiner(op) or "")
    body += [If(all_of(tests), tuple(inner))] if tests else inner
    return b.grid(size, body, size * SCATTER_WORK.value)


def _atomic(to: Buffer, at: Index, value: Scalar, name: str) -> Sequence[Stmt]:
    """Combine a value with an element atomically; a max or min that changes nothing is skipped."""
    store = Store(to, at, value, name, atomic=True)
    compare = {"max": "gt", "min": "lt"}.get(name)
    return [store] if compare is None else [If(Apply(compare, (value, Load(to, at)), "i1"), (store,))]


def _along_runs(b: RegionBuilder, op: Op, size: Dim) -> Kernel:
    """Combine the updates of a run in order, by the threads of its first update."""
    indices, update = op.operands[len(op.inputs) : len(op.inputs) + 2]
    count, width = update.type.shape[0], _run_lanes(op)
    *lead, last = update.type.shape
    first, *window = delinearize(grid_item(size // width), (*lead, last // width))
    lane = b.fresh("u")
    u = sym(lane, 0, width) if width > 1 else 0
    window[-1:] = [w * width for w in window[-1:]]  # empty if a row has only one element
    e = b.elements()
    body = e.new_block()
    where, tests = place_of_update(e, op, [first, *window])

    def beside(at: Sequence[Dim]) -> Index:
        """Return the index of lane ``u`` of a thread's adjacent elements."""
        return (*at[:-1], at[-1] + u) if width > 1 else tuple(at)

    def lanes(block: Sequence[Stmt]) -> list[Stmt]:
        return [For(lane, 0, width, tuple(block), "lanes")] if width > 1 else list(block)

    row, before = e.bind(e.at(indices, (first,))), e.at(indices, (maximum(first - 1, 0),))
    is_first = Apply("eq", (IndexScalar(first), Const(0, "i64")), "i1")
    begins = Apply("or", (is_first, Apply("ne", (before, row), "i1")), "i1")
    at = Buffer(b.fresh("at"), "i64", (), "private")
    test = e.new_block()
    next_ = e.bind(e.at(indices, (_held(e, at, count, count - 1),)))
    goes_on = Apply("lt", (Load(at, ()), IndexScalar(count)), "i1")
    own = (u,) if width > 1 else ()
    sums = [Buffer(b.fresh("sum"), out.dtype, (width,) if width > 1 else (), "private") for out in b.outputs]
    turn = e.new_block()
    here = _held(e, at, count, None)
    one = e.new_block()
    place = beside((here, *window))
    combine(b, e, op, sums, [e.bind(e.at(x, place)) for x in op.operands[len(op.inputs) + 1 :]], [], own)
    turn += [*lanes(one), Store(at, (), Apply("add", (Load(at, ()), Const(1, "i64")), "i64"))]
    same = Apply("and", (goes_on, Apply("eq", (next_, row), "i1")), "i1")
    pairs = list(zip(sums, b.outputs, strict=True))
    run: list[Stmt] = [Alloc(buffer) for buffer in (at, *sums)]
    run += lanes([Store(acc, own, Load(out, beside(where))) for acc, out in pairs])
    run += [Store(at, (), IndexScalar(first)), While(tuple(test), same, tuple(turn))]
    run += lanes([Store(out, beside(where), Load(acc, own)) for acc, out in pairs])
    body.append(If(all_of([*tests, begins]), tuple(run)))
    return b.grid(size // width, body, size * SCATTER_WORK.value)


def _run_lanes(op: Op) -> int:
    """Return the adjacent elements per thread: a vector if updates cover whole rows, else 1."""
    update = op.operands[len(op.inputs) + 1].type
    last = update.shape[-1]
    is_whole = update.rank > 1 and last == op.operands[0].type.shape[-1] and isinstance(last, int)
    width = GPU_ALIGNMENT // max(size_of(v.type.dtype) for v in op.results)
    return width if is_whole and width > 0 and mod(last, width) == 0 else 1


def _held(e: Elements, at: Buffer, count: Dim, most: Dim | None) -> Dim:
    """Return the integer in ``at``, which is below ``count``; at most ``most``, if that is passed."""
    number: Scalar = Load(at, ())
    if most is not None:
        number = Apply("min", (number, IndexScalar(most)), "i64")
    return sym(e.bind(number, "n").name, 0, count)


CROWDED_CELLS = Limit(
    4096,
    "elements of a scatter's result for which GPU blocks combine updates in shared memory",
    "32 KiB of i64; on an NVIDIA H200 a million sums into 1000 elements waited 80 us for each other",
)
CROWDED_UPDATES = Limit(
    (1 << 16) - 1,
    "updates of a scatter that go directly to GPU memory, however few elements the result has",
    "each of the blocks that fill the multiprocessors would clear and write all elements",
    unknown=True,
)


def _is_crowded(op: Op, size: Dim, target: Target) -> bool:
    """Return True if many updates go to few elements, which fit the shared memory of a block."""
    result = op.operands[0].type
    cells = product(result.shape)
    if not isinstance(cells, int) or not CROWDED_CELLS.holds(cells) or cells * size_of(result.dtype) > target.shared:
        return False
    return neutral_value(combiner(op) or "", op.results[0].type.dtype) is not None and not CROWDED_UPDATES.holds(size)


CROWDED_THREADS = BlockSize(
    512,
    "threads of a GPU block that combines updates in shared memory",
    "four blocks per multiprocessor",
)
CROWDED_EACH = BlockSize(8, "updates per thread of such a block", "256 blocks for a million updates")


def _in_blocks(b: RegionBuilder, op: Op, size: Dim) -> Kernel:
    """Combine the updates of a block in shared memory."""
    (update,) = op.operands[len(op.inputs) + 1 :]
    out, name = b.outputs[0], combiner(op) or ""
    cells, threads, each = product(out.shape), CROWDED_THREADS.value, CROWDED_EACH.value
    assert isinstance(cells, int)
    items = ceildiv(size, threads * each)
    held = Buffer(b.fresh("held"), out.dtype, (cells,), "shared")
    neutral = constant_scalar(neutral_value(name, out.dtype), out.dtype)  # type: ignore[arg-type]
    t, f = sym("t", 0, threads), sym("f", 0, cells)
    clear = For("f", t, cells, (Store(held, (f,), neutral),), step=threads)
    flat = grid_item(items) * (threads * each) + sym("q", 0, each) * threads + t
    e = b.elements()
    one = e.new_block()
    at = delinearize(flat, update.type.shape)
    where, tests = place_of_update(e, op, list(at))
    inner = e.new_block()
    inner += _atomic(held, (linearize(where, out.shape),), e.bind(e.at(update, at)), name)
    one += [If(all_of(tests), tuple(inner))] if tests else inner
    there = test_index(flat, size, "lt")
    guarded = [If(all_of(there), tuple(one))] if there else one
    last = e.new_block()
    total = e.bind(Load(held, (f,)))
    place = delinearize(f, out.shape)
    last.append(If(Apply("ne", (total, neutral), "i1"), (Store(out, place, total, name, atomic=True),)))
    body: list[Stmt] = [Alloc(held), For("t", 0, threads, (clear,), "thread"), Barrier()]
    body += [For("t", 0, threads, (For("q", 0, each, tuple(guarded)),), "thread"), Barrier()]
    body.append(For("t", 0, threads, (For("f", t, cells, tuple(last), step=threads),), "thread"))
    return b.grid(items, body, size * SCATTER_WORK.value)
