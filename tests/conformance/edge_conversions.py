"""Conversions between all element types in exact arithmetic, and the numbers on which they are tried.

Rounding is that of a fraction to the nearest of two neighbours, ties to even; nothing is shared with NumPy, with
``ml_dtypes`` or with kernels but the table of formats.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from typing import NamedTuple

import numpy as np

from aotc.vmfb.dtypes import DTYPES, limits, real_of, to_numpy
from aotc.vmfb.float_formats import SMALL_FLOATS
from conformance.edge_values import floats, integers
from conformance.edges import mlir_type, run_xla


class Layout(NamedTuple):
    """Bits of a mantissa, the exponent of the least normal number, and the largest number."""

    mantissa: int
    least: int
    largest: Fraction


_IEEE = {"f16": (10, 15), "bf16": (7, 127), "f32": (23, 127), "f64": (52, 1023)}


@cache
def layout(dtype: str) -> Layout:
    """Return the facts of a float type that rounding to it needs."""
    if dtype in _IEEE:
        mantissa, top = _IEEE[dtype]
        return Layout(mantissa, 1 - top, (2 - Fraction(1, 1 << mantissa)) * (1 << top))
    form = SMALL_FLOATS[dtype]
    code, places = form.largest, form.mantissa_bits
    if form.special == "power":
        return Layout(0, -form.bias, Fraction(1 << (code - form.bias)))
    exponent = (code >> places) - form.bias - places
    return Layout(places, form.least_exponent, (1 << places | code & (1 << places) - 1) * Fraction(2) ** exponent)


def rounded(size: Fraction, dtype: str) -> Fraction:
    """Return a positive number rounded as if the type had no largest one."""
    row = layout(dtype)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > size
    unit = Fraction(2) ** (max(exponent, row.least) - row.mantissa)
    if row.mantissa == 0:  # powers of two: halfway up; up to the least, above which XLA has all up to the next
        least = 1 + (exponent == row.least and size > unit)
        return max(math.floor(size / unit + Fraction(1, 2)), least) * unit
    return round(size / unit) * unit


def to_float(x: float, dtype: str) -> float:
    """Return a number, infinity or NaN as a float of a type; NaN also stands for the -0 of types without NaN."""
    special = SMALL_FLOATS[dtype].special if dtype in SMALL_FLOATS else "ieee"
    top = {"ieee": math.inf, "finite": float(layout(dtype).largest)}.get(special, math.nan)
    if x != x or (special == "power" and x <= 0):
        return math.nan
    sign = math.copysign(1.0, x)
    if math.isinf(x):
        return sign * top
    size = rounded(abs(Fraction(x)), dtype) if x else Fraction(0)
    if size > layout(dtype).largest:
        return sign * top
    return float(size) if special == "fnuz" and not size else sign * float(size)


def to_integer(x: float, dtype: str) -> int:
    """Return a number as an integer: integers wrap, floats are cut off and kept in range, NaN is 0."""
    low, high = (int(v) for v in limits(dtype))
    if isinstance(x, int):
        rest = x % (high - low + 1)
        return rest if rest <= high else rest - (high - low + 1)
    return 0 if x != x else low if x <= low else high if x >= high else int(x)


def numbers(x: np.ndarray) -> list[float]:
    """Return elements as Python's integers or floats, which hold every one exactly."""
    return [int(v) if x.dtype.name.startswith(("int", "uint", "bool")) else float(v) for v in x]


def converted(x: np.ndarray, dtype: str) -> np.ndarray:
    """Return an array as ``stablehlo.convert`` gives it; of complex numbers, their real parts (``i1`` too, as XLA)."""
    row, kind = DTYPES[dtype], to_numpy(dtype)
    if row.kind == "c":
        part, found = real_of(dtype), np.empty(x.shape, kind)
        found.real = converted(x.real if x.dtype.kind == "c" else x, part)
        found.imag = converted(x.imag, part) if x.dtype.kind == "c" else 0
        return found
    given = numbers(x.real if x.dtype.kind == "c" else x)
    if row.kind == "b":
        return np.array([bool(v != 0) for v in given])
    if row.kind in "iu":
        return np.array([to_integer(v, dtype) for v in given], np.uint64 if row.kind == "u" else np.int64).astype(kind)
    wide = np.array([to_float(v, dtype) for v in given])
    if dtype in SMALL_FLOATS:  # a type may have no NaN: of those it is the code that counts
        code = wide.astype(kind).view(np.uint8)
        return np.where(np.isnan(wide), SMALL_FLOATS[dtype].nan, code).astype(np.uint8).view(kind)
    with np.errstate(all="ignore"):
        return wide.astype(kind)


