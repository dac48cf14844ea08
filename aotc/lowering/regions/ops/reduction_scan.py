"""Prefix scans (cumsum, cummax, ...): windows that reach from one end of a dim to each of its elements.

The dim is cut into chunks of about the square root of its length. Each chunk is scanned from its own first element,
and what came before the chunk is combined with that: an element goes through about ``2 sqrt(n)`` roundings, not ``n``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt

from aotc.ir.dims import Dim, minimum, product, sym
from aotc.ir.loop_ir import Alloc, Buffer, For, Kernel, Load, Scalar, Stmt, Store
from aotc.ir.tensor_ir import Function
from aotc.lowering.analysis.index_maps import Index, delinearize
from aotc.lowering.analysis.scan_windows import scan_of
from aotc.lowering.regions.elemental import Elements
from aotc.lowering.regions.region import RegionBuilder
from aotc.targets import Target

BLOCK = 256
UNKNOWN_CHUNK = 256


def lower_scan(function: Function, target: Target) -> Kernel:
    """Lower a ``reduce_window`` that is a prefix scan: one grid item a block of neighbouring scans."""
    return _Scan(RegionBuilder(function, target), target).kernel()


class _Scan:
    """The operands as ``[outer, n, inner]``; an item takes ``width`` neighbours of one ``outer`` side by side."""

    def __init__(self, b: RegionBuilder, target: Target) -> None:
        self.b = b
        self.op = next(op for op in b.function.body.ops if op.name == "reduce_window")
        found = scan_of(self.op)
        assert found is not None
        self.reverse = found.reverse
        shape = self.op.results[0].type.shape
        self.lead, self.n, self.tail = shape[: found.dim], shape[found.dim], shape[found.dim + 1 :]
        self.chunk = isqrt(self.n) + 1 if isinstance(self.n, int) else UNKNOWN_CHUNK
        outer, inner = product(self.lead), product(self.tail)
        block = 1 if target.kind == "cuda" else BLOCK
        self.block = min(block, inner) if isinstance(inner, int) else block
        self.blocks: Dim = -(-inner // self.block)
        self.grid = outer * self.blocks
        item: Dim = sym("p", 0, self.grid) if self.grid != 1 else 0
        self.outer = item // self.blocks if self.blocks != 1 else item
        self.start: Dim = item % self.blocks * self.block if self.blocks != 1 else 0
        self.width = minimum(inner - self.start, self.block) if self.blocks != 1 else inner
        self.own = self._buffers("own")
        self.before = self._buffers("before")

    def _buffers(self, name: str) -> list[Buffer]:
        shape = () if self.block == 1 else (self.block,)
        return [Buffer(self.b.fresh(name), v.type.dtype, shape, "private") for v in self.op.results]

    def kernel(self) -> Kernel:
        e = self.b.elements()
        start: list[Stmt] = []
        e.enter(start)
        v = self._lane()
        inits = [e.at(x, ()) for x in self.op.operands[len(self.op.results) :]]
        start += [Store(buffer, self._slot(v), init) for buffer, init in zip(self.before, inits, strict=True)]
        body: list[Stmt] = [Alloc(buffer) for buffer in (*self.own, *self.before)]
        body.append(self._lanes(start))
        chunks = -(-self.n // self.chunk)
        begin = sym("c", 0, chunks) * self.chunk
        length = minimum(self.n - begin, self.chunk)
        steps = (
            self._step(e, begin, first=True),
            For("j", 1, length, (self._step(e, begin + sym("j", 1, length), first=False),)),
            self._carry(e, begin + length - 1),
        )
        body.append(For("c", 0, chunks, steps))
        if self.grid != 1:
            body = [For("p", 0, self.grid, tuple(body), "parallel")]
        return self.b.kernel(self.grid, tuple(body), self.b.cost() * 2)

    def _lane(self) -> Dim:
        return 0 if self.block == 1 else sym("v", 0, self.width)

    def _lanes(self, block: list[Stmt]) -> For:
        return For("v", 0, self.width if self.block != 1 else 1, tuple(block))

    def _slot(self, v: Dim) -> Index:
        return () if self.block == 1 else (v,)

    def _place(self, step: Dim, v: Dim) -> Index:
        position = self.n - 1 - step if self.reverse else step
        return (*delinearize(self.outer, self.lead), position, *delinearize(self.start + v, self.tail))

    def _step(self, e: Elements, step: Dim, first: bool) -> For:
        """Add an element to the chunk's own scan, and store that with what came before the chunk."""
        block: list[Stmt] = []
        e.enter(block)
        v = self._lane()
        at, slot = self._place(step, v), self._slot(v)
        own: list[Scalar] = [e.bind(e.at(x, at)) for x in self.op.operands[: len(self.op.results)]]
        if not first:
            own = self._combine(e, [e.bind(Load(buffer, slot)) for buffer in self.own], own)
        block += [Store(buffer, slot, x) for buffer, x in zip(self.own, own, strict=True)]
        found = self._combine(e, [e.bind(Load(buffer, slot)) for buffer in self.before], own)
        block += [Store(buffer, at, x) for buffer, x in zip(self.b.outputs, found, strict=True)]
        return self._lanes(block)

    def _carry(self, e: Elements, last: Dim) -> For:
        """What came before the next chunk is the result at the last step of this one."""
        block: list[Stmt] = []
        e.enter(block)
        v = self._lane()
        pairs = zip(self.before, self.b.outputs, strict=True)
        block += [Store(buffer, self._slot(v), Load(out, self._place(last, v))) for buffer, out in pairs]
        return self._lanes(block)

    def _combine(self, e: Elements, earlier: Sequence[Scalar], later: Sequence[Scalar]) -> list[Scalar]:
        """Combine in the order in which the elements lie in memory."""
        arguments = (*later, *earlier) if self.reverse else (*earlier, *later)
        return [e.bind(x) for x in e.region(self.op.regions[0], tuple(arguments))]
