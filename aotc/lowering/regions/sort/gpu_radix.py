"""``digit_counts`` and ``digit_sort`` on a GPU: a pass of a radix sort, with a block of threads per part of a row.

The first kernel counts the occurrences of each digit in each part. A prefix sum of these counts along a row, digit by
digit, gives the second kernel the target of its part's elements. It orders them in shared memory first, so that
neighbouring threads write neighbours:

- a warp takes 32 neighbours at a time; ballots tell a thread which other threads have its digit;
- prefix sums over warps and digits turn that into the position of an element in the part;
- elements go to that position in shared memory, and from there to position + offset of the digit in global memory.

Source: N. Satish et al., "Designing efficient sorting algorithms for manycore GPUs" (2009). Blocks do not wait for each
other, as they would with decoupled look-back (D. Merrill and M. Garland, 2016): the prefix sum is an op of its own.

Every position follows from counts, independent of timing. (Adinets and Merrill, "Onesweep", 2022, rank in this way.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aotc.ir.dims.algebra import Dim, ceildiv, minimum, mod, product, sym
from aotc.ir.loop.ir import (
    WARP,
    Alloc,
    Apply,
    Barrier,
    Buffer,
    Const,
    For,
    If,
    Kernel,
    Load,
    Scalar,
    Stmt,
    Store,
    WarpMatch,
)
from aotc.ir.loop.ir import Index as IndexScalar
from aotc.ir.opset.sorting import RADIX
from aotc.lowering.analysis.index_maps import delinearize
from aotc.lowering.cost_model.work import DIGIT_WORK
from aotc.lowering.elements.builder import RegionBuilder, grid_item
from aotc.lowering.elements.elements import conjunction_of_tests, constant_scalar, test_index
from aotc.lowering.plans.gpu_sort import DigitCountPlan, DigitSortPlan
from aotc.lowering.regions.sort.cpu_radix import unsigned_key

DIGIT_BITS = 8


def lower_digit_counts(b: RegionBuilder, plan: DigitCountPlan) -> Kernel:
    """Lower ``digit_counts``, the histogram step of a GPU radix sort."""
    return _DigitCounts(b, "digit_counts", plan.threads).digit_count_kernel(plan.adjacent)


def lower_digit_sort(b: RegionBuilder, plan: DigitSortPlan) -> Kernel:
    """Lower ``digit_sort``, the scatter step of a GPU radix sort."""
    return _DigitSort(b, "digit_sort", plan.threads).digit_count_kernel()


def _u32_literal(value: int) -> Const:
    return Const(value, "u32")


class _RadixDigits:
    """Base of both radix emitters: a block's part of a row, its threads, and the digit of an element."""

    def __init__(self, b: RegionBuilder, name: str, threads: int) -> None:
        """Divide each row into parts, one per block of ``threads``, and find the arrays that the key reads."""
        self.b, self.e, self.op, self.threads = b, b.elements(), b.region_root_op(name), threads
        self.part: int = self.op.attrs["part"]
        self.each = -(-self.part // self.threads)
        *self.lead, self.n = self.op.operands[0].type.shape
        self.parts = ceildiv(self.n, self.part)
        self.items = product(self.lead) * self.parts
        *self.head, self.number = delinearize(grid_item(self.items), (*self.lead, self.parts))
        self.begin = self.number * self.part
        region = self.op.regions[0]
        inside = {v for op in region.ops for v in op.operands} | set(region.results)
        self.read = [k for k, p in enumerate(region.params) if p in inside]
        self.t, self.u, self.d = sym("t", 0, self.threads), sym("u", 0, self.each), sym("d", 0, RADIX)

    def thread_loop(self, block: Sequence[Stmt]) -> For:
        return For("t", 0, self.threads, tuple(block), "thread")

    def digit_loop(self, block: Sequence[Stmt]) -> For:
        """Return a loop over digits, distributed over threads."""
        return self.thread_loop([For("d", self.t, RADIX, tuple(block), step=self.threads)])

    def digit_of_element(self, values: dict[int, Scalar]) -> Scalar:
        """Return the radix digit of the element with ``values``."""
        region, attrs = self.op.regions[0], self.op.attrs
        nothing = Const(0, "i32")  # operand that the key does not depend on
        (x,) = self.e.inline_region(region, tuple(values.get(k, nothing) for k in range(len(region.params))))
        key: Scalar = unsigned_key(self.e, self.e.bind(x), attrs["ascending"])
        if attrs["shift"]:
            key = Apply("shr_logic", (key, Const(attrs["shift"], key.dtype)), key.dtype)
        byte = Apply("and", (key, Const(RADIX - 1, key.dtype)), key.dtype)
        return self.e.bind(byte if byte.dtype == "u32" else Apply("convert", (byte,), "u32"))

    def digit_as_index(self, digit: Scalar) -> Dim:
        return sym(self.e.bind(Apply("convert", (digit,), "i64"), "n").name, 0, RADIX)

    def read_thread_elements(
        self, place: Callable[[Dim], Dim], read: Callable[[Dim, Dim], None], none: Sequence[Stmt]
    ) -> For:
        """Return the loop that reads the elements of all threads; in a whole part, a thread issues its loads together.

        ``read(u, place)`` stores element ``u`` of a thread. ``none``, statements of a loop over :attr:`u`, replaces it
        beyond the last element.
        """
        at = self.begin + place(self.u)
        lanes = self.e.new_block()
        read(self.u, at)
        whole = For("u", 0, self.each, tuple(lanes), "lanes")
        if mod(self.n, self.part) == 0:
            return self.thread_loop([whole])
        single = self.e.new_block()
        read(self.u, at)
        exists = Apply("lt", (IndexScalar(at), IndexScalar(self.n)), "i1")
        rest = For("u", 0, self.each, (If(exists, tuple(single), tuple(none)),), "unroll")
        is_whole = Apply("le", (IndexScalar(self.begin + self.part), IndexScalar(self.n)), "i1")
        return self.thread_loop([If(is_whole, (whole,), (rest,))])


class _DigitCounts(_RadixDigits):
    """Emit the kernel that counts digits; beyond the last element the digit is ``RADIX``, which is not counted."""

    def digit_count_kernel(self, adjacent: int) -> Kernel:
        """Return the kernel; one access of a thread loads ``adjacent`` elements."""
        (out,) = self.b.outputs
        # Elements beyond the end of the row count as digit RADIX, which is not written.
        counts = Buffer(self.b.fresh("held"), "i32", (RADIX + 1,), "shared")
        own = Buffer(self.b.fresh("own"), "u32", (self.threads, self.each), "private")

        def element_position(u: Dim) -> Dim:
            return u // adjacent * (adjacent * self.threads) + self.t * adjacent + mod(u, adjacent)

        def count_digit(u: Dim, at: Dim) -> None:
            values: dict[int, Scalar] = {
                k: self.e.bind(self.e.at(self.op.operands[k], (*self.head, at))) for k in self.read
            }
            digit = self.digit_of_element(values)
            self.e.block.append(Store(own, (self.t, u), digit))

        reads = self.read_thread_elements(
            element_position, count_digit, [Store(own, (self.t, self.u), Const(RADIX, "u32"))]
        )
        block = self.e.new_block()
        word = Apply("convert", (Load(own, (self.t, self.u)),), "i64")
        digit_number = sym(self.e.bind(word, "n").name, 0, RADIX + 1)
        block.append(Store(counts, (digit_number,), Const(1, "i32"), "add", atomic=True))
        count = self.thread_loop([For("u", 0, self.each, tuple(block), "unroll")])
        clear = self.digit_loop([Store(counts, (self.d,), Const(0, "i32"))])
        write = self.digit_loop([Store(out, (*self.head, self.d, self.number), Load(counts, (self.d,)))])
        body: list[Stmt] = [Alloc(counts), Alloc(own), clear, reads, Barrier(), count, Barrier(), write]
        return self.b.grid(self.items, body, product(self.lead) * self.n * DIGIT_WORK.value)


class _DigitSort(_RadixDigits):
    """Emit the kernel that orders a part; elements beyond the last one get the largest digit and come last."""

    def __init__(self, b: RegionBuilder, name: str, threads: int) -> None:
        """Name the registers and the shared memory of a block: elements, digits, ranks and counts."""
        super().__init__(b, name, threads)
        *arrays, self.ends = self.op.operands
        self.outputs = [b.output_buffer_of(v) for v in self.op.results]
        moved = [k for k, out in enumerate(self.outputs) if out is not None or k in self.read]
        each, warps = self.each, self.threads // WARP
        dtypes = {k: arrays[k].type.dtype for k in moved}
        self.own = {k: Buffer(b.fresh("own"), dtypes[k], (threads, each), "private") for k in moved}
        self.cells = {k: Buffer(b.fresh("cells"), dtypes[k], (self.part,), "shared") for k in moved}
        self.digits = [Buffer(b.fresh("digit"), "u32", (threads,), "private") for _ in range(each)]
        self.same = [Buffer(b.fresh("same"), "u32", (threads,), "private") for _ in range(each)]
        self.rank = Buffer(b.fresh("rank"), "u32", (threads, each), "private")
        self.counts = Buffer(b.fresh("counts"), "u32", (warps, RADIX), "shared")
        self.sums = [Buffer(b.fresh("sums"), "u32", (2, RADIX), "shared") for _ in range(2)]
        self.offset = Buffer(b.fresh("offset"), "i32", (RADIX,), "shared")

    @property
    def warp(self) -> Dim:
        return self.t // WARP

    def digit_count_kernel(self) -> Kernel:
        """Return the kernel of one radix sort pass: rank in warps, prefix sums, scatter."""
        own = [*self.own.values(), *self.digits, *self.same, self.rank]
        shared = [*self.cells.values(), self.counts, *self.sums, self.offset]
        w = sym("w", 0, self.threads // WARP)
        clear = For(str(w), 0, self.threads // WARP, (Store(self.counts, (w, self.d), _u32_literal(0)),))
        body: list[Stmt] = [Alloc(x) for x in (*own, *shared)]
        body += [self.digit_loop([clear]), self._read_part(), self._find_digits()]
        body += [WarpMatch(same, digit, DIGIT_BITS) for same, digit in zip(self.same, self.digits, strict=True)]
        body += [Barrier(), *self._rank_in_warps(), Barrier(), self._sum_warps(), Barrier()]
        body += [
            *self._sum_digits(),
            self._digit_offsets(),
            Barrier(),
            self._sorted_place_in_part(),
            Barrier(),
            self._write_sorted_part(),
        ]
        return self.b.grid(self.items, body, product(self.lead) * self.n * DIGIT_WORK.value)

    def _position_in_part(self, u: Dim) -> Dim:
        """Return the position in the part of element ``u`` of a thread: warps have contiguous elements."""
        return self.warp * (WARP * self.each) + u * WARP + mod(self.t, WARP)

    def _read_part(self) -> For:
        """Return the loop that reads the elements of a part to registers, and 0 beyond the row."""
        def read_element(u: Dim, at: Dim) -> None:
            for k, own in self.own.items():
                value = self.e.at(self.op.operands[k], (*self.head, at))
                self.e.block.append(Store(own, (self.t, u), value))

        none = [Store(own, (self.t, self.u), constant_scalar(0, own.dtype)) for own in self.own.values()]
        return self.read_thread_elements(self._position_in_part, read_element, none)

    def _find_digits(self) -> For:
        """Return the loop that computes the digits of a thread's elements."""
        block: list[Stmt] = []
        for u, to in enumerate(self.digits):
            self.e.enter(block)
            digit = self.digit_of_element({k: self.e.bind(Load(self.own[k], (self.t, u))) for k in self.read})
            for test in test_index(self.begin + self._position_in_part(u), self.n, "lt"):
                digit = Apply("select", (test, digit, _u32_literal(RADIX - 1)), "u32")
            block.append(Store(to, (self.t,), digit))
        return self.thread_loop(block)

    def _rank_in_warps(self) -> list[Stmt]:
        """Return statements that count, per digit, a warp's elements so far; a digit's first thread updates it."""
        steps: list[Stmt] = []
        for u, (digit, same) in enumerate(zip(self.digits, self.same, strict=True)):
            first = self.e.new_block()
            all_, before = self._count_equal_digits_in_warp(same)
            cell = (self.warp, self.digit_as_index(Load(digit, (self.t,))))
            is_first = Apply("eq", (before, _u32_literal(0)), "i1")
            first.append(If(is_first, (Store(self.counts, cell, all_, "add"),)))
            block = self.e.new_block()
            all_, before = self._count_equal_digits_in_warp(same)
            cell = (self.warp, self.digit_as_index(Load(digit, (self.t,))))
            behind = Apply("sub", (Load(self.counts, cell), all_), "u32")
            block.append(Store(self.rank, (self.t, u), Apply("add", (behind, before), "u32")))
            steps += [self.thread_loop(first), Barrier(warp=True), self.thread_loop(block), Barrier(warp=True)]
        return steps

    def _count_equal_digits_in_warp(self, same: Buffer) -> tuple[Scalar, Scalar]:
        """Bind the number of a warp's threads with the same digit, and the number of these before the thread."""
        votes = self.e.bind(Load(same, (self.t,)))
        lower = Apply(
            "sub",
            (Apply("shl", (_u32_literal(1), IndexScalar(mod(self.t, WARP), "u32")), "u32"), _u32_literal(1)),
            "u32",
        )
        before = Apply("and", (votes, lower), "u32")
        return self.e.bind(Apply("popcnt", (votes,), "u32")), self.e.bind(Apply("popcnt", (before,), "u32"))

    def _sum_warps(self) -> For:
        """Return the prefix sums of a digit's counts over warps, and its totals in the part and in the row."""
        total = Buffer(self.b.fresh("total"), "u32", (), "private")
        w = sym("w", 0, self.threads // WARP)
        block = self.e.new_block()
        count = self.e.bind(Load(self.counts, (w, self.d)))
        block.append(Store(self.counts, (w, self.d), Load(total, ())))
        block.append(Store(total, (), Apply("add", (Load(total, ()), count), "u32")))
        loop = For(str(w), 0, self.threads // WARP, tuple(block))
        last = self.e.new_block()
        end = self.e.at(self.ends, (*self.head, self.d, self.parts - 1))
        last += [
            Alloc(total),
            Store(total, (), _u32_literal(0)),
            loop,
            Store(self.sums[0], (0, self.d), Load(total, ())),
        ]
        last.append(Store(self.sums[0], (1, self.d), Apply("convert", (end,), "u32")))
        return self.digit_loop(last)

    def _sum_digits(self) -> list[Stmt]:
        """Return inclusive prefix sums of both totals over digits, in steps of doubling distance."""
        steps: list[Stmt] = []
        old, new = self.sums
        for reach in (1 << k for k in range(DIGIT_BITS)):
            far: list[Stmt] = []
            near: list[Stmt] = []
            for k in range(2):
                value = Load(old, (k, self.d))
                far.append(Store(new, (k, self.d), Apply("add", (Load(old, (k, self.d - reach)), value), "u32")))
                near.append(Store(new, (k, self.d), value))
            test = Apply("ge", (IndexScalar(self.d), Const(reach, "i64")), "i1")
            steps += [self.digit_loop([If(test, tuple(far), tuple(near))]), Barrier()]
            old, new = new, old
        return steps

    def _digit_offsets(self) -> For:
        """Return the loop that computes each digit's offset: its position in the row less its position in the part."""
        sums, start = self.sums[DIGIT_BITS % 2], Buffer(self.b.fresh("start"), "u32", (2,), "private")
        w = sym("w", 0, self.threads // WARP)
        cell = (w, self.d)
        block: list[Stmt] = [Alloc(start), *(Store(start, (k,), _u32_literal(0)) for k in range(2))]
        before = tuple(Store(start, (k,), Load(sums, (k, self.d - 1))) for k in range(2))
        block.append(If(Apply("gt", (IndexScalar(self.d), Const(0, "i64")), "i1"), before))
        own = Apply("add", (Load(self.counts, cell), Load(start, (0,))), "u32")
        block.append(For(str(w), 0, self.threads // WARP, (Store(self.counts, cell, own),)))
        gap = Apply("sub", (Load(start, (1,)), Load(start, (0,))), "u32")
        block.append(Store(self.offset, (self.d,), Apply("convert", (gap,), "i32")))
        if self.parts != 1:
            e = self.e.new_block()
            end = self.e.at(self.ends, (*self.head, self.d, self.number - 1))
            e.append(Store(self.offset, (self.d,), end, "add"))
            block.append(If(Apply("gt", (IndexScalar(self.number), Const(0, "i64")), "i1"), tuple(e)))
        return self.digit_loop(block)

    def _sorted_place_in_part(self) -> For:
        """Return the stores of the elements to shared memory, sorted by digit within the part."""
        block = self.e.new_block()
        for u, digit in enumerate(self.digits):
            count = Load(self.counts, (self.warp, self.digit_as_index(Load(digit, (self.t,)))))
            place = Apply("convert", (Apply("add", (count, Load(self.rank, (self.t, u))), "u32"),), "i64")
            at = sym(self.e.bind(place, "n").name, 0, self.part)
            block += [Store(self.cells[k], (at,), Load(own, (self.t, u))) for k, own in self.own.items()]
        return self.thread_loop(block)

    def _write_sorted_part(self) -> For:
        """Return the stores of the part: adjacent threads store adjacent elements."""
        count = minimum(self.n - self.begin, self.part)
        block: list[Stmt] = []
        for u in range(self.each):
            at = self.t + u * self.threads
            inner = self.e.new_block()
            values: dict[int, Scalar] = {k: self.e.bind(Load(cell, (at,))) for k, cell in self.cells.items()}
            offset = Apply(
                "convert", (Load(self.offset, (self.digit_as_index(self.digit_of_element(values)),)),), "i64"
            )
            place = sym(self.e.bind(Apply("add", (offset, IndexScalar(at)), "i64"), "n").name, 0, self.n)
            pairs = [(out, values[k]) for k, out in enumerate(self.outputs) if out is not None]
            inner += [Store(out, (*self.head, place), x) for out, x in pairs]
            tests = test_index(at, count, "lt")
            block += [If(conjunction_of_tests(tests), tuple(inner))] if tests else inner
        return self.thread_loop(block)
