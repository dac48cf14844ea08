"""How far results of elementwise functions may lie from exact ones, in units in the last place, and why some do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bound:
    """The largest error, and the reason where it is above the usual one.

    ``growing`` times what grows with the arguments is added to ``ulp``: :func:`conformance.edge_references.growth`.
    """

    ulp: float
    reason: str = ""
    growing: float = 0.0
    by: str = ""

    def __str__(self) -> str:
        more = f" + {self.growing:g} {self.by}" if self.growing else ""
        return f"{self.ulp:g}{more}"


_RATIONAL = "a rational function in 32 bits; next to 1 its roundings count twice"
_EXPANSION = "jaxlib's expansion of the op, the same as XLA's"
_ZEROS = "next to its negative zeros, where y is small, the difference of two terms of that size"
_TURN = "of complex numbers the logarithm of a quotient, which is next to 1 where y is small"
_PHASE = "the phase is rounded to 64 bits"
_WIDE = 0.51
"""A value computed in 64 bits, or in 32 for a type of 16, and rounded: little more than half a unit."""

# By function: f32, f64, c64, c128; None where the function does not take the type.
_FUNCTIONS: dict[str, tuple[float | None, float | None, float | None, float | None]] = {
    "exp": (1, 1, _WIDE, 2.5), "expm1": (1.1, 1.3, _WIDE, 4), "log": (1, 1, _WIDE, 2.5), "log1p": (1, 2.5, _WIDE, 3),
    "sqrt": (0.5, 0.5, _WIDE, 2), "rsqrt": (1.5, 1.5, _WIDE, 4), "cbrt": (_WIDE, 1, _WIDE, 3.5),
    "sin": (_WIDE, 2.75, _WIDE, 3), "cos": (_WIDE, 2.75, _WIDE, 3), "tan": (_WIDE, 4.5, _WIDE, 5),
    "tanh": (4, 3, _WIDE, 4.5), "sinh": (2.5, 2.5, _WIDE, 3.5), "cosh": (2.5, 2.5, _WIDE, 3.5),
    "logistic": (2.5, 2.5, _WIDE, 4.5),
    "erf": (8, 1.5, None, None), "erfc": (7.5, 3.5, None, None), "erf_inv": (2.75, 4, None, None),
    "lgamma": (_WIDE, 3, None, None), "atan": (_WIDE, 1.75, _WIDE, 3), "atan2": (_WIDE, 1.75, None, None),
    "acos": (1.5, 2, _WIDE, 3.5), "asin": (2, 2.5, _WIDE, 3.5),
    "acosh": (3, 3.5, _WIDE, 3.5), "asinh": (2, 3, _WIDE, 4), "atanh": (2, 2.5, _WIDE, 3),
    "digamma": (_WIDE, 3, None, None), "bessel_i1e": (15, 8, None, None), "square": (0.5, 0.5, 2, 2),
    "abs": (0, 0, _WIDE, 1.5), "sign": (0, 0, _WIDE, 2), "add": (0.5, 0.5, 0.5, 0.5), "sub": (0.5, 0.5, 0.5, 0.5),
    "mul": (0.5, 0.5, 2, 2), "div": (0.5, 0.5, _WIDE, 4), "rem": (0, 0, None, None), "pow": (_WIDE, 1, _WIDE, None),
}  # fmt: skip
_REASONS = {
    **dict.fromkeys(("erf", "erfc"), (_RATIONAL, "f32")),
    "bessel_i1e": (_EXPANSION, "f"),
}
_EXPANDED = ("acos", "acosh", "asin", "asinh", "atanh")  # in 16 bits, step by step


def _reason(name: str, dtype: str) -> str:
    text, where = _REASONS.get(name, ("", "none"))
    return text if dtype.startswith(where) else ""


def _rows() -> dict[tuple[str, str], Bound]:
    found = {}
    for name, bounds in _FUNCTIONS.items():
        for dtype, ulp in zip(("f32", "f64", "c64", "c128"), bounds, strict=True):
            if ulp is not None:
                found[name, dtype] = Bound(ulp, _reason(name, dtype))
        found.update({(name, d): Bound(3 if name in _EXPANDED else _WIDE) for d in ("f16", "bf16")})
    return found


BOUNDS: dict[tuple[str, str], Bound] = {
    ("", "f"): Bound(2),
    ("", "c"): Bound(3),
    **_rows(),
    ("pow", "c128"): Bound(3, _PHASE, growing=2, by="abs(b log a)"),
    ("atan2", "c64"): Bound(5, _TURN, growing=5, by="/ abs(y)"),
    ("atan2", "c128"): Bound(9, _TURN, growing=9, by="/ abs(y)"),
    ("digamma", "f32"): Bound(_WIDE, _ZEROS, growing=1e-8, by="(1 + log(1 + abs(x))) / abs(y)"),
    ("digamma", "f64"): Bound(3, _ZEROS, growing=3, by="(1 + log(1 + abs(x))) / abs(y)"),
}
"""By (op, dtype), else by the kind of the dtype alone: for edge values and for numbers of every binade."""


def functions() -> tuple[str, ...]:
    """Return the functions with bounds of their own."""
    return tuple(_FUNCTIONS)
