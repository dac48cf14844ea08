"""Evaluate at compile time what depends on constants only, with the NumPy reference of each op.

Kept as ops: results much larger than what they are made of (they would only
fatten the file), costly ops, loops, and whatever may differ from call to call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from aotc.ir.dims import is_static
from aotc.ir.opset import FOLDED, MOVES, PRODUCTS, SCALARS
from aotc.ir.tensor_ir import Function, Module, Op, TensorType, Value, captured, uses
from aotc.ir.tensor_run import Activation
from aotc.lowering.analysis.constant_values import constant_of
from aotc.lowering.analysis.cost import FOLDED_BROADCAST, FOLDED_BYTES, FOLDED_FLOPS, FOLDED_GROWTH
from aotc.lowering.passes.rewrite import Builder, rewrite_function
from aotc.options import Options
from aotc.vmfb.dtypes import size_of


def fold_constants(module: Module, options: Options) -> Module:
    """Return ``module`` with ops on constants replaced by constants of the same dtype and value."""
    return module.with_functions({n: rewrite_function(f, _Folder(f).rule, FOLDED) for n, f in module.functions.items()})


class _Folder:
    """Folds ops and lets constants go that it made on the way: weights may be as large as the memory."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.left: dict[Value, int] = {}

    @cached_property
    def uses(self) -> dict[Value, int]:
        """How often each value is read; mostly nothing is folded, and nobody asks."""
        return uses(self.function.body)

    def rule(self, op: Op, b: Builder) -> Sequence[Value] | None:
        """Return the constants that ``op`` gives, or None."""
        constants = _folded(op, b)
        if constants is not None:
            self.left.update((constant, self.uses.get(v, 0)) for v, constant in zip(op.results, constants))
            for v in op.operands:
                if v in self.left:
                    self.left[v] -= 1
                    if not self.left[v]:
                        b.drop(v)
        return constants


def _folded(op: Op, b: Builder) -> Sequence[Value] | None:
    arrays: list[np.ndarray] = []
    for v in op.operands:
        array = constant_of(v, b.definitions)
        if array is None:
            return None
        arrays.append(array)
    if not arrays:
        return None
    scalar = op.name in SCALARS or op.name == "reduce_precision"
    if scalar and all(a.ndim == 0 for a in arrays):
        return _fold(_shrunk(op), arrays, op, b)
    if op.name in MOVES and arrays[0].ndim == 0:
        return _as_constants(op, arrays, b)
    if not all(is_static(v.type.shape) for v in (*op.operands, *op.results)):
        return None
    if not _worth(op, arrays) or any(captured(r) for r in op.regions):
        return None
    full = [np.broadcast_to(a, _static(v)) for a, v in zip(arrays, op.operands)]
    return _fold(op, full, op, b)


def _static(v: Value) -> tuple[int, ...]:
    return tuple(d for d in v.type.shape if isinstance(d, int))


def _shrunk(op: Op) -> Op:
    """Return the elementwise op on the scalars that fill its operands."""
    operands = tuple(Value(v.name, TensorType(v.type.dtype)) for v in op.operands)
    return replace(op, operands=operands, results=tuple(Value(v.name, TensorType(v.type.dtype)) for v in op.results))


def _worth(op: Op, arrays: Sequence[np.ndarray]) -> bool:
    elements = [int(np.prod(_static(v), dtype=np.int64)) for v in op.results]
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


def _fold(op: Op, arrays: Sequence[np.ndarray], original: Op, b: Builder) -> Sequence[Value]:
    frame = Activation(Module({}), {})
    frame.environment.update(zip(op.operands, arrays))
    return _as_constants(original, frame.apply(op), b)


def _as_constants(op: Op, arrays: Sequence[np.ndarray], b: Builder) -> Sequence[Value]:
    return [b.constant(np.ascontiguousarray(a).reshape(a.shape), v.type, v.name) for v, a in zip(op.results, arrays)]
