"""``sort_runs`` on a GPU: a thread finds the place of its element by searching the runs that it is merged with.

Where runs are not sorted yet, a block of threads takes one into shared memory and merges pairs of runs of 1, 2, 4...
elements there, from one half of a buffer to the other; of runs longer than what is kept, only that goes on. Runs that
are sorted are merged in the memory of the GPU, a few at a time, by a thread for each element.

The place of an element is its own in its run and the number of those before it in the others: in runs on its left they
may be equal to it, in those on its right not, so that the order of equal ones stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aotc.ir.dims import Dim, ceildiv, minimum, product, sym
from aotc.ir.loop_ir import Alloc, Apply, Barrier, Buffer, Const, For, If, Kernel, Load, Scalar, Stmt, Store, Var, While
from aotc.ir.loop_ir import Index as IndexScalar
from aotc.ir.tensor_ir import Function
from aotc.lowering.analysis.cost import GPU_SORT_THREADS
from aotc.lowering.analysis.cost_work import MERGE_WORK
from aotc.lowering.analysis.index_maps import Index, delinearize
from aotc.lowering.regions.elemental import all_of, test_index
from aotc.lowering.regions.ops.sorting_radix import integer
from aotc.lowering.regions.region import RegionBuilder, grid_item
from aotc.targets import Target

_WARP = 32
Read = Callable[[Dim], list[Scalar]]


def lower_sort_runs(function: Function, target: Target) -> Kernel:
    """Sort runs in blocks, or merge sorted ones."""
    b = RegionBuilder(function, target)
    runs = _Runs(b)
    return runs.merged() if runs.done > 1 else _BlockSort(b).kernel()


class _Runs:
    """What both kernels share: the op, and the search."""

    def __init__(self, b: RegionBuilder) -> None:
        self.b, self.e = b, b.elements()
        self.op = b.the_op("sort_runs")
        a = self.op.attrs
        self.width, self.done, self.keep, self.numbered = a["width"], a["done"], a["keep"], a["numbered"]
        *self.lead, self.n = self.op.operands[0].type.shape
        self.rows = product(self.lead)
        self.outputs = [b.output_of(v) for v in self.op.results]
        region = self.op.regions[0]
        inside = {v for op in region.ops for v in op.operands} | set(region.results)
        read = [n for n in range(len(self.op.results)) if inside & set(region.params[2 * n : 2 * n + 2])]
        self.kept = [n for n, out in enumerate(self.outputs) if out is not None or n in read]
        self.compared = [n for n in self.kept if n in read]

    def bind(self, fn: str, x: Scalar, y: Scalar | int, prefix: str = "n") -> Var:
        """Bind a function of two integers."""
        other = integer(y) if isinstance(y, int) else y
        compares = fn in ("lt", "le", "gt", "ge", "eq", "ne")
        return self.e.bind(Apply(fn, (x, other), "i1" if compares else "i64"), prefix)

    def count_before(
        self, own: Sequence[Scalar], read: Read, first: Scalar, begin: Scalar, end: Scalar, extent: Dim
    ) -> Var:
        """Append the search in a sorted run; return how many elements of it go before ``own``.

        ``first`` says whether ``own`` stands on the left of the run: then its equals there come after it.
        """
        e, block = self.e, self.e.block
        low, high = (Buffer(self.b.fresh(name), "i64", (), "private") for name in ("low", "high"))
        block += [Alloc(low), Alloc(high), Store(low, (), begin), Store(high, (), end)]
        test = e.new_block()
        more = self.bind("lt", e.bind(Load(low, ())), e.bind(Load(high, ())), "t")
        body = e.new_block()
        both = self.bind("add", e.bind(Load(low, ())), e.bind(Load(high, ())))
        middle = self.bind("shr_arith", both, 1)
        other = [e.bind(x) for x in read(sym(middle.name, 0, extent))]
        pairs: list[Scalar] = []
        values = iter(zip(own, other, strict=True))
        for n in range(len(self.op.results)):
            if n not in self.compared:  # nobody reads it
                pairs += [Const(0, "i32")] * 2
                continue
            x, y = next(values)
            pairs += [Apply("select", (first, y, x), x.dtype), Apply("select", (first, x, y), x.dtype)]
        (less,) = e.region(self.op.regions[0], tuple(e.bind(p) if isinstance(p, Apply) else p for p in pairs))
        before = e.bind(Apply("eq", (less, first), "i1"))
        up = (Store(low, (), Apply("add", (middle, integer(1)), "i64")),)
        body.append(If(before, up, (Store(high, (), middle),)))
        block.append(While(tuple(test), more, tuple(body)))
        e.enter(block)
        return self.bind("sub", e.bind(Load(low, ())), begin)

    # --- runs in the memory of the GPU ---

    def merged(self) -> Kernel:
        """Return the kernel that merges sorted runs."""
        size = self.rows * self.n
        e, w = self.e, self.done
        *head, i = delinearize(grid_item(size), (*self.lead, self.n))
        body = e.new_block()
        here = e.bind(IndexScalar(i))
        i = sym(here.name, 0, self.n)
        values = {n: e.bind(e.at(self.op.operands[n], (*head, i))) for n in self.kept}
        group, own = i // self.width * self.width, i // w * w
        rank = Buffer(self.b.fresh("rank"), "i64", (), "private")
        body += [Alloc(rank), Store(rank, (), IndexScalar(i - own))]
        begin = group + sym("j", 0, self.width // w) * w
        inner = e.new_block()
        first = e.bind(Apply("gt", (IndexScalar(begin), IndexScalar(own)), "i1"))

        def read(at: Dim) -> list[Scalar]:
            return [e.at(self.op.operands[n], (*head, at)) for n in self.compared]

        low, high = e.bind(IndexScalar(begin)), e.bind(IndexScalar(minimum(begin + w, self.n)))
        count = self.count_before([values[n] for n in self.compared], read, first, low, high, self.n)
        e.block.append(Store(rank, (), self.bind("add", e.bind(Load(rank, ())), count)))
        another = Apply("ne", (IndexScalar(begin), IndexScalar(own)), "i1")
        there = Apply("lt", (IndexScalar(begin), IndexScalar(self.n)), "i1")
        search = If(all_of((another, there)), tuple(inner))
        body.append(For("j", 0, self.width // w, (search,)))
        e.enter(body)
        place = self.bind("add", e.bind(Load(rank, ())), e.bind(IndexScalar(group)))
        at: Index = (*head, sym(place.name, 0, self.n))
        body += [Store(out, at, values[n]) for n, out in enumerate(self.outputs) if out is not None]
        return self.b.grid(size, body, size * MERGE_WORK.value)


class _BlockSort(_Runs):
    """Writes the kernel that sorts runs in shared memory."""

    def __init__(self, b: RegionBuilder) -> None:
        super().__init__(b)
        wide = self.width
        while isinstance(self.n, int) and wide >= 2 * self.n and wide > 1:
            wide //= 2
        self.wide = wide
        self.threads = min(GPU_SORT_THREADS.value, max(wide // 2, _WARP))
        self.each = -(-wide // self.threads)
        self.most = min(1 << (self.keep - 1).bit_length(), wide)  # of a run that go on
        dtypes = [v.type.dtype for v in self.op.results]
        self.cells = {n: Buffer(b.fresh("run"), dtypes[n], (2, wide), "shared") for n in self.kept}
        self.runs, self.valid = (Buffer(name, "i64", (), "private") for name in ("width", "valid"))

    def kernel(self) -> Kernel:
        per_row = ceildiv(self.n, self.width)
        items = self.rows * per_row
        *self.head, chunk = delinearize(grid_item(items), (*self.lead, per_row))
        self.begin = chunk * self.width
        self.count = minimum(self.n - self.begin, self.width)
        levels = (self.wide - 1).bit_length()
        body: list[Stmt] = [Alloc(x) for x in (*self.cells.values(), self.runs, self.valid)]
        body += [Store(self.runs, (), integer(1)), Store(self.valid, (), IndexScalar(self.count))]
        body += [self._elements(self._read_one, self.count), Barrier()]
        if levels:
            body.append(For("l", 0, levels, tuple(self._level())))
        body.append(self._elements(lambda at: self._write_one(at, chunk, levels % 2), minimum(self.count, self.keep)))
        return self.b.grid(items, body, self.rows * self.n * MERGE_WORK.value * max(levels, 1))

    def _elements(self, write: Callable[[Dim], None], end: Dim) -> For:
        """Return the loop over a thread's elements, those below ``end``."""
        block: list[Stmt] = []
        for u in range(self.each):
            at = sym("t", 0, self.threads) + u * self.threads
            tests = test_index(at, end, "lt")
            if any(isinstance(test, Const) for test in tests):
                continue
            inner = self.e.new_block()
            write(at)
            block += [If(all_of(tests), tuple(inner))] if tests else inner
        return For("t", 0, self.threads, tuple(block), "thread")

    def _read_one(self, at: Dim) -> None:
        place = self.begin + at
        for n, cell in self.cells.items():
            operand = self.op.operands[n] if n < len(self.op.operands) else None
            value = IndexScalar(place, "i32") if operand is None else self.e.at(operand, (*self.head, place))
            self.e.block.append(Store(cell, (0, at), value))

    def _write_one(self, at: Dim, chunk: Dim, side: int) -> None:
        index = (*self.head, chunk * self.keep + at)
        pairs = [(out, self.cells[n]) for n, out in enumerate(self.outputs) if out is not None]
        self.e.block += [Store(out, index, Load(cell, (side, at))) for out, cell in pairs]

    def _level(self) -> list[Stmt]:
        """Merge pairs of runs; what is left of each is at most what is kept."""
        body = self.e.new_block()
        w, m = self.e.bind(Load(self.runs, ()), "w"), self.e.bind(Load(self.valid, ()), "m")
        cut = self.bind("eq", w, self.most, "t")
        valid = sym(m.name, 0, self.wide + 1)
        body.append(self._elements(lambda at: self._move_one(at, w, m, cut), valid))
        self.e.enter(body)
        pairs = self.bind("div", m, self.bind("mul", w, 2))
        rest = self.bind("min", self.bind("sub", m, self.bind("mul", self.bind("mul", pairs, w), 2)), w)
        left = self.bind("add", self.bind("mul", pairs, w), rest)
        body.append(Store(self.valid, (), Apply("select", (cut, left, m), "i64")))
        body.append(Store(self.runs, (), Apply("select", (cut, w, self.bind("mul", w, 2)), "i64")))
        return [*body, Barrier()]

    def _move_one(self, at: Dim, w: Var, m: Var, cut: Var) -> None:
        e = self.e
        side = sym("l", 0, (self.wide - 1).bit_length()) % 2
        i = e.bind(IndexScalar(at))
        values = {n: e.bind(Load(cell, (side, at))) for n, cell in self.cells.items()}
        within = self.bind("and", i, self.bind("sub", w, 1))
        own = self.bind("sub", i, within)
        other = self.bind("xor", own, w)
        first = self.bind("gt", other, own, "t")

        def read(where: Dim) -> list[Scalar]:
            return [Load(self.cells[n], (side, where)) for n in self.compared]

        end = self.bind("min", self.bind("add", other, w), m)
        count = self.count_before([values[n] for n in self.compared], read, first, other, end, self.wide)
        rank = self.bind("add", within, count)
        pair = self.bind("min", own, other)
        start = e.bind(Apply("select", (cut, self.bind("shr_arith", pair, 1), pair), "i64"), "n")
        reach = e.bind(Apply("select", (cut, w, self.bind("mul", w, 2)), "i64"), "n")
        place = sym(self.bind("add", start, rank).name, 0, self.wide)
        stores = tuple(Store(cell, (1 - side, place), values[n]) for n, cell in self.cells.items())
        if self.most == self.wide:
            e.block += stores
        else:
            e.block.append(If(Apply("lt", (rank, reach), "i1"), stores))


