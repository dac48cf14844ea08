"""On CPUs, move transposes of convolution results behind pooling, so that pooling runs in the computed layout (NHWC).

A convolution in NCHW is computed in NHWC and transposed. Before::

    %2 = transpose %1 {perm = (0, 3, 1, 2)} : f32[1, 32, 224, 224]
    %3 = max %2, 0.0
    %4 = reduce_window %3 {window = (1, 1, 2, 2), ...} (max) : f32[1, 32, 112, 112]
After::

    %3 = max %1, 0.0
    %5 = reduce_window %3 {window = (1, 2, 2, 1), ...} (max) : f32[1, 112, 112, 32]
    %4 = transpose %5 {perm = (0, 3, 1, 2)} : f32[1, 32, 112, 112]

Rows of the convolution and of its windows are then in the same order in memory, so that pooling waits for single rows,
not for the whole convolution. The remaining transpose is smaller, and cancels out if another convolution reads it. A
convolution with pixels as columns of its tiles (``pixel_columns``) is computed with channels first, and not changed.
"""

from __future__ import annotations

from collections.abc import Sequence

from aotc.ir.opset import CONTRACT, ELEMENTWISE
from aotc.ir.tensor.copies import copy_region
from aotc.ir.tensor.ir import Module, Op, Region, TensorType, Value, values_captured_by_op, walk
from aotc.lowering.analysis.constant_values import splat_of
from aotc.lowering.analysis.prefix_scans import scan_of, windowed_dims
from aotc.lowering.passes.rewrite import Builder, rewrite_for_target_kind
from aotc.options import Options
from aotc.targets import Target


def sink_transposes(module: Module, options: Options) -> Module:
    """Return ``module`` with transposes of convolution results moved behind elementwise ops and windows."""
    if options.opt_level < 2 or not module.has("reduce_window"):
        return module
    bodies = [f.body for f in module.functions.values()]
    regions = [*bodies, *(r for body in bodies for op in walk(body) for r in op.regions)]
    movable = {v for region in regions for v in _pooling_inputs_to_reorder(region)}
    return (
        rewrite_for_target_kind("cpu", module, options, _TransposeSinker(movable).sink_transpose_rule)
        if movable
        else module
    )


def _pooling_inputs_to_reorder(region: Region) -> set[Value]:
    """Return the pooling inputs whose axes may be reordered, also through elementwise ops."""
    movable: set[Value] = set()
    needed = {*region.results, *(v for op in region.ops for v in values_captured_by_op(op))}
    for op in reversed(region.ops):
        if _is_pooling(op):
            movable.add(op.operands[0])
        elif op.name in ELEMENTWISE and op.result in movable and op.result not in needed:
            movable.update(op.operands)
        elif op.name != "transpose":
            needed.update(op.operands)
    return movable - needed


def _is_pooling(op: Op) -> bool:
    return op.name == "reduce_window" and len(op.results) == 1 and scan_of(op) is None


class _TransposeSinker:
    """Move transposes of convolution results behind elementwise ops and windows, if their results are ``movable``."""

    def __init__(self, movable: set[Value]) -> None:
        self.movable = movable
        self.moved: dict[Value, Op] = {}  # transposes that can be moved further, by their results

    def sink_transpose_rule(self, op: Op, b: Builder, _: Target) -> Sequence[Value] | None:
        """Return the transposed result of ``op`` on the operand of a transpose before it, or None to leave the op."""
        if op.name == "transpose":
            self._record_convolution_transpose(op, b)
            return None
        transpose = next((self.moved[v] for v in op.operands if v in self.moved), None)
        if transpose is None:
            return None
        perm = tuple(transpose.attrs["perm"])
        new = self._sink_below_window(op, perm, b) if _is_pooling(op) else self._sink_below_elementwise(op, perm, b)
        if new is None:
            return None
        result = b.transpose(new, perm)
        if op.result in self.movable:
            self.moved[result] = b.definitions[result]
        return (result,)

    def _record_convolution_transpose(self, op: Op, b: Builder) -> None:
        """Record ``op`` if it transposes the result of a convolution."""
        maker = b.definitions.get(op.operands[0])
        while maker is not None and maker.name == "reshape":
            maker = b.definitions.get(maker.operands[0])
        if op.result not in self.movable or maker is None or maker.name not in CONTRACT:
            return
        by_pixels = maker.name == "conv" and "cols" in maker.attrs
        if not by_pixels:
            self.moved[op.result] = op

    def _sink_below_elementwise(self, op: Op, perm: tuple[int, ...], b: Builder) -> Value | None:
        """Return the elementwise ``op`` on operands before their transposes, or None if that is impossible."""
        if op.name not in ELEMENTWISE or op.result not in self.movable:
            return None
        operands = [self._value_before_transpose(v, perm, b) for v in op.operands]
        untransposed = [v for v in operands if v is not None]
        shape = tuple(op.result.type.shape[perm.index(d)] for d in range(len(perm)))
        type_ = TensorType(op.result.type.dtype, shape)
        return b.make(op.name, untransposed, op.attrs, type_) if len(untransposed) == len(operands) else None

    def _value_before_transpose(self, v: Value, perm: tuple[int, ...], b: Builder) -> Value | None:
        """Return the value whose transpose by ``perm`` is ``v``, or None if only a new op would compute it."""
        if v.type.rank == 0:
            return v
        maker = b.definitions.get(v)
        if v in self.moved and tuple(self.moved[v].attrs["perm"]) == perm:
            return self.moved[v].operands[0]
        if maker is None or (maker.name != "broadcast" and splat_of(v, b.definitions) is None):
            return None
        return b.transpose(v, [perm.index(d) for d in range(len(perm))])

    def _sink_below_window(self, op: Op, perm: tuple[int, ...], b: Builder) -> Value | None:
        """Return the windowed op over the transpose's operand, or None if windows extend along its last axis."""
        x, init = op.operands
        if x not in self.moved or perm.index(len(perm) - 1) in windowed_dims(op):
            return None
        attrs = {key: tuple(of[perm.index(d)] for d in range(len(perm))) for key, of in op.attrs.items()}
        region = copy_region(op.regions[0], b.names)
        return b.make("reduce_window", (self.moved[x].operands[0], init), attrs, regions=(region,))
