"""Replace sums over ranks of which each rank reads only its own part by sums of that part: half of the bytes.

XLA's partitioner leaves both ops: gradients of weights that are cut over a mesh are summed whole, then sliced.

Before: ``%1 = all_reduce %x : f32[64, 32]`` and ``%2 = dynamic_slice %1, %0, %start : f32[64, 4]``, where ``%start`` is
4 times the place of the rank in its group. After: ``%2 = reduce_scatter %x {dim: 1} : f32[64, 4]``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from aotc.ir.dims.algebra import static
from aotc.ir.opset import OPS
from aotc.ir.tensor.ir import Function, Module, Op, Value, walk
from aotc.lowering.passes.rewrite import Builder, rewrite_function
from aotc.options import Options
from aotc.vmfb.dtypes import to_numpy
from aotc.vmfb.ranks.layout import mesh_of


def fold_reduce_scatter(module: Module, options: Options) -> Module:
    """Return ``module`` with ``reduce_scatter`` in place of each ``all_reduce`` that is only sliced by rank."""
    several = {n: f for n, f in module.functions.items() if "ranks" in f.attrs and "all_reduce" in f.body.names}
    return module.with_functions({n: _with_reduce_scatters(f) for n, f in several.items()})


def _with_reduce_scatters(function: Function) -> Function:
    """Return ``function`` with ``reduce_scatter`` in place of each ``all_reduce`` that is only sliced by rank."""
    dims = _SlicedAllReduce(function).dims
    if not dims:
        return function

    def reduce_scatter_rule(op: Op, b: Builder) -> Sequence[Value] | None:
        """Replace a sliced all-reduce by a reduce-scatter, and remove the slice after it."""
        if op.name == "all_reduce" and op.results[0] in dims:
            attrs = {**op.attrs, "dim": dims[op.results[0]]}
            return b.append(b.op("reduce_scatter", op.operands, attrs, regions=op.regions))
        if op.name == "dynamic_slice" and op.operands[0].type == op.result.type:
            return op.operands[:1]  # what it read is its result now
        return None

    return rewrite_function(function, reduce_scatter_rule)


class _SlicedAllReduce:
    """Find the ``all_reduce`` ops of which each rank reads only its own slice, and the dim of the slices."""

    def __init__(self, function: Function) -> None:
        """Find the all-reduces of which each rank reads only its own slice.

        ``dims`` maps the result of each to the dim that is sliced.
        """
        ops = list(walk(function.body))
        self._ranks = range(mesh_of(function.attrs["ranks"]["mesh"]).size)
        self._definitions = {v: op for op in ops for v in op.results}
        self._known: dict[tuple[Value, int], np.ndarray | None] = {}
        regions = [function.body, *(r for op in ops for r in op.regions)]
        returned = {v for region in regions for v in region.results}
        readers: dict[Value, list[Op]] = {}
        for op in ops:
            for v in dict.fromkeys(op.operands):
                readers.setdefault(v, []).append(op)
        self.dims: dict[Value, int] = {}
        for op in ops:
            if op.name == "all_reduce" and len(op.results) == 1 and op.result not in returned:
                dim = self._dim_cut_by_rank(op, readers.get(op.result, ()))
                if dim is not None:
                    self.dims[op.result] = dim

    def _dim_cut_by_rank(self, total: Op, readers: Sequence[Op]) -> int | None:
        """Return the dim that all readers cut by the rank's place in its group; None if one of them does not."""
        dims = {self._dim_sliced_by_reader(total, reader) for reader in readers}
        return dims.pop() if len(dims) == 1 else None

    def _dim_sliced_by_reader(self, total: Op, reader: Op) -> int | None:
        """Return the dim along which ``reader`` slices the rank's own part of ``total``, or None."""
        value, groups = total.result, total.attrs["groups"]
        if reader.name != "dynamic_slice" or value in reader.operands[1:]:
            return None
        whole, part = value.type.shape, reader.result.type.shape
        cut = [d for d, (n, m) in enumerate(zip(whole, part, strict=True)) if n != m]
        if len(cut) != 1 or any(part[cut[0]] * len(group) != whole[cut[0]] for group in groups):
            return None
        (dim,) = cut
        places = {rank: k for group in groups for k, rank in enumerate(group)}
        for rank in self._ranks:
            start = self._value_on_rank(reader.operands[1 + dim], rank)
            if start is None or rank not in places or int(start) != places[rank] * part[dim]:
                return None
        return dim

    def _value_on_rank(self, value: Value, rank: int) -> np.ndarray | None:
        """Return the value on a rank if it depends only on the rank's number, else None."""
        if (value, rank) not in self._known:
            self._known[value, rank] = None  # of a value that is being computed
            op = self._definitions.get(value)
            self._known[value, rank] = None if op is None else self._result_on_rank(op, rank)
        return self._known[value, rank]

    def _result_on_rank(self, op: Op, rank: int) -> np.ndarray | None:
        """Return the result of ``op`` on a rank by its NumPy reference, or None if it is not known."""
        if op.name == "partition_id":
            return np.array(rank, np.uint32)
        if op.name == "constant":
            return np.broadcast_to(op.attrs["value"], [static(d) for d in op.result.type.shape])
        if op.regions or len(op.results) != 1 or not (op.operands and OPS[op.name].folds):
            return None
        operands = [x for v in op.operands if (x := self._value_on_rank(v, rank)) is not None]
        if len(operands) < len(op.operands):
            return None
        (result,) = OPS[op.name].reference(operands, op.attrs, (), (op.result.type,))
        return np.asarray(result).astype(to_numpy(op.result.type.dtype), copy=False)
