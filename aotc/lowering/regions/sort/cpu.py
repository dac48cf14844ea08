"""Lower ``sort``: one grid item per row of the sorted dim.

Rows are sorted by the bytes of their keys (radix sort), or by merging if the comparator has no keys or rows are short.
A result that is not read has a buffer of one row, in thread-local scratch.
"""

from __future__ import annotations

from aotc.ir.dims.algebra import Dim, maximum, minimum, product, sym
from aotc.ir.loop.ir import Alloc, Apply, Buffer, For, If, Kernel, Load, Space, Stmt, Store, While
from aotc.ir.loop.ir import Index as IndexScalar
from aotc.ir.tensor.ir import Op, Value
from aotc.lowering.analysis.sort_keys import sort_keys
from aotc.lowering.cost_model.work import DIGIT_WORK, MERGE_WORK
from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.elements.elements import Elements
from aotc.lowering.elements.row_axis import Place, rows_along_dim
from aotc.lowering.plans.cpu_sort import MergeSortPlan, RadixSortPlan
from aotc.lowering.regions.sort.cpu_radix import Cell, Cells, RadixSort, i64_literal, sort_key_words
from aotc.lowering.threshold import Estimate


def lower_radix_sort(b: RegionBuilder, plan: RadixSortPlan) -> Kernel:
    """Lower a sort to a radix sort of each row between the result and a buffer; the first pass reads the operand.

    Rows that the plan copies are copied while their bytes are counted.
    """
    op, e = b.region_root_op("sort"), b.elements()
    keys = sort_keys(op.regions[0])
    assert keys is not None
    words = sort_key_words(e, op, keys)
    dim, shape = op.attrs["dim"], op.results[0].type.shape
    n = shape[dim]
    rows, place = rows_along_dim(shape, dim)
    buffers: list[Buffer] = []

    def rows_of_value(v: Value) -> Cell:
        buffers.append(Buffer(b.fresh("run"), v.type.dtype, (maximum(n, 1),), "scratch"))
        return buffers[-1], (0,)

    e.new_block()
    source: list[Cell] = []
    copies: list[Buffer | None] = []
    for number, v in enumerate(op.operands):
        if number in plan.copied:
            source.append(rows_of_value(v))
            copies.append(source[-1][0])
            continue
        x = e.at(v, place(0))
        assert isinstance(x, Load)
        source.append((x.buffer, x.index))
        copies.append(None)
    outs = [b.output_buffer_of(v) for v in op.results]
    # Sorted rows end in the result itself, or in scratch memory that is copied to the result.
    ends: list[Cell] = [
        (out, place(0)) if out is not None and plan.in_place else rows_of_value(v)
        for v, out in zip(op.results, outs, strict=True)
    ]
    places = [(end, rows_of_value(v)) for v, end in zip(op.results, ends, strict=True)]
    sort = RadixSort(b, e, words, places, n, source)
    body: list[Stmt] = [*map(Alloc, buffers), *sort.allocate_buffers()]
    some = sort.sort_statements(lambda k: [e.at(v, place(k)) for v in op.operands], n, copies)
    body += some if isinstance(n, int) else [If(Apply("lt", (i64_literal(0), IndexScalar(n)), "i1"), tuple(some))]
    if not plan.in_place:
        k = sym(b.fresh("k"), 0, n)
        pairs = zip(outs, ends, strict=True)
        stores = [Store(out, place(k), Load(end, (k,))) for out, (end, _) in pairs if out is not None]
        body.append(For(str(k), 0, n, tuple(stores)))
    return b.grid(rows, body, product(shape) * sum(word.bytes for word in words) * DIGIT_WORK.value)


def _sorted_result_rows(b: RegionBuilder, op: Op, place: Place, n: Dim, space: Space) -> tuple[Cells, list[Buffer]]:
    """Return the rows of the results, and buffers allocated for results that no op reads."""
    unread: list[Buffer] = []
    rows: Cells = []
    for v in op.results:
        out = b.output_buffer_of(v)
        if out is None:
            unread.append(Buffer(b.fresh("held"), v.type.dtype, (maximum(n, 1),), space))
        rows.append((out, place) if out is not None else (unread[-1], lambda k: (k,)))
    return rows, unread


def _rows_of_sort_buffers(buffers: list[Buffer]) -> Cells:
    return [(buffer, lambda k: (k,)) for buffer in buffers]


SORT_WORK = Estimate(
    128,
    "scalar operations counted per element of a merge sort of unknown length",
    "16 passes, as for rows of 65536",
)


