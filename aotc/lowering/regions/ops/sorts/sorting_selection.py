"""top_k: the largest of each row, by insertion if they are few, else by cutting a buffer again and again.

The buffer takes in what is larger than the k-th largest so far. When it is full it is sorted and cut to ``k``, which
raises the limit: at least ``k`` elements come in between two cuts, so a row of ``n`` takes ``O(n)`` steps in any order.

Of values and their numbers only what somebody reads is written: a value follows from its number.
"""

from __future__ import annotations

from collections.abc import Sequence

from aotc.ir.dims import Dim, maximum, minimum, product, sym
from aotc.ir.loop_ir import Alloc, Apply, Buffer, Const, For, If, Kernel, Load, Scalar, Stmt, Store, Var, While
from aotc.ir.loop_ir import Index as IndexScalar
from aotc.ir.tensor_ir import Function, Op
from aotc.lowering.analysis.cost import INSERTED, INSERTED_ROW, SELECTION_SPARE
from aotc.lowering.analysis.costs.work import TOP_K_WORK
from aotc.lowering.regions.elemental import Elements
from aotc.lowering.regions.ops.sorts.sorting_radix import (
    Cells,
    Digit,
    RadixSort,
    integer,
    key_bytes,
    reader,
    unsigned_key,
)
from aotc.lowering.regions.region import RegionBuilder
from aotc.lowering.regions.rows import rows_of
from aotc.targets import Target
from aotc.vmfb.dtypes import kind_of


def lower_top_k(function: Function, target: Target) -> Kernel:
    """The k largest of each row, equal ones in their order; NaN is the largest."""
    b = RegionBuilder(function, target)
    op = b.the_op("top_k")
    top = op.attrs["k"]
    n = op.operands[0].type.shape[-1]
    few = INSERTED.holds(top) or INSERTED_ROW.holds(n) or target.kind == "cuda"
    return _by_insertion(b, op) if few else _by_selection(b, op)


def _by_selection(b: RegionBuilder, op: Op) -> Kernel:
    """Gather what is larger than the k-th largest so far; sort and cut whenever the buffer is full."""
    (x,) = op.operands
    e = b.elements()
    n, top = x.type.shape[-1], op.attrs["k"]
    room = top + maximum(top, SELECTION_SPARE.value)
    rows, place = rows_of(x.type.shape, x.type.rank - 1)
    outputs = [b.output_of(v) for v in op.results]
    kept = op.results[: 1 if outputs[1] is None else 2]
    own, other = ([Buffer(b.fresh("run"), v.type.dtype, (room,), "scratch") for v in kept] for _ in range(2))
    key_dtype = f"u{8 * key_bytes(x.type.dtype)}"
    limit, fill = Buffer("limit", key_dtype, (), "private"), Buffer("fill", "i64", (), "private")
    cut = Buffer("cut", "i1", (), "private")
    sort = _LargestFirst(b, e, own, other, room)
    body: list[Stmt] = [Alloc(buffer) for buffer in (*own, *other, limit, fill, cut)]
    body += [*sort.radix.allocate(), Store(fill, (), integer(0)), Store(cut, (), Const(False, "i1"))]
    body.append(Store(limit, (), Const(0, key_dtype)))
    i = sym("i", 0, n)
    each = e.new_block()
    value = e.bind(e.at(x, place(i)))
    larger = Apply("gt", (unsigned_key(e, value), Load(limit, ())), "i1")
    taken = e.new_block()
    at = e.bind(Load(fill, ()), "n")
    end = (sym(at.name, 0, room),)
    parts: tuple[Scalar, ...] = (value, IndexScalar(i, "i32"))
    taken += [Store(buffer, end, part) for buffer, part in zip(own, parts)]
    more = e.bind(Apply("add", (at, integer(1)), "i64"))
    taken.append(Store(fill, (), more))
    full = sort.sort(room)
    e.enter(full)
    least = unsigned_key(e, e.bind(Load(own[0], (top - 1,))))
    full += [Store(limit, (), least), Store(cut, (), Const(True, "i1")), Store(fill, (), IndexScalar(top))]
    taken.append(If(Apply("eq", (more, IndexScalar(room)), "i1"), tuple(full)))
    open_ = Apply("not", (Load(cut, ()),), "i1")
    each.append(If(Apply("or", (open_, larger), "i1"), tuple(taken)))
    body.append(_unless_none(top, For("i", 0, n, tuple(each))))
    e.enter(body)
    count = e.bind(Load(fill, ()), "n")
    body += sort.sort(sym(count.name, 0, room + 1))
    k = sym("k", 0, top)
    pairs = [(out, buffer) for out, buffer in zip(outputs, own) if out is not None]
    body.append(For("k", 0, top, tuple(Store(out, place(k), Load(buffer, (k,))) for out, buffer in pairs)))
    return b.grid(rows, body, product(x.type.shape) * TOP_K_WORK.value)