# ---------------------------------------------------------------- numbers


def _about(dtype: str) -> Iterator[Fraction]:
    """Yield the places where rounding to a type changes: halves of units, ends of ranges, limits of integers."""
    row = DTYPES[dtype]
    if row.kind != "f":
        low, high = (int(v) for v in limits(dtype))
        for end in (low, high):
            yield from (end + Fraction(n, 2) for n in (-3, -2, -1, 0, 1, 2, 3))
        return
    mantissa, least, largest = layout(dtype)
    half = Fraction(1, 2 << mantissa)
    for power in {least - mantissa - 1, least - 1, least, 0, 1, mantissa, 2 * mantissa + 1, 17, 31, 40, 61, 62, 63}:
        scale = Fraction(2) ** power
        yield from (scale * (1 + n * half) for n in (-1, 0, 1, 2, 3, 5))
    unit = largest - rounded(largest * (1 - half / 2), dtype) or largest * half
    yield from (largest + unit * Fraction(n, 4) for n in (-2, 0, 1, 2, 3, 4, 8))


@cache
def sources(dtype: str) -> np.ndarray:
    """Return what a type is converted from: every code of short types; else edges, and what lies about them."""
    row, kind = DTYPES[dtype], to_numpy(dtype)
    if row.kind == "b":
        return np.array([False, True])
    if row.kind == "c":
        part = sources(real_of(dtype))
        found = np.empty(part.size + 4, kind)
        found.real[:-4], found.imag[:-4] = part, np.roll(part, 1)
        found[-4:] = np.array([0, 1j, 1e-300j, complex(-0.0, -0.0)])
        return found
    if row.bits <= 8:
        return np.arange(1 << row.bits, dtype=np.uint8).view(kind) if row.kind == "f" else _every_integer(dtype)
    points = sorted({p for other, to in DTYPES.items() if to.kind in "iuf" for p in _about(other)})
    if row.kind == "f":
        return _floats_about(dtype, points)
    low, high = (int(v) for v in limits(dtype))
    near = {s * int(p) + d for p in points for d in (-1, 0, 1) for s in (1, -1) if abs(p) < 1 << 65}
    inside = [v for v in sorted(near) if low <= v <= high]
    return np.unique(np.concatenate([np.array(inside, kind), integers(dtype)]))


def _every_integer(dtype: str) -> np.ndarray:
    low, high = limits(dtype)
    return np.arange(low, high + 1, dtype=np.int64).astype(to_numpy(dtype))


def _floats_about(dtype: str, points: list[Fraction]) -> np.ndarray:
    kind = to_numpy(dtype)
    inside = [float(p) for p in points if Fraction(2) ** -1074 <= abs(p) < Fraction(2) ** 1023]
    with np.errstate(all="ignore"):
        near = np.array(inside).astype(kind)
        wide = np.concatenate([near, np.nextafter(near, kind.type(np.inf)), np.nextafter(near, kind.type(-np.inf))])
        return np.unique(np.concatenate([wide, -wide, floats(dtype)]).astype(np.float64)).astype(kind)


# ---------------------------------------------------------------- programs


def _module(types: list[str], lines: list[str], results: list[str]) -> str:
    given = ", ".join(f"%a{n}: {t}" for n, t in enumerate(types))
    names = ", ".join(f"%{n}" for n in range(len(results)))
    kinds = ", ".join(results)
    return "\n".join([f"func.func @main({given}) -> ({kinds}) {{", *lines, f"return {names} : {kinds}", "}"])


def conversions(x: np.ndarray, source: str, targets: list[str]) -> str:
    """Return a program of the conversions of ``x`` to ``targets``."""
    given, kinds = mlir_type(source, x.size), [mlir_type(t, x.size) for t in targets]
    lines = [f"%{n} = stablehlo.convert %a0 : ({given}) -> {kind}" for n, kind in enumerate(kinds)]
    return _module([given], lines, kinds)


