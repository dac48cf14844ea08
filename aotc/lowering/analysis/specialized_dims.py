"""Find the argument dims that a specialized copy of a function fixes to numbers."""

from __future__ import annotations

from aotc.ir.dims.algebra import Expr
from aotc.ir.tensor.ir import Function


def fixed_dims(general: Function, copy: Function) -> list[tuple[int, int, int]]:
    """Return the argument number, the axis and the size of each symbolic dim that the copy fixes."""
    fixed = []
    for n, (a, b) in enumerate(zip(general.body.params, copy.body.params, strict=True)):
        for axis, (d, size) in enumerate(zip(a.type.shape, b.type.shape, strict=True)):
            if isinstance(d, Expr) and not isinstance(size, Expr):
                fixed.append((n, axis, size))
    return fixed
