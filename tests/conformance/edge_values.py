"""Edge values of each dtype: specials, extremes, and numbers next to where functions vanish, overflow or branch."""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from aotc.vmfb.dtypes import DTYPES, to_numpy
from conformance.edge_references import Operation

# Where functions vanish, overflow, underflow, round to a constant or change their form; of f32 and of f64.
_POINTS = (
    1.0, 0.5, 0.25, 2.0, 3.0, 10.0, 1e-3, 1e-5, 1e-8, 1e-10, 1e10, math.e, math.log(2), math.sqrt(2), math.sqrt(0.5),
    math.pi / 4, math.pi / 2, math.pi, 3 * math.pi / 2, 2 * math.pi, 355.0, 1e5, 2.0**24, 2.0**44, 2.0**53, 2.0**63,
    16.6, 22.0, 40.0, 87.4, 88.73, 89.5, 103.97, 104.0, 700.0, 708.5, 709.79, 710.5, 745.2, 746.0, 8.25, 9.0, 7.9,
    0.84375, 1.25, 3.9, 4.0, 6.0, 9.2, 10.06, 26.6, 28.0, 0.999, 1.4616321449683623, 2.597, 2.4570247382208006,
    2.7476826467274127, 3.1435808883499799, 5.991, 0.99999, 0.0004, 11.0, 100.5, 24.5,
)  # fmt: skip
_FEW = (1.0, 0.5, 2.0, 3.0, 1e-5, 10.0, 40.0, 1000.0, math.pi / 2, 0.998, 1e10, 2.0**53)
_COMPLEX_PARTS = (1.0, 0.5, 1e-5, math.pi / 2, math.pi, 3.0, 20.0, 20.5, 89.5, 710.5, 1000.0)
_COMPLEX_FEW = (1.0, 0.5, 40.0)


@cache
def floats(dtype: str, few: bool = False) -> np.ndarray:
    """Return the edge values of a float type; of a type of 8 bits or less every value."""
    kind, row = to_numpy(dtype), DTYPES[dtype]
    if row.bits == 8:
        return np.arange(256, dtype=np.uint8).view(kind)
    with np.errstate(over="ignore"):
        points = np.array(_FEW if few else _POINTS).astype(kind)
        next_to = [] if few else [np.nextafter(points, kind.type(way)) for way in (np.inf, -np.inf)]
    positive = np.concatenate([points, *next_to, _extremes(kind)]).astype(kind)
    positive = np.unique(positive[np.isfinite(positive.astype(np.float64)) & (positive > 0)])
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan]).astype(kind)
    return np.concatenate([positive, -positive, special])


def _extremes(kind: np.dtype) -> np.ndarray:
    import ml_dtypes

    info = np.finfo(kind) if kind.isbuiltin == 1 else ml_dtypes.finfo(kind)
    tiny, least, top = (np.float64(v) for v in (info.smallest_normal, info.smallest_subnormal, info.max))
    return np.array([least, 3 * least, tiny - least, tiny, top, top / 2, top * (1 - 2.0**-6)]).astype(kind)


@cache
def complexes(dtype: str, few: bool = False) -> np.ndarray:
    """Return pairs of edge values."""
    part = np.dtype(f"f{DTYPES[dtype].bits // 16}")
    positive = np.array(_COMPLEX_FEW if few else _COMPLEX_PARTS, part)
    positive = np.concatenate([positive, _extremes(part)[[4] if few else [0, 3, 4]]])
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan], part)
    parts = np.concatenate([positive, -positive[:2] if few else -positive, special])
    real, imag = (g.reshape(-1) for g in np.meshgrid(parts, parts))
    found = np.empty(real.size, to_numpy(dtype))
    found.real, found.imag = real, imag
    return found


@cache
def integers(dtype: str) -> np.ndarray:
    """Return the extremes of an integer type, small numbers, powers of two and their neighbours."""
    row = DTYPES[dtype]
    low, high = (-(1 << row.bits - 1), (1 << row.bits - 1) - 1) if row.kind == "i" else (0, (1 << row.bits) - 1)
    found = {low, low + 1, high, high - 1, high // 2, low // 2}
    found |= {s * v for v in (0, 1, 2, 3, 5, 7, 10, row.bits - 1, row.bits, row.bits + 1) for s in (1, -1)}
    found |= {(1 << n) + d for n in range(0, row.bits, max(row.bits // 8, 1)) for d in (-1, 0, 1)}
    inside = sorted(v for v in found if low <= v <= high)
    return np.array(inside, np.uint64 if row.kind == "u" else np.int64).astype(to_numpy(dtype))


def values_of(dtype: str, operation: Operation) -> list[np.ndarray]:
    """Return the operands: every value, or every pair of values and what the op adds to them."""
    kind, few = DTYPES[dtype].kind, operation.arity == 2
    match kind:
        case "b":
            own = np.array([False, True])
        case "i" | "u":
            own = integers(dtype)
        case "c":
            own = complexes(dtype, few)
        case _:
            own = floats(dtype, few)
    if not few:
        return [own]
    with np.errstate(all="ignore"):
        more = [np.array(v).astype(to_numpy(dtype)) for v in operation.pairs] if kind == "f" else []
    pairs = [g.reshape(-1) for g in np.meshgrid(own, own)]
    return [np.concatenate([p, *([m[..., n].reshape(-1) for m in more])]) for n, p in enumerate(pairs)]
