"""Write elementwise ops on whole tensors like scalar expressions."""

from __future__ import annotations

from aotc.ir.dims.algebra import Dim
from aotc.ir.opset import COMPARISONS
from aotc.ir.tensor.ir import TensorType, Value
from aotc.lowering.passes.rewrite import Builder


class ElementwiseBuilder:
    """Builder of elementwise ops; a number as operand becomes a constant of the other operand's type."""

    def __init__(self, b: Builder) -> None:
        self.b = b

    def filled(self, value: float, type_: TensorType) -> Value:
        """Return a tensor filled with ``value``."""
        scalar = self.b.constant(value, TensorType(type_.dtype))
        return scalar if type_.rank == 0 else self.b.broadcast(scalar, (), type_.shape)

    def size(self, n: Dim, type_: TensorType) -> Value:
        """Return a tensor filled with the integer ``n``."""
        if isinstance(n, int):
            return self.filled(n, type_)
        return self.b.broadcast(self.b.make("dim", (), {"expr": n}, TensorType(type_.dtype)), (), type_.shape)

    def __call__(self, name: str, x: Value, *others: Value | float) -> Value:
        """Return the result of op ``name`` on operands of the type of the first one."""
        operands = [o if isinstance(o, Value) else self.filled(o, x.type) for o in others]
        dtype = "i1" if name in COMPARISONS else x.type.dtype
        return self.b.make(name, (x, *operands), {}, TensorType(dtype, x.type.shape))

    def select(self, test: Value, x: Value | float, y: Value) -> Value:
        """Return ``x`` where ``test`` holds, else ``y``."""
        first = x if isinstance(x, Value) else self.filled(x, y.type)
        return self.b.make("select", (test, first, y), {}, y.type)

    def bits(self, x: Value, dtype: str) -> Value:
        """Return the bits of ``x`` as numbers of ``dtype``, which has the same width."""
        return self.b.make("bitcast", (x,), {}, TensorType(dtype, x.type.shape))