def bounds(dtype: str) -> tuple[str, list[np.ndarray]]:
    """Return a program of ``clamp`` and of ``select``, and its arguments: a choice, and all triples of some values."""
    few = _few(dtype)
    low, x, high = (g.reshape(-1) for g in np.meshgrid(few, few, few, indexing="ij"))
    t, choice = mlir_type(dtype, x.size), mlir_type("i1", x.size)
    lines = [f"%0 = stablehlo.clamp %a1, %a2, %a3 : {t}", f"%1 = stablehlo.select %a0, %a1, %a2 : {choice}, {t}"]
    return _module([choice, t, t, t], lines, [t, t]), [np.arange(x.size) % 3 == 0, low, x, high]


def _few(dtype: str) -> np.ndarray:
    row, every = DTYPES[dtype], sources(dtype)
    if row.kind != "f":
        ends = np.concatenate([every[:3], every[-3:], np.array([0, 1]).astype(every.dtype)])
        return np.unique(ends.astype(np.int64 if row.kind == "i" else np.uint64)).astype(every.dtype)
    wide = every.astype(np.float64)
    wide = np.unique(wide[np.isfinite(wide)])
    few = [*wide[:2], *wide[-2:], *wide[wide > 0][:1], 1, -1.5, 0.0, -0.0, np.inf, -np.inf, np.nan]
    return np.array(few).astype(every.dtype)


def clamped(low: np.ndarray, x: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return what ``stablehlo.clamp`` gives: the bound below first; NaN wins, and -0 is below 0."""
    kind = float if x.dtype.kind not in "biu" and not x.dtype.name.startswith(("int", "uint")) else int
    key = lambda v: (v, math.copysign(1.0, v))
    found = []
    for row in zip(low.tolist(), x.tolist(), high.tolist(), strict=True):
        a, b, c = map(kind, row)
        found.append(math.nan if a != a or b != b or c != c else min(max(b, a, key=key), c, key=key))
    return np.array(found, np.float64 if kind is float else object).astype(x.dtype)


def differ(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Tell where two arrays of a type differ in bits; any NaN is any other, and of short integers the values count."""
    if got.dtype.kind == "c":
        return differ(got.real, want.real) | differ(got.imag, want.imag)
    if got.dtype.kind in "biu" or got.dtype.name.startswith(("int", "uint")):
        return np.array([int(g) != int(w) for g, w in zip(got, want, strict=True)])
    bits = [np.ascontiguousarray(v).view(f"u{v.dtype.itemsize}") for v in (got, want)]
    unknown = np.isnan(got.astype(np.float64)) & np.isnan(want.astype(np.float64))
    return (bits[0] != bits[1]) & ~unknown


# ---------------------------------------------------------------- the table

HEAD = """
## Conversions

Every type converts to every other as `tests/conformance/edge_conversions.py` does in exact arithmetic
(`tests/whole/test_edge_conversions.py`): floats round once to the nearest, ties to even, subnormals are kept; integers
wrap; a float that becomes an integer is cut off and kept in range, which StableHLO leaves open and XLA does, and NaN
becomes 0; NaN becomes -0 where a type has none; a complex number becomes real, or `i1`, by its real part, as by XLA and
StableHLO's interpreter. `f8E8M0FNU` rounds halfway up, and what lies between its two least numbers to the second, both
as XLA does; 0 and what is below it has no code there and is NaN. The numbers are every code of types of 8 bits and
fewer; of the others edge values, the places where rounding to each type changes, and their neighbours. aotc differs
from it nowhere, XLA in these (results that differ, of so many):

| From | Values | XLA differs | XLA refuses |
|---|---|---|---|
"""


def section() -> str:
    """Return the part of the page on conversions."""
    rows = []
    for source in DTYPES:
        x, other, refused = sources(source), [], []
        for target in DTYPES:
            found = run_xla(conversions(x, source, [target]), [x])
            if found is None:
                refused.append(target)
            elif count := int(differ(found, converted(x, target)).sum()):
                other.append(f"{target} {count}")
        none = "all" if len(refused) == len(DTYPES) else ", ".join(refused)
        rows.append(f"| {source} | {x.size} | {', '.join(other)} | {none} |")
    return HEAD + "\n".join(rows) + "\n"
