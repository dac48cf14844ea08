"""Lower ``top_k``: by insertion if k is small, else by repeatedly sorting and cutting a buffer.

The buffer collects elements larger than the k-th largest so far, the *limit*. When the buffer is full, it is sorted and
cut to ``k`` elements, which raises the limit. At least ``k`` elements are added between two cuts, so a row of ``n``
takes ``O(n)`` steps in any order.

Values and indices are only stored if they are read: a value can be loaded by its index.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

from aotc.ir.dims.algebra import Dim, ceildiv, maximum, minimum, product, sym
from aotc.ir.loop.ir import Alloc, Apply, Buffer, Const, For, If, Kernel, Load, Scalar, Stmt, Store, Var, While
from aotc.ir.loop.ir import Index as IndexScalar
from aotc.ir.opset.dim_attributes import dim_of
from aotc.ir.tensor.ir import Op, Value
from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.elements.elements import Elements
from aotc.lowering.elements.row_axis import Place, rows_along_dim
from aotc.lowering.plans.cpu_sort import InsertionPlan, SelectionPlan, first_tested_element
from aotc.lowering.regions.sort.cpu_radix import RadixSort, SortKeyWord, i64_literal, key_bytes, unsigned_key
from aotc.lowering.threshold import Estimate
from aotc.vmfb.dtypes import kind_of

TOP_K_WORK = Estimate(4, "scalar operations counted per element of a row")


def lower_selection(b: RegionBuilder, plan: SelectionPlan) -> Kernel:
    """Lower ``top_k`` by a buffer of elements above the k-th largest so far, sorted and cut when it is full.

    The loop has one iteration after the last block, which sorts the remaining elements.
    """
    op = b.region_root_op("top_k")
    (x,) = op.operands
    rows, place = rows_along_dim(x.type.shape, x.type.rank - 1)
    gathered = _TopKCandidates(b, op, place, plan)
    body = gathered.allocate_candidates()
    blocks = _TestedBlocks(gathered.e, x, place, gathered.limit, plan)
    some = blocks.loop_over_blocks(gathered.add_candidate, gathered.open, gathered.cut_to_largest)
    body += [*_if_k_is_positive(gathered.top, *some), *gathered.store_largest()]
    return b.grid(rows, body, product(x.type.shape) * TOP_K_WORK.value)


class _TopKCandidates:
    """Emit the buffer of candidates: with room for k elements, some spare ones and one block."""

    def __init__(self, b: RegionBuilder, op: Op, place: Place, plan: SelectionPlan) -> None:
        """Name the buffers of candidates, and the radix sort over them.

        ``top`` is k. The buffer is cut when it has more than ``full`` elements; ``room`` is its size. ``limit`` is the
        sort key of the k-th largest element so far, valid once ``has_limit`` is True, at the first cut. ``fill`` is the
        number of elements in the buffer. Until the first cut (``open``) every element is a candidate.
        """
        self.b, self.e, self.x, self.top, self.place = b, b.elements(), op.operands[0], dim_of(op.attrs, "k"), place
        dtype = self.x.type.dtype
        self.outputs = [b.output_buffer_of(v) for v in op.results]
        read = op.results[: 1 if self.outputs[1] is None else 2]
        self.full = self.top + maximum(self.top, plan.spare)
        self.room = self.full + plan.block
        runs = [[Buffer(b.fresh("run"), v.type.dtype, (self.room,), "scratch") for _ in range(2)] for v in read]
        self.runs = [*chain(*runs)]
        word = SortKeyWord(lambda values: values[0], key_bytes(dtype), ascending=False)
        self.radix = RadixSort(b, self.e, [word], [((one, (0,)), (two, (0,))) for one, two in runs], self.room)
        self.limit = Buffer("limit", f"u{8 * key_bytes(dtype)}", (), "private")
        self.fill, self.has_limit = Buffer("fill", "i64", (), "private"), Buffer("cut", "i1", (), "private")
        self.open = Apply("not", (Load(self.has_limit, ()),), "i1")

    def allocate_candidates(self) -> list[Stmt]:
        """Return the allocations of the candidate buffer, with initial values."""
        stmts: list[Stmt] = [Alloc(buffer) for buffer in (*self.runs, self.limit, self.fill, self.has_limit)]
        stmts += [Store(self.fill, (), i64_literal(0)), Store(self.has_limit, (), Const(False, "i1"))]
        return [*stmts, Store(self.limit, (), Const(0, self.limit.dtype)), *self.radix.allocate_buffers()]

    def add_candidate(self, i: Dim) -> list[Stmt]:
        """Return the statements that add element ``i`` to the buffer if it is above the limit."""
        e = self.e
        each = e.new_block()
        value = e.bind(e.at(self.x, self.place(i)))
        larger = Apply("gt", (unsigned_key(e, value), Load(self.limit, ())), "i1")
        taken = e.new_block()
        at = e.bind(Load(self.fill, ()), "n")
        to = (sym(at.name, 0, self.room),)
        parts: tuple[Scalar, ...] = (value, IndexScalar(i, "i32"))
        taken += [Store(row, to, part) for row, part in zip(self.radix.select_row_buffers(), parts)]
        taken.append(Store(self.fill, (), Apply("add", (at, i64_literal(1)), "i64")))
        return [*each, If(Apply("or", (self.open, larger), "i1"), tuple(taken))]

    def cut_to_largest(self, j: Dim, blocks: Dim) -> list[Stmt]:
        """Return the statements that sort the buffer and keep the k largest when it is full or the row ends."""
        e = self.e
        each = e.new_block()
        count = e.bind(Load(self.fill, ()), "n")
        is_full = Apply("gt", (count, IndexScalar(self.full)), "i1")
        is_last = Apply("eq", (IndexScalar(j), IndexScalar(blocks)), "i1")
        n = sym(count.name, 0, self.room + 1)
        ordered = e.new_block()
        row = self.radix.select_row_buffers()
        ordered += self.radix.sort_statements(lambda k: [Load(buffer, (k,)) for buffer in row], n)
        e.enter(ordered)
        least = unsigned_key(e, e.bind(Load(self.radix.select_row_buffers()[0], (self.top - 1,))))
        ordered += [Store(self.limit, (), least), Store(self.has_limit, (), Const(True, "i1"))]
        ordered.append(Store(self.fill, (), IndexScalar(minimum(self.top, n))))
        return [*each, If(Apply("or", (is_full, is_last), "i1"), tuple(ordered))]

    def store_largest(self) -> list[Stmt]:
        """Return the statements that store the k largest elements and their indices."""
        block = self.e.new_block()
        k = sym("k", 0, self.top)
        pairs = [(out, row) for out, row in zip(self.outputs, self.radix.select_row_buffers()) if out is not None]
        return [*block, For("k", 0, self.top, tuple(Store(out, self.place(k), Load(row, (k,))) for out, row in pairs))]


@dataclass(frozen=True, slots=True)
class _TestedBlocks:
    """Emit a loop over blocks of a row, each with a test for elements above ``limit``."""

    e: Elements
    x: Value
    place: Place
    limit: Buffer
    plan: InsertionPlan | SelectionPlan

    def loop_over_blocks(
        self, take: Callable[[Dim], list[Stmt]], always: Scalar, end: Callable[[Dim, Dim], list[Stmt]] | None = None
    ) -> list[Stmt]:
        """Return the loops over blocks of elements; ``take`` handles blocks with an element above the limit.

        A block is also taken if ``always`` is True at run time. ``end`` writes the statements after each block, and
        those of one more iteration after the last. Without ``end`` a block is taken from its end: of ascending
        elements, the last then set a limit that the first ones do not pass.
        """
        n, size = self.x.type.shape[-1], self.plan.block
        blocks = ceildiv(n, size)
        iterations = blocks if end is None else blocks + 1
        j = sym("j", 0, iterations)
        start = j * size
        count = minimum(n - start, size)
        larger = Buffer("larger", "i1", (), "private")
        at = sym("l", 0, count) if end is not None else count - 1 - sym("l", 0, count)
        block = self._any_above_limit(start, larger)
        chosen = Apply("or", (always, Load(larger, ())), "i1")
        block.append(If(chosen, (For("l", 0, count, tuple(take(start + at))),)))
        block += [] if end is None else end(j, blocks)
        return [Alloc(larger), For("j", 0, iterations, tuple(block))]

    def _any_above_limit(self, begin: Dim, larger: Buffer) -> list[Stmt]:
        """Return the statements that test a block for an element above the limit.

        If the row is shorter than a block, or of unknown length, an incomplete block is taken without a test.
        """
        n, size, e = self.x.type.shape[-1], self.plan.block, self.e
        each = e.new_block()
        value = e.at(self.x, self.place(first_tested_element(n, begin, size) + sym("l", 0, size)))
        above = Apply("gt", (unsigned_key(e, e.bind(value)), Load(self.limit, ())), "i1")
        each.append(Store(larger, (), above, "max"))
        loop = For("l", 0, size, tuple(each), "lanes" if self.plan.vectorized else "serial")
        if isinstance(n, int) and n >= size:
            return [Store(larger, (), Const(False, "i1")), loop]
        whole = Apply("le", (IndexScalar(begin + size), IndexScalar(n)), "i1")
        return [Store(larger, (), Apply("not", (whole,), "i1")), If(whole, (loop,))]


def _if_k_is_positive(top: Dim, *stmts: Stmt) -> list[Stmt]:
    """Return statements guarded by ``top > 0``: for ``k = 0`` the buffer has no room."""
    return list(stmts) if isinstance(top, int) else [If(Apply("gt", (IndexScalar(top), i64_literal(0)), "i1"), stmts)]


def lower_insertion(b: RegionBuilder, plan: InsertionPlan) -> Kernel:
    """Lower ``top_k`` by insertion of elements above the k-th largest; a block without such elements costs one test."""
    op = b.region_root_op("top_k")
    (x,) = op.operands
    top = dim_of(op.attrs, "k")
    rows, place = rows_along_dim(x.type.shape, x.type.rank - 1)
    if top == 0:
        return b.grid(rows, [], 0)
    largest = _TopKByInsertion(b, op, place)
    body = _TestedBlocks(largest.e, x, place, largest.limit, plan).loop_over_blocks(
        largest.insert_if_large, largest.has_room
    )
    return b.grid(
        rows, [*largest.allocate_largest(), *_if_k_is_positive(top, *body)], product(x.type.shape) * TOP_K_WORK.value
    )


class _TopKByInsertion:
    """Emit the ordered list of a row's largest elements so far, in the memory of the results."""

    def __init__(self, b: RegionBuilder, op: Op, place: Place) -> None:
        """Name the number of elements so far, the gap of an insertion, and the least key to beat."""
        self.b, self.e, self.x, self.top, self.place = b, b.elements(), op.operands[0], dim_of(op.attrs, "k"), place
        self.values, self.numbers = (b.output_buffer_of(v) for v in op.results)
        self.hole, self.fill = (Buffer(name, "i64", (), "private") for name in ("hole", "fill"))
        key = f"u{8 * key_bytes(self.x.type.dtype)}"
        self.limit = Buffer("limit", key, (), "private")
        self.has_room = Apply("lt", (Load(self.fill, ()), IndexScalar(self.top)), "i1")

    def allocate_largest(self) -> list[Stmt]:
        """Return the allocations of the k largest elements so far, with initial values."""
        stmts: list[Stmt] = [Alloc(buffer) for buffer in (self.hole, self.fill, self.limit)]
        stmts += [Store(self.fill, (), i64_literal(0)), Store(self.limit, (), Const(0, self.limit.dtype))]
        for out in self.b.outputs:
            zero = Const(0.0 if kind_of(out.dtype) == "f" else 0, out.dtype)
            stmts += _if_k_is_positive(self.top, Store(out, self.place(0), zero))
        if self.numbers is not None and self.top != 1:  # the last index is read even while there is room
            stmts += _if_k_is_positive(self.top, Store(self.numbers, self.place(self.top - 1), Const(0, "i32")))
        return stmts

    def insert_if_large(self, i: Dim) -> list[Stmt]:
        """Return the statements that insert element ``i`` if there is room, or if it comes before the last one.

        Of equal elements the first comes first, in whatever order they are inserted.
        """
        e = self.e
        block = e.new_block()
        own = e.bind(e.at(self.x, self.place(i)))
        key = unsigned_key(e, own)
        comes_first = self._element_precedes(key, i, Load(self.limit, ()), self.top - 1)
        inner = e.new_block()
        fill = e.bind(Load(self.fill, ()), "n")
        last, more = IndexScalar(self.top - 1), Apply("add", (fill, i64_literal(1)), "i64")
        inner.append(Store(self.hole, (), Apply("min", (fill, last), "i64")))
        inner.append(Store(self.fill, (), Apply("min", (more, IndexScalar(self.top)), "i64")))
        inner.append(self._shift_larger_elements(key, i))
        e.enter(inner)
        at = self.place(sym(e.bind(Load(self.hole, ()), "n").name, 0, self.top))
        parts = (self.values, own), (self.numbers, IndexScalar(i, "i32"))
        inner += [Store(out, at, part) for out, part in parts if out is not None]
        least = e.new_block()
        least.append(Store(self.limit, (), self._largest_key(self.top - 1)))
        inner.append(If(Apply("not", (self.has_room,), "i1"), tuple(least)))
        taken: Stmt = If(Apply("or", (self.has_room, comes_first), "i1"), tuple(inner))
        if self.numbers is not None:  # one comparison usually suffices
            taken = If(Apply("or", (self.has_room, Apply("ge", (key, Load(self.limit, ())), "i1")), "i1"), (taken,))
        return [*block, taken]

    def _shift_larger_elements(self, key: Scalar, i: Dim) -> Stmt:
        """Return the loop that moves the elements after element ``i`` by one position."""
        e = self.e
        test = e.new_block()
        q, before = self._free_position()
        comes_first = self._element_precedes(key, i, self._largest_key(before), before)
        moves = e.bind(Apply("and", (Apply("gt", (q, i64_literal(0)), "i1"), comes_first), "i1"))
        shift = e.new_block()
        q, before = self._free_position()
        at = self.place(sym(q.name, 0, self.top))
        shift += [Store(out, at, Load(out, self.place(before))) for out in self.b.outputs]
        shift.append(Store(self.hole, (), Apply("sub", (q, i64_literal(1)), "i64")))
        return While(tuple(test), moves, tuple(shift))

    def _element_precedes(self, key: Scalar, i: Dim, other: Scalar, at: Dim) -> Scalar:
        """Return a scalar that is True at run time if element ``i`` precedes the element of key ``other`` at ``at``."""
        larger = Apply("gt", (key, other), "i1")
        if self.numbers is None:  # equal values are identical
            return larger
        earlier = Apply("lt", (IndexScalar(i, "i32"), Load(self.numbers, self.place(at))), "i1")
        return Apply("or", (larger, Apply("and", (Apply("eq", (key, other), "i1"), earlier), "i1")), "i1")

    def _largest_key(self, at: Dim) -> Scalar:
        """Return the key of the list's element at position ``at``, loaded by its index."""
        e = self.e
        if self.values is not None:
            return unsigned_key(e, e.bind(Load(self.values, self.place(at))))
        assert self.numbers is not None
        number = e.bind(Apply("convert", (Load(self.numbers, self.place(at)),), "i64"), "n")
        return unsigned_key(e, e.bind(e.at(self.x, self.place(sym(number.name, 0, self.x.type.shape[-1])))))

    def _free_position(self) -> tuple[Var, Dim]:
        """Bind the list's first free position; return it and the position before it, at least 0."""
        e = self.e
        q = e.bind(Load(self.hole, ()), "n")
        less = Apply("max", (Apply("sub", (q, i64_literal(1)), "i64"), i64_literal(0)), "i64")
        return q, sym(e.bind(less, "n").name, 0, self.top)
