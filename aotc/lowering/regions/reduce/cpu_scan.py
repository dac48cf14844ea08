"""Prefix scans (cumsum, cummax, ...): windows that reach from one end of a dim to each of its elements.

The dim is cut into chunks of about the square root of its length. Each chunk is scanned from its own first element, and
the result of the chunks before it is combined with that. A result thus has about ``2 sqrt(n)`` roundings, not ``n``
(N. Higham, "The accuracy of floating point summation", 1993: blocked summation).
"""

from __future__ import annotations

from collections.abc import Sequence

from aotc.ir.dims.algebra import Dim, minimum, sym
from aotc.ir.loop.ir import Alloc, Buffer, For, Kernel, Load, Scalar, Stmt, Store
from aotc.lowering.analysis.index_maps import Index
from aotc.lowering.analysis.prefix_scans import scan_of
from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.elements.elements import Elements
from aotc.lowering.elements.row_axis import RowBlocks
from aotc.lowering.plans.cpu_scan import ChunkScanPlan
from aotc.lowering.threshold import Estimate


def lower_chunk_scan(b: RegionBuilder, plan: ChunkScanPlan) -> Kernel:
    """Lower a ``reduce_window`` that is a prefix scan: one grid item per block of neighbouring scans."""
    return _ChunkScan(b, plan).chunk_scan_kernel()


SCAN_WORK = Estimate(
    2,
    "times that a scan combines an element",
    "two by construction: once within its chunk, once with the result of the chunks before it",
)


class _ChunkScan:
    """Emit the loops over the scans of one grid item, in parallel lanes."""

    def __init__(self, b: RegionBuilder, plan: ChunkScanPlan) -> None:
        """Divide the rows into blocks and each row into chunks; name the buffers of both scans."""
        self.b = b
        self.op = b.region_root_op("reduce_window")
        scan = scan_of(self.op)
        assert scan is not None
        self.reverse = scan.reverse
        self.rows = RowBlocks(self.op.results[0].type.shape, scan.dim, plan.lanes)
        self.n, self.chunk = self.rows.n, plan.chunk
        self.own = self._scan_buffers("own")
        self.before = self._scan_buffers("before")

    def _scan_buffers(self, name: str) -> list[Buffer]:
        shape = () if self.rows.block == 1 else (self.rows.block,)
        return [Buffer(self.b.fresh(name), v.type.dtype, shape, "private") for v in self.op.results]

    def chunk_scan_kernel(self) -> Kernel:
        """Return the kernel: a loop over chunks, each scanned on its own and combined with the total before it."""
        e = self.b.elements()
        start = e.new_block()
        v = self._scan_lane()
        inits = [e.at(x, ()) for x in self.op.inits]
        start += [Store(buffer, self._carry_slot(v), init) for buffer, init in zip(self.before, inits, strict=True)]
        body: list[Stmt] = [Alloc(buffer) for buffer in (*self.own, *self.before)]
        body.append(self._loop_over_scan_lanes(start))
        chunks = -(-self.n // self.chunk)
        begin = sym("c", 0, chunks) * self.chunk
        length = minimum(self.n - begin, self.chunk)
        steps = (
            self._emit_scan_step(e, begin, first=True),
            For("j", 1, length, (self._emit_scan_step(e, begin + sym("j", 1, length), first=False),)),
            self._carry_to_next_chunk(e, begin + length - 1),
        )
        body.append(For("c", 0, chunks, steps))
        return self.b.grid(self.rows.items, body, self.b.scalar_operations() * SCAN_WORK.value)

    def _scan_lane(self) -> Dim:
        return 0 if self.rows.block == 1 else sym("v", 0, self.rows.width)

    def _loop_over_scan_lanes(self, block: list[Stmt]) -> For:
        return For("v", 0, self.rows.width if self.rows.block != 1 else 1, tuple(block))

    def _carry_slot(self, v: Dim) -> Index:
        return () if self.rows.block == 1 else (v,)

    def _scan_step_index(self, step: Dim, v: Dim) -> Index:
        position = self.n - 1 - step if self.reverse else step
        return self.rows.element_index(position, v)

    def _emit_scan_step(self, e: Elements, step: Dim, first: bool) -> For:
        """Emit a step of a prefix scan: add an element to the chunk's scan, and store it with earlier chunks."""
        block = e.new_block()
        v = self._scan_lane()
        at, slot = self._scan_step_index(step, v), self._carry_slot(v)
        own: list[Scalar] = [e.bind(e.at(x, at)) for x in self.op.inputs]
        if not first:
            own = self._combine_in_memory_order(e, [e.bind(Load(buffer, slot)) for buffer in self.own], own)
        block += [Store(buffer, slot, x) for buffer, x in zip(self.own, own, strict=True)]
        total = self._combine_in_memory_order(e, [e.bind(Load(buffer, slot)) for buffer in self.before], own)
        block += [Store(buffer, at, x) for buffer, x in zip(self.b.outputs, total, strict=True)]
        return self._loop_over_scan_lanes(block)

    def _carry_to_next_chunk(self, e: Elements, last: Dim) -> For:
        """Return the copy of the chunk's last result, which the next chunk combines with its elements."""
        block = e.new_block()
        v = self._scan_lane()
        pairs = zip(self.before, self.b.outputs, strict=True)
        block += [
            Store(buffer, self._carry_slot(v), Load(out, self._scan_step_index(last, v))) for buffer, out in pairs
        ]
        return self._loop_over_scan_lanes(block)

    def _combine_in_memory_order(self, e: Elements, earlier: Sequence[Scalar], later: Sequence[Scalar]) -> list[Scalar]:
        """Return ``earlier`` combined with ``later``, in the order of the elements in memory."""
        arguments = (*later, *earlier) if self.reverse else (*earlier, *later)
        return [e.bind(x) for x in e.inline_region(self.op.regions[0], tuple(arguments))]
