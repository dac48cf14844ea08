"""Evaluate ops that depend only on constants at compile time, with the NumPy reference of each op.

Not folded: ops with results much larger than their operands (they would only increase the size of the file), expensive
ops, loops, and ops whose results may differ from call to call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from aotc.ir.dims.algebra import is_static
from aotc.ir.opset import ELEMENTWISE, FOLDED, MOVES, PRODUCTS, SCALARS
from aotc.ir.semantics.run import Activation
from aotc.ir.tensor.ir import Function, Module, Op, TensorType, Value, captured_values, use_counts
from aotc.lowering.analysis.constant_values import constant_of
from aotc.lowering.passes.rewrite import Builder, rewrite_function
from aotc.lowering.placement.op_targets import op_targets
from aotc.lowering.plans.thresholds import FOLDED_BROADCAST, FOLDED_BYTES, FOLDED_GROWTH
from aotc.lowering.plans.wider_weights import WiderWeights
from aotc.lowering.threshold import Limit
from aotc.options import Options
from aotc.targets import Target
from aotc.vmfb.dtypes import size_of


def fold_constants(module: Module, options: Options) -> Module:
    """Return ``module`` with ops on constants replaced by constants of the same dtype and value."""
    home, _ = op_targets(module, options)
    folders = {n: _ConstantFolder(f, home) for n, f in module.functions.items()}
    return module.with_functions(
        {n: rewrite_function(f, folders[n].fold_constant_rule, FOLDED) for n, f in module.functions.items()}
    )


class _ConstantFolder:
    """Evaluate ops on constants, and drop intermediate constants early: weights may occupy most of the memory."""

    def __init__(self, function: Function, home: Callable[[Op], Target]) -> None:
        self.function, self.home = function, home
        self.left: dict[Value, int] = {}

    @cached_property
    def uses(self) -> dict[Value, int]:
        """Return the number of uses of each value; computed on demand, as mostly nothing is folded."""
        return use_counts(self.function.body)

    @cached_property
    def wider_weights(self) -> WiderWeights:
        """Return the analysis of constants that are wider than the values they are computed from."""
        return WiderWeights(self.function, self.home)

    def fold_constant_rule(self, op: Op, b: Builder) -> Sequence[Value] | None:
        """Return the constants that replace the results of ``op``, or None."""
        constants = _fold_op(op, b, self._is_computed_by_readers)
        if constants is not None:
            self.left.update((constant, self.uses.get(v, 0)) for v, constant in zip(op.results, constants))
            for v in op.operands:
                if v in self.left:
                    self.left[v] -= 1
                    if not self.left[v]:
                        b.drop(v)
        return constants

    def _is_computed_by_readers(self, op: Op, b: Builder) -> bool:
        """Return True if the readers of a large result compute it from its narrower operands."""
        if len(op.results) != 1 or size_of(op.result.type.dtype) <= min(size_of(v.type.dtype) for v in op.operands):
            return False
        size = int(np.prod(_static_shape_of(op.result), dtype=np.int64)) * size_of(op.result.type.dtype)
        return not FOLDED_BYTES.holds(size) and self.wider_weights.is_computed_by_readers(op.result, op.operands)


def _fold_op(op: Op, b: Builder, is_left: Callable[[Op, Builder], bool]) -> Sequence[Value] | None:
    """Return constants for the results of ``op`` if its operands are constants and folding pays, else None.

    ``is_left`` decides whether an op with constant operands stays, because its readers compute it.
    """
    arrays: list[np.ndarray] = []
    for v in op.operands:
        array = _constant_elements_of(v, op, b)
        if array is None:
            return None
        arrays.append(array)
    if not arrays:
        return None
    scalar = op.name in SCALARS or op.name == "reduce_precision"
    if scalar and all(a.ndim == 0 for a in arrays):
        return _evaluate_to_constants(_on_uniform_scalars(op), arrays, op, b)
    if op.name in MOVES and arrays[0].ndim == 0:
        return _append_constants(op, arrays, b)
    if not all(is_static(v.type.shape) for v in (*op.operands, *op.results)):
        return None
    if not _is_folding_worthwhile(op, arrays) or any(captured_values(r) for r in op.regions):
        return None
    if is_left(op, b):
        return None
    full = [np.broadcast_to(a, _static_shape_of(v)) for a, v in zip(arrays, op.operands)]
    return _evaluate_to_constants(op, full, op, b)


def _constant_elements_of(v: Value, op: Op, b: Builder) -> np.ndarray | None:
    """Return the elements of the constant ``v``, or None; for arithmetic ops also of a broadcast constant."""
    spread = b.definitions.get(v)
    if op.name not in ELEMENTWISE or spread is None or spread.name != "broadcast" or not is_static(v.type.shape):
        return constant_of(v, b.definitions)
    array, source = constant_of(spread.operands[0], b.definitions), spread.operands[0]
    if array is None or array.ndim == 0 or not is_static(source.type.shape):
        return array
    shape = [1] * v.type.rank
    for dim, place in enumerate(spread.attrs["dims"]):
        shape[place] = array.shape[dim]
    return array.reshape(shape)


def _static_shape_of(v: Value) -> tuple[int, ...]:
    return tuple(d for d in v.type.shape if isinstance(d, int))


def _on_uniform_scalars(op: Op) -> Op:
    """Return an elementwise op on uniform operands as the op on the scalars that fill these."""
    operands = tuple(Value(v.name, TensorType(v.type.dtype)) for v in op.operands)
    return replace(op, operands=operands, results=tuple(Value(v.name, TensorType(v.type.dtype)) for v in op.results))


FOLDED_FLOPS = Limit(
    10**9,
    "floating-point operations of a matmul or convolution that is folded",
    "compile time: NumPy takes well below a second",
)


def _is_folding_worthwhile(op: Op, arrays: Sequence[np.ndarray]) -> bool:
    """Return True if the results are small enough to be stored, and cheap enough to be computed by the compiler."""
    elements = [int(np.prod(_static_shape_of(v), dtype=np.int64)) for v in op.results]
    result = sum(n * size_of(v.type.dtype) for n, v in zip(elements, op.results))
    if op.name == "broadcast":
        return FOLDED_BROADCAST.holds(result) or result <= arrays[0].nbytes
    growth = -(-result // max(sum(a.nbytes for a in arrays), 1))
    if not FOLDED_BYTES.holds(result) and not FOLDED_GROWTH.holds(growth):
        return False
    if op.name not in PRODUCTS:
        return True
    kernel = arrays[1].size if "conv" in op.name else arrays[0].size
    return FOLDED_FLOPS.holds(2 * elements[0] * max(kernel, 1))


def _evaluate_to_constants(op: Op, arrays: Sequence[np.ndarray], original: Op, b: Builder) -> Sequence[Value]:
    """Evaluate ``op`` on ``arrays`` with its NumPy reference; append the results of ``original`` as constants."""
    frame = Activation(Module({}), {})
    frame.environment.update(zip(op.operands, arrays))
    return _append_constants(original, frame.apply(op), b)


def _append_constants(op: Op, arrays: Sequence[np.ndarray], b: Builder) -> Sequence[Value]:
    return [b.constant(np.ascontiguousarray(a).reshape(a.shape), v.type, v.name) for v, a in zip(op.results, arrays)]
