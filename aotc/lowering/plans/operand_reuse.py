"""Find axes of a reduction along which an operand is constant: each element can be read once for the whole axis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from aotc.ir.dims.algebra import Dim, product
from aotc.ir.dims.symbols import symbols
from aotc.ir.loop.access import loads_and_indices, statement_scalars
from aotc.ir.loop.ir import Buffer, Load, Prefetch, Scalar, Stmt, walk
from aotc.ir.opset import ACCUMULATED
from aotc.ir.tensor.ir import Op
from aotc.lowering.analysis.anchors import single_axis
from aotc.lowering.analysis.index_maps import Index, linearize
from aotc.lowering.analysis.prefix_scans import combiner_op_name
from aotc.lowering.cost_model.work import scalar_work_of_op
from aotc.lowering.elements.builder import RegionBuilder, reduction_operands_at
from aotc.lowering.elements.nests import axis_coefficient
from aotc.lowering.plans.thresholds import SHARED_ROWS
from aotc.lowering.threshold import Limit
from aotc.vmfb.dtypes import size_of

LIGHT_COLUMN = Limit(
    12,
    "scalar operations per element of a reduction that takes several rows at a time",
    "with more the code would grow, and memory no longer bounds the time",
)


def is_light_reduction(b: RegionBuilder, ops: Sequence[Op]) -> bool:
    """Return True if reductions only accumulate, with few operations per element."""
    read = {v for loop in b.row_stages().loops for v in loop.cone}
    work = sum(scalar_work_of_op(b.ops[v]) for v in read if v in b.ops)
    return all(combiner_op_name(op) in ACCUMULATED for op in ops) and LIGHT_COLUMN.holds(work)


NEAR_BYTES = Limit(
    1 << 18,
    "bytes of a matrix that is not prefetched for a reduction with few rows or columns",
    "Zen 5, one core, 8 rows, us without and with prefetch: 384 x 512 21 and 19, 1024 x 1024 110 and 108, 4096 x 4096 "
    "5393 and 3250",
)


class ReductionReads:
    """Analysis of the operand loads of the reductions ``ops`` of a region."""

    def __init__(self, b: RegionBuilder, ops: Sequence[Op]) -> None:
        """Find the loads of one step of the reductions ``ops``, as row-major offsets of the iteration."""
        self.b, self.ops = b, ops
        self.e = b.trial_elements()
        self.elements = self.loads_of_step(b.anchors.space)
        self.loads = [linearize(x.index, x.buffer.shape) for x in self.elements]
        self.size = min((size_of(x.dtype) for x in self.elements), default=0)

    def loads_of_step(self, iteration: Index) -> list[Load]:
        """Return the loads of one reduction step at index ``iteration``."""
        trial = self.e.new_block()
        for op in self.ops:
            for x in reduction_operands_at(self.b, self.e, op, iteration):
                self.e.bind(x)
        scalars: list[Scalar] = [x for s in walk(tuple(trial)) for x in statement_scalars(s)]
        return [x for x in loads_and_indices(scalars) if isinstance(x, Load)]

    def can_share_along(self, k: int, wide: Sequence[int]) -> bool:
        """Return True if an operand varies along all axes ``wide`` and is constant along ``k``: rows can share it."""
        long = [j for j in wide if self.b.shape[j] != 1]
        return any(all(self._varies_along(at, j) for j in long) and not self._varies_along(at, k) for at in self.loads)

    def prefetched_buffers(self, wide: Sequence[int]) -> list[Buffer]:
        """Return the buffers to prefetch: larger than the caches, and varying along all axes ``wide``."""
        buffers = [x.buffer for x, at in zip(self.elements, self.loads) if all(self._varies_along(at, j) for j in wide)]
        far = [x for x in buffers if not NEAR_BYTES.holds(product(x.shape) * size_of(x.dtype))]
        return list(dict.fromkeys(far))

    def adjacent_loads(self, k: int | None, long: Sequence[int]) -> list[Load]:
        """Return the loads that vary along ``long`` but not along ``k``, if each is the only load of its buffer."""
        assert k is not None
        short_constant_axes = Counter(x.buffer for x in self.elements)
        pairs = zip(self.elements, self.loads, strict=True)
        alone = [(x, at) for x, at in pairs if short_constant_axes[x.buffer] == 1 and not self._varies_along(at, k)]
        return [x for x, at in alone if any(self._varies_along(at, j) for j in long)]

    def prefetches_of_step(self, streams: Sequence[Buffer], iteration: Index) -> list[Stmt]:
        """Return the prefetches of large operands ``streams`` for a reduction step at index ``iteration``.

        An index that the term itself computes, such as that of a gather, cannot be prefetched.
        """
        own_symbols = {s for e in iteration for s in symbols(e)}

        def is_prefetchable(index: Index) -> bool:
            return all(s in own_symbols or s.extent is None for e in index for s in symbols(e))

        loads = [x for x in self.loads_of_step(iteration) if x.buffer in streams and is_prefetchable(x.index)]
        return [Prefetch(x.buffer, x.index) for x in dict.fromkeys(loads)]

    def _varies_along(self, at: Dim, k: int) -> bool:
        axis = single_axis(self.b.anchors.space[k])
        return axis is not None and axis_coefficient(at, axis) != 0

    def contiguous_load_axis(self) -> int | None:
        """Return the axis along which most loads are contiguous."""
        axes = [(k, axis) for k, s in enumerate(self.b.anchors.space) if (axis := single_axis(s)) is not None]
        steps = [{k: axis_coefficient(at, axis) for k, axis in axes} for at in self.loads]
        moving = [len([k for k, step in each.items() if step != 0]) for each in steps]
        most = [each for each, count in zip(steps, moving, strict=True) if count == max(moving)]
        return next(
            (k for k, _ in reversed(axes) if all(x[k] == 1 for x in most) and all(x[k] in (0, 1) for x in steps)), None
        )

    def short_constant_axes(self, free: Sequence[int], wide: Sequence[int]) -> tuple[int, ...]:
        """Return short axes of ``free`` along which an operand that varies along ``wide`` is constant."""
        chosen: list[int] = []
        for k in free:
            rows = product(self.b.shape[j] for j in (*chosen, k))
            if SHARED_ROWS.holds(rows) and rows != 0 and self.can_share_along(k, wide):
                chosen.append(k)
        return tuple(chosen)
