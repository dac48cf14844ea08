"""How far results on edge values may lie from exact ones, in units in the last place, and why some lie farther."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bound:
    """The largest error, and the reason where it is above the usual one.

    Of complex powers ``per_phase * abs(b log a)`` is added to ``ulp``.
    """

    ulp: float
    reason: str = ""
    per_phase: float = 0.0

    def __str__(self) -> str:
        more = f" + {self.per_phase:g} abs(b log a)" if self.per_phase else ""
        return f"{self.ulp:g}{more}"


_PHASE = "the phase is rounded to 64 bits"

_EXPANSION = "jaxlib's expansion of the op, the same as XLA's"
_CUT = f"{_EXPANSION}: it has one side of its cuts, and infinities next to poles"

BOUNDS: dict[tuple[str, str], Bound] = {
    ("", "f"): Bound(2),
    ("", "c"): Bound(3),
    ("tanh", "f32"): Bound(4.1, "a rational function evaluated in 32 bits, the same as XLA's"),
    ("tanh", "f64"): Bound(3, "the quotient of two rounded terms"),
    ("erf", "f32"): Bound(6, "a rational function evaluated in 32 bits, the same as XLA's"),
    ("acosh", "f32"): Bound(3, _EXPANSION),
    ("acosh", "f64"): Bound(3, _EXPANSION),
    ("bessel_i1e", "f32"): Bound(6, _EXPANSION),
    ("bessel_i1e", "f64"): Bound(6, _EXPANSION),
    ("digamma", "f32"): Bound(math.inf, f"{_EXPANSION}: digits go next to its zeros"),
    ("digamma", "f64"): Bound(math.inf, f"{_EXPANSION}: digits go next to its zeros"),
    **{(name, "c"): Bound(math.inf, _CUT) for name in ("acos", "acosh", "asin", "asinh", "atan", "atanh")},
    ("pow", "c128"): Bound(3, _PHASE, per_phase=2),
}
"""By (op, dtype), else by (op, kind), else by the kind of the dtype alone."""
