"""``sort_runs`` on a GPU of runs too long for one block: count, for each element, the elements of its run before it.

All pairs are compared, but on all multiprocessors; merging by a block per run would leave most of them idle. A warp has
one element per lane. The warps of a block divide the elements to compare with among themselves, and add up their counts
in shared memory. Of equal elements the first in memory comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from aotc.ir.dims.algebra import Dim, ceildiv, maximum, minimum, mod, product, sym
from aotc.ir.loop.ir import WARP, Alloc, Apply, Barrier, Buffer, Const, For, If, Kernel, Load, Scalar, Stmt, Store
from aotc.ir.loop.ir import Index as IndexScalar
from aotc.lowering.analysis.index_maps import delinearize
from aotc.lowering.elements.builder import RegionBuilder, grid_item
from aotc.lowering.elements.elements import conjunction_of_tests, test_index
from aotc.lowering.plans.gpu_sort import CountedRunPlan, comparator_operands


def lower_counted_runs(b: RegionBuilder, plan: CountedRunPlan) -> Kernel:
    """Lower a GPU sort of rows by counting, for each element, the elements before it."""
    return _CountingSort(b, plan).counting_sort_kernel()


class _CountingSort:
    """Emit the kernel for runs as long as the rows."""

    def __init__(self, b: RegionBuilder, plan: CountedRunPlan) -> None:
        """Name the counters of threads and the shared partial counts of warps."""
        self.b, self.e, self.width = b, b.elements(), plan.width
        self.op = b.region_root_op("sort_runs")
        *self.lead, self.n = self.op.operands[0].type.shape
        self.operands = range(len(self.op.operands))
        self.compared = comparator_operands(self.op)
        self.warps = plan.warps
        self.threads = self.warps * WARP
        self.t = sym("t", 0, self.threads)
        self.lane, self.warp = mod(self.t, WARP), self.t // WARP
        self.parts = Buffer(b.fresh("parts"), "i32", (self.warps, WARP), "shared")
        self.count = Buffer(b.fresh("count"), "i32", (self.threads,), "private")

    def counting_sort_kernel(self) -> Kernel:
        """Return the kernel that sorts rows by counting."""
        rows, blocks = product(self.lead), ceildiv(self.n, WARP)
        *self.head, block = delinearize(grid_item(rows * blocks), (*self.lead, blocks))
        self.base = block * WARP
        self.place = minimum(self.base + self.lane, self.n - 1)
        body: list[Stmt] = [
            Alloc(self.parts),
            Alloc(self.count),
            self._count_preceding_elements(),
            Barrier(),
            self._store_at_sorted_positions(),
        ]
        return self.b.grid(rows * blocks, body, rows * self.n * self.n)

    def _thread_loop(self, block: Sequence[Stmt], count: int = 0) -> For:
        return For("t", 0, count or self.threads, tuple(block), "thread")

    def _count_preceding_elements(self) -> For:
        """Return the loop that counts a thread's share of the elements before its own."""
        e = self.e
        block = e.new_block()
        own = {n: e.bind(e.at(self.op.operands[n], (*self.head, self.place))) for n in self.compared}
        block.append(Store(self.count, (self.t,), Const(0, "i32")))
        width = self.width
        pieces = self.n // width
        share = ceildiv(pieces, self.warps)
        first = self.warp * share
        end = minimum(first + share, pieces)
        begin, behind = self.base // width, minimum((self.base + WARP) // width, pieces)
        left = self._loop_over_other_elements(
            first, minimum(end, begin), width, lambda k: self._precedes_from_left(own, self._load_other_elements(k))
        )
        among = self._loop_over_other_elements(
            maximum(first, begin), minimum(end, behind), width, lambda k: self._precedes_on_either_side(own, k)
        )
        right = self._loop_over_other_elements(
            maximum(first, behind), end, width, lambda k: self._precedes_from_right(own, self._load_other_elements(k))
        )
        store = Store(self.parts, (self.warp, self.lane), Load(self.count, (self.t,)))
        return self._thread_loop([*block, left, among, right, store])

    def _loop_over_other_elements(self, begin: Dim, end: Dim, width: int, before: Callable[[Dim], Scalar]) -> For:
        """Return the loop over other elements, ``width`` neighbours at a time."""
        name, lane = self.b.fresh("k"), self.b.fresh("u")
        inner = self.e.new_block()
        is_before = before(sym(name, 0, self.n // width) * width + sym(lane, 0, width))
        one = Apply("select", (is_before, Const(1, "i32"), Const(0, "i32")), "i32")
        inner.append(Store(self.count, (self.t,), one, "add"))
        return For(name, begin, end, (For(lane, 0, width, tuple(inner), "lanes"),))

    def _load_other_elements(self, k: Dim) -> dict[int, Scalar]:
        return {n: self.e.bind(self.e.at(self.op.operands[n], (*self.head, k))) for n in self.compared}

    def _compare_elements(self, one: Mapping[int, Scalar], two: Mapping[int, Scalar]) -> Scalar:
        """Emit the comparator on two elements, given by array number; return its result."""
        nothing = Const(0, "i32")  # operand that the comparator does not read
        pairs = [x for n in self.operands for x in (one.get(n, nothing), two.get(n, nothing))]
        (less,) = self.e.inline_region(self.op.regions[0], tuple(pairs))
        return self.e.bind(less)

    def _precedes_from_left(self, own: Mapping[int, Scalar], others: Mapping[int, Scalar]) -> Scalar:
        return self.e.bind(Apply("not", (self._compare_elements(own, others),), "i1"))

    def _precedes_from_right(self, own: Mapping[int, Scalar], others: Mapping[int, Scalar]) -> Scalar:
        return self._compare_elements(others, own)

    def _precedes_on_either_side(self, own: Mapping[int, Scalar], k: Dim) -> Scalar:
        """Bind the test that the element ``k`` before or after a thread's own element precedes it."""
        others = self._load_other_elements(k)
        is_left = Apply("lt", (IndexScalar(k), IndexScalar(self.place)), "i1")
        sides = self._precedes_from_left(own, others), self._precedes_from_right(own, others)
        return self.e.bind(Apply("select", (is_left, *sides), "i1"))

    def _store_at_sorted_positions(self) -> For:
        """Return the stores of a block's elements at their sorted positions."""
        e, t = self.e, sym("t", 0, WARP)
        block = e.new_block()
        total: Scalar = Load(self.parts, (0, t))
        for warp in range(1, self.warps):
            total = Apply("add", (total, Load(self.parts, (warp, t))), "i32")
        to = sym(e.bind(total, "n").name, 0, self.n)
        at = self.base + t
        values = [e.bind(e.at(x, (*self.head, minimum(at, self.n - 1)))) for x in self.op.operands]
        pairs = zip(map(self.b.output_buffer_of, self.op.results), values, strict=True)
        stores = [Store(out, (*self.head, to), x) for out, x in pairs if out is not None]
        tests = test_index(at, self.n, "lt")
        return self._thread_loop(
            [*block, If(conjunction_of_tests(tests), tuple(stores))] if tests else [*block, *stores], WARP
        )
