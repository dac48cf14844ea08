"""Rewrite collectives along any dims as collectives along the first dim, where each rank's part is contiguous.

The runtime, and libraries such as NCCL, then move whole ranges of bytes; the transposes around them fuse with the ops
that make and read the arrays.

Before: ``%1 = all_gather %x {dim: 1}`` of ``f32[4, 8]`` over 2 ranks. After: ``all_gather`` of the same array along dim
0, a reshape to ``f32[2, 4, 8]``, a transpose to ``f32[4, 2, 8]`` and a reshape to ``f32[4, 16]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from aotc.ir.dims.algebra import Dim
from aotc.ir.opset.collective import group_size
from aotc.ir.tensor.ir import Op, Value
from aotc.lowering.passes.rewrite import Builder

Shape = Sequence[Dim]


def along_leading_dim(op: Op, b: Builder, ranks: int) -> Sequence[Value] | None:
    """Return the results of a collective along another dim than the first; None for any other op.

    Parameters
    ----------
    ranks : int
        The number of all ranks, which are one group if the collective has no groups.
    """
    groups = op.attrs.get("groups") or (tuple(range(ranks)),)
    op, parts = replace(op, attrs={**op.attrs, "groups": groups}), group_size(groups)
    match op.name:
        case "all_gather" if op.attrs["dim"]:
            return [
                _leading_parts_to_dim(v, op.attrs["dim"], parts, b)
                for v in _append_collective_like(op, op.operands, {"dim": 0}, b)
            ]
        case "reduce_scatter" if op.attrs["dim"]:
            split = [_dim_parts_to_leading(v, op.attrs["dim"], parts, b) for v in op.operands]
            return _append_collective_like(op, split, {"dim": 0}, b)
        case "all_to_all" if op.attrs["split_dim"] or op.attrs["concat_dim"]:
            split = [_dim_parts_to_leading(v, op.attrs["split_dim"], parts, b) for v in op.operands]
            exchanged = _append_collective_like(op, split, {"split_dim": 0, "concat_dim": 0}, b)
            return [_leading_parts_to_dim(v, op.attrs["concat_dim"], parts, b) for v in exchanged]
    return None


def _append_collective_like(op: Op, operands: Sequence[Value], dims: dict[str, int], b: Builder) -> Sequence[Value]:
    """Append the collective ``op`` on other operands, with the attributes ``dims`` replaced; return its results."""
    collective = b.op(op.name, operands, {**op.attrs, **dims}, regions=op.regions)
    return b.append(collective)


def _dim_parts_to_leading(x: Value, dim: int, parts: int, b: Builder) -> Value:
    """Return ``x`` with its ``dim`` cut into parts, which follow one another along the first dim."""
    shape, rank = x.type.shape, x.type.rank
    if not dim:
        return x
    split = b.reshape(x, (*shape[:dim], parts, shape[dim] // parts, *shape[dim + 1 :]))
    first = b.transpose(split, (dim, *(d for d in range(rank + 1) if d != dim)))
    return b.reshape(first, (parts * shape[0], *shape[1:dim], shape[dim] // parts, *shape[dim + 1 :]))


def _leading_parts_to_dim(x: Value, dim: int, parts: int, b: Builder) -> Value:
    """Return ``x``, whose parts follow one another along the first dim, with the parts concatenated along ``dim``."""
    if not dim:
        return x
    shape = (x.type.shape[0] // parts, *x.type.shape[1:])
    split = b.reshape(x, (parts, *shape))
    inside = b.transpose(split, (*range(1, dim + 1), 0, *range(dim + 1, len(shape) + 1)))
    return b.reshape(inside, (*shape[:dim], parts * shape[dim], *shape[dim + 1 :]))
