"""Elementary functions as branch-free formulas over an abstract scalar algebra.

``m`` is the algebra: :class:`aotc.kernels.llvm_algebra.Algebra` emits LLVM IR for
CPU and CUDA; the tests run the same source on NumPy arrays. Values have Python's
operators; ``m.bits`` is 32 or 64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

FUNCTIONS: dict[str, Callable[..., Any]] = {}
COMPLEX: dict[str, Callable[..., Any]] = {}


def reduce_precision(m: Any, x: Any, exponent: int, mantissa: int) -> Any:
    """placeholder"""
    return x