def _unless_none(top: Dim, stmt: Stmt) -> Stmt:
    """A buffer for none has no room."""
    return stmt if isinstance(top, int) else If(Apply("gt", (IndexScalar(top), integer(0)), "i1"), (stmt,))


class _LargestFirst:
    """Sorts the first rows of a buffer of values and their numbers, the largest value first."""

    def __init__(self, b: RegionBuilder, e: Elements, own: list[Buffer], other: list[Buffer], room: Dim) -> None:
        def key(values: Sequence[Scalar]) -> Scalar:
            return unsigned_key(e, values[0], ascending=False)

        count = key_bytes(own[0].dtype)
        self.radix, self.room = RadixSort(b, e, [Digit(key, 8 * n) for n in range(count)]), room
        self.runs: tuple[Cells, Cells] = ([(v, lambda k: (k,)) for v in other], [(v, lambda k: (k,)) for v in own])

    def sort(self, n: Dim) -> list[Stmt]:
        """Return the statements that sort the first ``n`` rows."""
        targets = [self.runs[k % 2] for k in range(len(self.radix.digits))]
        block = self.radix.sort(reader(self.runs[1]), targets, n, self.room)
        return block if len(targets) % 2 == 0 else [*block, self.radix.copy(reader(self.runs[0]), self.runs[1], n)]


def _by_insertion(b: RegionBuilder, op: Op) -> Kernel:
    """Insert each element into the k largest so far; one that is not among them costs one comparison."""
    (x,) = op.operands
    e = b.elements()
    n, top = x.type.shape[-1], op.attrs["k"]
    rows, place = rows_of(x.type.shape, x.type.rank - 1)
    values, numbers = (b.output_of(v) for v in op.results)
    hole = Buffer("hole", "i64", (), "private")
    i = sym("i", 0, n)
    each = e.new_block()
    own = e.bind(e.at(x, place(i)))
    key = unsigned_key(e, own)
    each.append(Store(hole, (), IndexScalar(minimum(i, top))))
    test = e.new_block()
    q, before = _hole(e, hole, top)
    if values is not None:
        found: Scalar = Load(values, place(before))
    else:
        assert numbers is not None
        number = e.bind(Apply("convert", (Load(numbers, place(before)),), "i64"), "n")
        found = e.at(x, place(sym(number.name, 0, n)))
    smaller = Apply("gt", (key, unsigned_key(e, e.bind(found))), "i1")
    moves = e.bind(Apply("and", (Apply("gt", (q, integer(0)), "i1"), smaller), "i1"))
    shift = e.new_block()
    q, before = _hole(e, hole, top)
    inside = Apply("lt", (q, IndexScalar(top)), "i1")
    at = place(sym(q.name, 0, top))
    shift.append(If(inside, tuple(Store(out, at, Load(out, place(before))) for out in b.outputs)))
    shift.append(Store(hole, (), Apply("sub", (q, integer(1)), "i64")))
    each.append(While(tuple(test), moves, tuple(shift)))
    e.enter(each)
    q = e.bind(Load(hole, ()), "n")
    at = place(sym(q.name, 0, top))
    parts = (values, own), (numbers, IndexScalar(i, "i32"))
    insert = tuple(Store(out, at, part) for out, part in parts if out is not None)
    each.append(If(Apply("lt", (q, IndexScalar(top)), "i1"), insert))
    body: list[Stmt] = [Alloc(hole)]
    compared = numbers if values is None else values
    if compared is not None and top != 0:  # the first element is compared with what is there
        zero = Const(0.0 if kind_of(compared.dtype) == "f" else 0, compared.dtype)
        body.append(_unless_none(top, Store(compared, place(0), zero)))
    body.append(For("i", 0, n if top != 0 else 0, tuple(each)))
    return b.grid(rows, body, product(x.type.shape) * TOP_K_WORK.value)


def _hole(e: Elements, hole: Buffer, top: Dim) -> tuple[Var, Dim]:
    """Bind the place where the new element would go, and the place before it (or 0)."""
    q = e.bind(Load(hole, ()), "n")
    less = Apply("max", (Apply("sub", (q, integer(1)), "i64"), integer(0)), "i64")
    return q, sym(e.bind(less, "n").name, 0, top)