def lower_merge_sort(b: RegionBuilder, plan: MergeSortPlan) -> Kernel:
    """Lower a stable bottom-up merge sort: runs of 1, 2, 4... between the result and a second buffer."""
    op = b.region_root_op("sort")
    dim = op.attrs["dim"]
    shape = op.results[0].type.shape or (1,)
    n = shape[dim]
    rows, place = rows_along_dim(shape, dim)
    scalar = op.results[0].type.rank == 0
    space: Space = "private" if plan.private else "scratch"
    own, unread = _sorted_result_rows(b, op, (lambda k: ()) if scalar else place, n, space)
    spare = [Buffer(b.fresh("run"), v.type.dtype, (maximum(n, 1),), space) for v in op.results]
    other = _rows_of_sort_buffers(spare)
    passes = max(n - 1, 0).bit_length() if isinstance(n, int) else 2
    e = b.elements()
    body: list[Stmt] = [Alloc(buffer) for buffer in (*unread, *(spare if passes else ()))]
    # Each pass swaps source and target; the first source is such that the last pass writes the result.
    source, target_run = (own, other) if passes % 2 == 0 else (other, own)
    copied = e.new_block()
    k = b.fresh("k")
    at = sym(k, 0, n)
    values = [e.at(v, () if scalar else place(at)) for v in op.operands]
    copied += [Store(buffer, where(at), v) for (buffer, where), v in zip(source, values, strict=True)]
    body.append(For(k, 0, n, tuple(copied)))
    if not isinstance(n, int):
        _merge_until_sorted(b, e, op, (own, other), n, body)
        return b.grid(rows, body, product(shape) * SORT_WORK.value)
    for step in range(passes):
        _merge_pass(b, e, op, (source, target_run), n, 1 << step, body)
        source, target_run = target_run, source
    return b.grid(rows, body, product(shape) * max(passes, 1) * MERGE_WORK.value)


def _merge_until_sorted(
    b: RegionBuilder, e: Elements, op: Op, runs: tuple[Cells, Cells], n: Dim, block: list[Stmt]
) -> None:
    """Emit the loop that merges to the buffer and back until one run is left.

    Rows that are sorted already are only copied.
    """
    width = Buffer(b.fresh("width"), "i64", (), "private")
    iteration = e.new_block()
    own = e.bind(Load(width, ()), "w")
    reach = sym(own.name, 1)
    _merge_pass(b, e, op, runs, n, reach, iteration)
    _merge_pass(b, e, op, runs[::-1], n, reach * 2, iteration)
    iteration.append(Store(width, (), Apply("mul", (own, i64_literal(4)), "i64")))
    more = Apply("lt", (Load(width, ()), IndexScalar(n)), "i1")
    block += [Alloc(width), Store(width, (), i64_literal(1)), While((), more, tuple(iteration))]


def _merge_pass(
    b: RegionBuilder, e: Elements, op: Op, runs: tuple[Cells, Cells], n: Dim, width: Dim, block: list[Stmt]
) -> None:
    """Emit the merge of neighbouring runs of ``width`` elements; of equal elements, the left run's come first."""
    left, right = (Buffer(b.fresh("at"), "i64", (), "private") for _ in range(2))
    r, k = b.fresh("r"), b.fresh("k")
    number = -(-n // (2 * width))
    begin = sym(r, 0, number) * (2 * width)
    middle, end = minimum(begin + width, n), minimum(begin + 2 * width, n)
    inner = e.new_block()
    i, j = e.bind(Load(left, ()), "n"), e.bind(Load(right, ()), "n")
    last = IndexScalar(n - 1)
    read = [sym(e.bind(Apply("min", (at, last), "i64"), "n").name, 0, n) for at in (i, j)]
    x, y = ([e.bind(Load(buffer, where(at))) for buffer, where in runs[0]] for at in read)
    (less,) = e.inline_region(op.regions[0], tuple(s for pair in zip(y, x, strict=True) for s in pair))
    spent = Apply("ge", (i, IndexScalar(middle)), "i1")
    more = Apply("lt", (j, IndexScalar(end)), "i1")
    take = e.bind(Apply("and", (more, Apply("or", (spent, less), "i1")), "i1"))
    for (buffer, where), a, c in zip(runs[1], x, y, strict=True):
        inner.append(Store(buffer, where(sym(k, 0, n)), Apply("select", (take, c, a), a.dtype)))
    for at, old, steps in ((left, i, (0, 1)), (right, j, (1, 0))):
        step = Apply("select", (take, i64_literal(steps[0]), i64_literal(steps[1])), "i64")
        inner.append(Store(at, (), Apply("add", (old, step), "i64")))
    block += [Alloc(left), Alloc(right)]
    heads = Store(left, (), IndexScalar(begin)), Store(right, (), IndexScalar(middle))
    block.append(For(r, 0, number, (*heads, For(k, begin, end, tuple(inner)))))
