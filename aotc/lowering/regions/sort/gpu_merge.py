"""``sort_runs`` on a GPU: the position of an element is found by binary searches in other runs.

A block of threads loads an unsorted run into shared memory, and merges pairs of runs of 1, 2, 4... elements there, from
one half of a buffer to the other. Of runs longer than ``keep`` only the first ``keep`` elements continue. Sorted runs
are merged in global memory, a few at a time, with a thread for each element.

The position of an element is its position in its own run plus the number of elements before it in the others. Equal
elements of a run on its left count, those of a run on its right do not: the sort is stable. Source: N. Satish et al.,
"Designing efficient sorting algorithms for manycore GPUs" (2009).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from aotc.ir.dims.algebra import Dim, ceildiv, minimum, product, sym
from aotc.ir.loop.ir import (
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
    Space,
    Stmt,
    Store,
    Var,
    While,
)
from aotc.ir.loop.ir import Index as IndexScalar
from aotc.ir.opset import COMPARISONS
from aotc.lowering.analysis.index_maps import Index, delinearize
from aotc.lowering.cost_model.work import MERGE_WORK
from aotc.lowering.elements.builder import RegionBuilder, grid_item
from aotc.lowering.elements.elements import conjunction_of_tests, test_index
from aotc.lowering.plans.gpu_sort import BlockSortPlan, MergedPairPlan, MergedRunPlan, sorted_arrays
from aotc.lowering.plans.resources import sorted_run_buffer_shape
from aotc.lowering.regions.common.bank_padding import bank_padded_index
from aotc.lowering.regions.sort.cpu_radix import i64_literal

Read = Callable[[Dim], list[Scalar]]
ReadOne = Callable[[int, Dim], Scalar]


def lower_block_sort(b: RegionBuilder, plan: BlockSortPlan) -> Kernel:
    """Lower ``sort_runs`` to a GPU block that sorts a run in shared memory."""
    return _BlockSort(b, plan).block_sort_kernel()


def lower_merged_pairs(b: RegionBuilder, plan: MergedPairPlan) -> Kernel:
    """Lower a GPU merge of pairs of sorted runs."""
    return _SortedRuns(b).merged_pairs_kernel(plan.each)


def lower_merged_runs(b: RegionBuilder, plan: MergedRunPlan) -> Kernel:
    """Lower a GPU merge of several sorted runs per row."""
    return _SortedRuns(b).merged_runs_kernel()


class _SortedRuns:
    """Base of the emitters: the op, and the binary search in sorted runs."""

    def __init__(self, b: RegionBuilder) -> None:
        """Read the attributes of ``sort_runs``: the width of runs, the sorted width, the elements that continue."""
        self.b, self.e = b, b.elements()
        self.op = b.region_root_op("sort_runs")
        a = self.op.attrs
        self.width, self.done, self.keep, self.numbered = a["width"], a["done"], a["keep"], a["numbered"]
        *self.lead, self.n = self.op.operands[0].type.shape
        self.rows = product(self.lead)
        self.outputs = [b.output_buffer_of(v) for v in self.op.results]
        self.kept, self.compared = sorted_arrays(b, self.op)

    def bind_integer_function(self, fn: str, x: Scalar, y: Scalar | int, prefix: str = "n") -> Var:
        """Bind a function of two integers."""
        other = i64_literal(y) if isinstance(y, int) else y
        return self.e.bind(Apply(fn, (x, other), "i1" if fn in COMPARISONS else "i64"), prefix)

    def count_before(
        self, own: Sequence[Scalar], read: Read, first: Scalar, begin: Scalar, end: Scalar, extent: Dim
    ) -> Var:
        """Append a binary search in a sorted run; return the number of its elements before ``own``.

        ``first`` is True if ``own`` is left of the run: equal elements of the run then come after it.
        """
        e, block = self.e, self.e.block
        low, high = (Buffer(self.b.fresh(name), "i64", (), "private") for name in ("low", "high"))
        block += [Alloc(low), Alloc(high), Store(low, (), begin), Store(high, (), end)]
        test = e.new_block()
        more = self.bind_integer_function("lt", e.bind(Load(low, ())), e.bind(Load(high, ())), "t")
        body = e.new_block()
        both = self.bind_integer_function("add", e.bind(Load(low, ())), e.bind(Load(high, ())))
        middle = self.bind_integer_function("shr_arith", both, 1)
        other = [e.bind(x) for x in read(sym(middle.name, 0, extent))]
        pairs: list[Scalar] = []
        values = iter(zip(own, other, strict=True))
        for n in range(len(self.op.results)):
            if n not in self.compared:  # it is not read
                pairs += [Const(0, "i32")] * 2
                continue
            x, y = next(values)
            pairs += [Apply("select", (first, y, x), x.dtype), Apply("select", (first, x, y), x.dtype)]
        (less,) = e.inline_region(self.op.regions[0], tuple(e.bind(p) if isinstance(p, Apply) else p for p in pairs))
        before = e.bind(Apply("eq", (less, first), "i1"))
        up = (Store(low, (), Apply("add", (middle, i64_literal(1)), "i64")),)
        body.append(If(before, up, (Store(high, (), middle),)))
        block.append(While(tuple(test), more, tuple(body)))
        e.enter(block)
        return self.bind_integer_function("sub", e.bind(Load(low, ())), begin)

    def bind_comparison(self, one: Mapping[int, Scalar], two: Mapping[int, Scalar]) -> Scalar:
        """Bind the comparison of the elements ``one`` with the elements ``two``, each by operand number."""
        nothing = Const(0, "i32")  # operand that the comparator does not read
        pairs = [x for n in range(len(self.op.results)) for x in (one.get(n, nothing), two.get(n, nothing))]
        (less,) = self.e.inline_region(self.op.regions[0], tuple(pairs))
        return self.e.bind(less)

    def append_merge(
        self, read: ReadOne, write: Callable[[int, dict[int, Scalar]], None], ends: tuple[Scalar, Scalar, Scalar],
        place: Scalar, count: int, extent: Dim,
    ) -> None:  # fmt: skip
        """Append the merge of ``count`` elements from ``place`` on, of two runs delimited by ``ends``.

        It searches how many of the elements before ``place`` are from the first run, then takes the lesser head each
        time.
        """
        e, (_, middle, end) = self.e, ends
        left, right = (Buffer(self.b.fresh(name), "i64", (), "private") for name in ("left", "right"))
        e.block += [Alloc(left), Alloc(right)]
        self._search_merge_split(read, (left, right), ends, place, extent)
        last = IndexScalar(extent - 1)
        for u in range(count):
            i, j = e.bind(Load(left, ()), "n"), e.bind(Load(right, ()), "n")
            at = [sym(self.bind_integer_function("min", x, last).name, 0, extent) for x in (i, j)]
            heads = [{n: e.bind(read(n, k)) for n in self.compared} for k in at]
            spent, more = (
                self.bind_integer_function("ge", i, middle, "t"),
                self.bind_integer_function("lt", j, end, "t"),
            )
            less = self.bind_comparison(heads[1], heads[0])
            take = e.bind(Apply("and", (more, Apply("or", (spent, less), "i1")), "i1"))
            chosen = e.bind(Apply("select", (take, IndexScalar(at[1]), IndexScalar(at[0])), "i64"), "n")
            position = sym(chosen.name, 0, extent)
            values: dict[int, Scalar] = {
                n: Apply("select", (take, heads[1][n], heads[0][n]), heads[0][n].dtype)
                if n in heads[0]
                else e.bind(read(n, position))
                for n in self.kept
            }
            write(u, values)
            for at_, old, steps in ((left, i, (0, 1)), (right, j, (1, 0))):
                step = Apply("select", (take, i64_literal(steps[0]), i64_literal(steps[1])), "i64")
                e.block.append(Store(at_, (), Apply("add", (old, step), "i64")))

    def _search_merge_split(
        self, read: ReadOne, heads: tuple[Buffer, Buffer], ends: tuple[Scalar, Scalar, Scalar], place: Scalar,
        extent: Dim,
    ) -> None:  # fmt: skip
        """Emit the search for the heads of both runs after the first ``place`` elements of their merge."""
        e, (begin, middle, end), (low, high) = self.e, ends, heads
        block = e.block
        lengths = self.bind_integer_function("sub", middle, begin), self.bind_integer_function("sub", end, middle)
        least = self.bind_integer_function("max", self.bind_integer_function("sub", place, lengths[1]), 0)
        block += [Store(low, (), least), Store(high, (), self.bind_integer_function("min", place, lengths[0]))]
        test = e.new_block()
        more = self.bind_integer_function("lt", e.bind(Load(low, ())), e.bind(Load(high, ())), "t")
        body = e.new_block()
        half = self.bind_integer_function(
            "shr_arith", self.bind_integer_function("add", e.bind(Load(low, ())), e.bind(Load(high, ()))), 1
        )
        one = sym(self.bind_integer_function("add", begin, half).name, 0, extent)
        other = self.bind_integer_function(
            "sub", self.bind_integer_function("add", middle, self.bind_integer_function("sub", place, half)), 1
        )
        two = sym(other.name, 0, extent)
        less = self.bind_comparison(*({n: e.bind(read(n, at)) for n in self.compared} for at in (two, one)))
        body.append(If(less, (Store(high, (), half),), (Store(low, (), Apply("add", (half, i64_literal(1)), "i64")),)))
        block.append(While(tuple(test), more, tuple(body)))
        e.enter(block)
        split = e.bind(Load(low, ()), "n")
        block.append(
            Store(high, (), self.bind_integer_function("add", middle, self.bind_integer_function("sub", place, split)))
        )
        block.append(Store(low, (), self.bind_integer_function("add", begin, split)))

    # --- runs in the memory of the GPU ---

    def merged_runs_kernel(self) -> Kernel:
        """Return the kernel that merges sorted runs."""
        size = self.rows * self.n
        e, w = self.e, self.done
        *head, i = delinearize(grid_item(size), (*self.lead, self.n))
        body = e.new_block()
        position = e.bind(IndexScalar(i))
        i = sym(position.name, 0, self.n)
        values = {n: e.bind(e.at(self.op.operands[n], (*head, i))) for n in self.kept}
        group, own = i // self.width * self.width, i // w * w
        # The rank of an element is the number of elements before it, in its own run and in all others of the group.
        rank = Buffer(self.b.fresh("rank"), "i64", (), "private")
        body += [Alloc(rank), Store(rank, (), IndexScalar(i - own))]
        begin = group + sym("j", 0, self.width // w) * w
        inner = e.new_block()
        first = e.bind(Apply("gt", (IndexScalar(begin), IndexScalar(own)), "i1"))

        def read_element(at: Dim) -> list[Scalar]:
            return [e.at(self.op.operands[n], (*head, at)) for n in self.compared]

        low, high = (e.bind(IndexScalar(begin)), e.bind(IndexScalar(minimum(begin + w, self.n))))
        count = self.count_before([values[n] for n in self.compared], read_element, first, low, high, self.n)
        e.block.append(Store(rank, (), self.bind_integer_function("add", e.bind(Load(rank, ())), count)))
        another = Apply("ne", (IndexScalar(begin), IndexScalar(own)), "i1")
        exists = Apply("lt", (IndexScalar(begin), IndexScalar(self.n)), "i1")
        search = If(conjunction_of_tests((another, exists)), tuple(inner))
        body.append(For("j", 0, self.width // w, (search,)))
        e.enter(body)
        place = self.bind_integer_function("add", e.bind(Load(rank, ())), e.bind(IndexScalar(group)))
        at: Index = (*head, sym(place.name, 0, self.n))
        body += [Store(out, at, values[n]) for n, out in enumerate(self.outputs) if out is not None]
        return self.b.grid(size, body, size * MERGE_WORK.value)

    def merged_pairs_kernel(self, each: int) -> Kernel:
        """Return the kernel that merges pairs of sorted runs, ``each`` elements per thread."""
        pieces = ceildiv(self.n, each)
        size = self.rows * pieces
        e, w = self.e, self.done
        *head, piece = delinearize(grid_item(size), (*self.lead, pieces))
        body = e.new_block()
        start = piece * each
        group = start // self.width * self.width
        middle = e.bind(IndexScalar(minimum(group + w, self.n)))
        ends = (e.bind(IndexScalar(group)), middle, e.bind(IndexScalar(minimum(group + 2 * w, self.n))))

        def read_element(n: int, at: Dim) -> Scalar:
            return e.at(self.op.operands[n], (*head, at))

        def write_element(u: int, values: dict[int, Scalar]) -> None:
            pairs = [(out, values[n]) for n, out in enumerate(self.outputs) if out is not None]
            stores = [Store(out, (*head, start + u), x) for out, x in pairs]
            tests = test_index(start + u, self.n, "lt")
            e.block += [If(conjunction_of_tests(tests), tuple(stores))] if tests else stores

        self.append_merge(read_element, write_element, ends, e.bind(IndexScalar(start - group)), each, self.n)
        return self.b.grid(size, body, self.rows * self.n * MERGE_WORK.value)


class _BlockSort(_SortedRuns):
    """Emit the kernel that sorts runs in shared memory.

    A thread sorts a few neighbours in registers. Pairs of runs are then merged from one half of a buffer to the other.
    If the runs do not fit shared memory, one thread sorts them in private memory.
    """

    def __init__(self, b: RegionBuilder, plan: BlockSortPlan) -> None:
        """Name the two buffers of a run, in shared or private memory, and the elements of each thread."""
        super().__init__(b)
        self.wide = wide = plan.width
        dtypes = [v.type.dtype for v in self.op.results]
        self.threads = plan.threads
        space: Space = "private" if plan.private else "shared"
        self.cells = {n: Buffer(b.fresh("run"), dtypes[n], sorted_run_buffer_shape(wide), space) for n in self.kept}
        self.each = wide // self.threads
        self.most = max(min(1 << (self.keep - 1).bit_length(), wide), self.each)  # elements of a run that continue
        self.own = {n: Buffer(b.fresh("own"), dtypes[n], (self.threads, self.each), "private") for n in self.kept}
        self.runs, self.valid = (Buffer(name, "i64", (), "private") for name in ("width", "valid"))

    def block_sort_kernel(self) -> Kernel:
        """Return the kernel: read a run to shared memory, sort parts in threads, merge the parts, write the run."""
        per_row = ceildiv(self.n, self.width)
        items = self.rows * per_row
        *self.head, chunk = delinearize(grid_item(items), (*self.lead, per_row))
        self.begin = chunk * self.width
        self.count = minimum(self.n - self.begin, self.width)
        levels = (self.wide // self.each - 1).bit_length()
        body: list[Stmt] = [Alloc(x) for x in (*self.cells.values(), *self.own.values(), self.runs, self.valid)]
        body += [Store(self.runs, (), i64_literal(self.each)), Store(self.valid, (), IndexScalar(self.count))]
        body += [
            self._loop_over_thread_elements(self._read_element, self.count),
            Barrier(),
            self._sort_thread_elements(),
            Barrier(),
        ]
        if levels:
            body.append(For("l", 0, levels, tuple(self._merge_level(levels))))
        written = minimum(self.count, self.keep)
        body.append(self._loop_over_thread_elements(lambda at: self._write_element(at, chunk, levels % 2), written))
        return self.b.grid(items, body, self.rows * self.n * MERGE_WORK.value * max(levels, 1))

    def _loop_over_thread_elements(self, write: Callable[[Dim], None], end: Dim) -> For:
        """Return the loop over a thread's elements below ``end``; adjacent threads have neighbours."""
        block: list[Stmt] = []
        for u in range(self.each):
            at = sym("t", 0, self.threads) + u * self.threads
            tests = test_index(at, end, "lt")
            if any(isinstance(test, Const) for test in tests):
                continue
            inner = self.e.new_block()
            write(at)
            block += [If(conjunction_of_tests(tests), tuple(inner))] if tests else inner
        return For("t", 0, self.threads, tuple(block), "thread")

    def _read_element(self, at: Dim) -> None:
        """Emit the load of element ``at`` of the run to shared memory; without an operand, its number."""
        place = self.begin + at
        for n, cell in self.cells.items():
            operand = self.op.operands[n] if n < len(self.op.operands) else None
            value = IndexScalar(place, "i32") if operand is None else self.e.at(operand, (*self.head, place))
            self.e.block.append(Store(cell, (0, bank_padded_index(at)), value))

    def _write_element(self, at: Dim, chunk: Dim, side: int) -> None:
        index = (*self.head, chunk * self.keep + at)
        pairs = [(out, self.cells[n]) for n, out in enumerate(self.outputs) if out is not None]
        self.e.block += [Store(out, index, Load(cell, (side, bank_padded_index(at)))) for out, cell in pairs]

    def _sort_thread_elements(self) -> For:
        """Return the odd-even transposition sort of a thread's neighbouring elements."""
        t, e = sym("t", 0, self.threads), self.e
        places = [t * self.each + u for u in range(self.each)]
        block: list[Stmt] = []
        for pairs, source, target in ((self.each, self.cells, self.own), (self.each, self.own, self.cells)):
            if target is self.cells:
                for iteration in range(pairs):
                    for u in range(iteration % 2, self.each - 1, 2):
                        block += self._compare_and_exchange(t, u, places[u + 1])
            for u, place in enumerate(places):
                tests = test_index(place, self.count, "lt")
                if any(isinstance(test, Const) for test in tests):
                    continue
                source_at, target_at = (
                    ((0, bank_padded_index(place)), (t, u))
                    if target is self.own
                    else ((t, u), (0, bank_padded_index(place)))
                )
                moves = tuple(Store(target[n], target_at, Load(source[n], source_at)) for n in self.kept)
                block += [If(conjunction_of_tests(tests), moves)] if tests else moves
        e.enter(block)
        return For("t", 0, self.threads, tuple(block), "thread")

    def _compare_and_exchange(self, t: Dim, u: int, place: Dim) -> list[Stmt]:
        """Return the exchange of elements ``u`` and ``u + 1`` of a thread if the second precedes the first."""
        tests = test_index(place, self.count, "lt")
        if any(isinstance(test, Const) for test in tests):
            return []
        block = self.e.new_block()
        one, two = ({n: self.e.bind(Load(x, (t, k))) for n, x in self.own.items()} for k in (u, u + 1))
        less = self.bind_comparison(two, one)
        for n, x in self.own.items():
            block.append(Store(x, (t, u), Apply("select", (less, two[n], one[n]), x.dtype)))
            block.append(Store(x, (t, u + 1), Apply("select", (less, one[n], two[n]), x.dtype)))
        return [If(conjunction_of_tests(tests), tuple(block))] if tests else block

    def _merge_level(self, levels: int) -> list[Stmt]:
        """Return one merge level: pairs of runs merged and cut to ``keep`` elements."""
        e, body = self.e, self.e.new_block()
        w, m = e.bind(Load(self.runs, ()), "w"), e.bind(Load(self.valid, ()), "m")
        cut, twice = self.bind_integer_function("eq", w, self.most, "t"), self.bind_integer_function("mul", w, 2)
        pairs = self.bind_integer_function("div", m, twice)
        rest = self.bind_integer_function(
            "min", self.bind_integer_function("sub", m, self.bind_integer_function("mul", pairs, twice)), w
        )
        left = e.bind(
            Apply(
                "select",
                (cut, self.bind_integer_function("add", self.bind_integer_function("mul", pairs, w), rest), m),
                "i64",
            ),
            "n",
        )
        wide = e.bind(Apply("select", (cut, w, twice), "i64"), "n")
        side = sym("l", 0, levels) % 2
        inner = e.new_block()
        self._merge_thread_elements(side, w, m, wide, left)
        first = Apply("lt", (IndexScalar(sym("t", 0, self.threads) * self.each), left), "i1")
        body.append(For("t", 0, self.threads, (If(first, tuple(inner)),), "thread"))
        return [*body, Store(self.valid, (), left), Store(self.runs, (), wide), Barrier()]

    def _merge_thread_elements(self, side: Dim, w: Var, m: Var, wide: Var, left: Var) -> None:
        """Emit a thread's elements of the merge of the pair of runs that contains its position."""
        place = self.e.bind(IndexScalar(sym("t", 0, self.threads) * self.each))
        within = self.bind_integer_function("and", place, self.bind_integer_function("sub", wide, 1))
        pair = self.bind_integer_function(
            "mul",
            self.bind_integer_function("div", self.bind_integer_function("sub", place, within), wide),
            self.bind_integer_function("mul", w, 2),
        )
        middle = self.bind_integer_function("min", self.bind_integer_function("add", pair, w), m)
        end = self.bind_integer_function("min", self.bind_integer_function("add", middle, w), m)

        def read_element(n: int, at: Dim) -> Scalar:
            return Load(self.cells[n], (side, bank_padded_index(at)))

        def write_element(u: int, values: dict[int, Scalar]) -> None:
            at = bank_padded_index(sym("t", 0, self.threads) * self.each + u)
            exists = Apply("lt", (self.bind_integer_function("add", place, u), left), "i1")
            stores = tuple(Store(cell, (1 - side, at), values[n]) for n, cell in self.cells.items())
            self.e.block.append(If(exists, stores))

        self.append_merge(read_element, write_element, (pair, middle, end), within, self.each, self.wide)
