"""The op ``tridiagonal_solve_perturbed``: its type rule and its reference."""

from __future__ import annotations

from typing import Any

import numpy as np

from aotc.ir.opset.spec import Arrays, Attrs, Types, require_rule


def infer_tridiagonal(types: Types, attrs: Attrs, regions: tuple, given: Types) -> Types:
    """Return the type of a tridiagonal solution, for ``OpSpec.infer``."""
    require_rule(len(types) == 4, f"tridiagonal_solve_perturbed takes 4 operands, found {len(types)}")
    low, diagonal, high, b = types
    require_rule(low == diagonal == high and low.shape == b.shape[:-1] and low.dtype == b.dtype,
         f"tridiagonal_solve_perturbed: diagonals {low}, {diagonal}, {high} do not fit {b}")  # fmt: skip
    require_rule(b.dtype in ("f32", "f64", "c64", "c128"), f"tridiagonal_solve_perturbed: no solution in {b.dtype}")
    return (b,)


def reference_tridiagonal(arrays: Arrays, attrs: Attrs, regions: tuple, types: Types) -> list[np.ndarray]:
    """Solve a batch of tridiagonal systems with NumPy, for ``OpSpec.reference``."""
    low, diagonal, high, b = arrays
    out = np.zeros_like(b)
    with np.errstate(all="ignore"):
        for at in np.ndindex(*b.shape[:-2]):
            if b.shape[-2]:
                out[at] = _solve_tridiagonal(low[at], diagonal[at], high[at], b[at])
    return [out]


def _solve_tridiagonal(low: np.ndarray, diagonal: np.ndarray, high: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Solve one tridiagonal system: eliminate with scaled partial pivoting, then substitute backward."""
    n = len(diagonal)
    band = np.zeros((n + 1, 3), b.dtype)
    band[0] = [diagonal[0], high[0] if n > 1 else 0, 0]
    x = b.copy()
    size = np.abs(band[0]).sum()
    largest = np.abs(band[0]).max()
    for k in range(n - 1):
        row = np.array([low[k + 1], diagonal[k + 1], high[k + 1] if k < n - 2 else 0], b.dtype)
        row_size = np.abs(row).sum()
        first = np.abs(band[k, 0])
        if row[0] == 0 or np.abs(row[0]) / row_size <= (first / size if first else 0):
            factor = row[0] / band[k, 0] if row[0] != 0 else row[0]
            band[k + 1] = [row[1] - factor * band[k, 1], row[2], 0]
            band[k, 2] = 0
            x[k + 1] = x[k + 1] - factor * x[k]
            size = row_size
        else:
            factor = band[k, 0] / row[0]
            band[k + 1] = [band[k, 1] - factor * row[1], -factor * row[2], 0]
            band[k] = row
            x[k], x[k + 1] = x[k + 1].copy(), x[k] - factor * x[k + 1]
            size = np.abs(band[k + 1]).sum()
        if k < n - 2:
            largest = max(largest, np.abs(band[k]).max())
    largest = max(largest, np.abs(band[n - 1, 0]))
    for k in reversed(range(n)):
        for step in (1, 2):
            if k + step < n:
                x[k] = x[k] - band[k, step] * x[k + step]
        x[k] = _divided_by_pivot(x[k], band[k, 0], np.finfo(b.dtype).eps * largest)
    return x


def _divided_by_pivot(row: np.ndarray, pivot: Any, error: float) -> np.ndarray:
    """Return ``row / pivot``; a pivot near 0 is first enlarged until the quotient does not overflow."""
    tiny = np.finfo(row.dtype).tiny
    step = np.copysign(max(error, tiny), np.real(pivot))
    most = np.abs(row).max(initial=0)
    while (now := np.abs(pivot)) < 1:
        if now < tiny and now != 0 and most * tiny <= now:
            return row * (1 / tiny) / (pivot * (1 / tiny))
        if now >= tiny and most <= now * (1 / tiny):
            break
        pivot = pivot + row.dtype.type(step)
        step = step * 2
    return row * (1 / pivot)
