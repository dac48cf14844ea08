"""Eigenvectors and singular vectors by what they must satisfy: those of another sign or phase are as good.

They are judged as LAPACK's own tests do it: by the residual beside the norm of the matrix, and by how far they are from
orthogonal or from the length 1, in units of ``n * eps``. Where eigenvalues lie close together the vectors of one are
far apart for matrices that differ by a rounding, and yet satisfy both. Values are unique, and compared as any floats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

MOST = 10.0
"""Units. XLA's results, LAPACK's, of the cases of this suite have up to 2.9; of matrices with noise of a thousand
roundings they have 18 and more."""

Matrices: TypeAlias = list[np.ndarray]


@dataclass(frozen=True, slots=True)
class Decomposition:
    """Which result of an op are the values, and how far single matrices' results, XLA's beside them, are from right."""

    values: int
    ratio: Callable[[np.ndarray, Matrices, Matrices, float], float]


def vectors_ratio(group: str, matrices: np.ndarray, got: Matrices, want: Matrices) -> float:
    """Return the worst ratio of a batch of decompositions ``got``, of which XLA's are ``want``; NaN for no numbers."""
    matrices = np.asarray(matrices)
    row, eps = DECOMPOSITIONS[group], float(np.finfo(matrices.dtype).eps)
    lead = matrices.shape[:-2]
    sides = [[a.reshape(-1, *a.shape[len(lead) :]).astype(np.clongdouble) for a in side] for side in (got, want)]
    flat = matrices.reshape(-1, *matrices.shape[-2:]).astype(np.clongdouble)
    worst = [row.ratio(a, *([x[n] for x in side] for side in sides), eps) for n, a in enumerate(flat)]
    return float(np.max(worst))


def _norm(a: np.ndarray) -> float:
    return float(np.abs(a).sum(0).max(initial=0.0))


def _residual(left: np.ndarray, right: np.ndarray, a: np.ndarray, eps: float) -> float:
    scale = max(_norm(a), float(np.finfo("f4").tiny))
    return _norm(left - right) / scale / (max(a.shape) * eps)


def _skew(v: np.ndarray, eps: float) -> float:
    """Return how far the columns of ``v`` are from orthogonal ones of length 1."""
    return _norm(v.conj().T @ v - np.eye(v.shape[1])) / (len(v) * eps)


def _svd(a: np.ndarray, got: Matrices, want: Matrices, eps: float) -> float:
    s, u, vh = got
    made = (u[:, : len(s)] * s) @ vh[: len(s)]
    return float(np.max([_residual(a, made, a, eps), _skew(u, eps), _skew(vh.conj().T, eps)]))


def _eigh(a: np.ndarray, got: Matrices, want: Matrices, eps: float) -> float:
    v, w = got
    return float(np.max([_residual(a @ v, v * w, a, eps), _skew(v, eps)]))


def _eig(a: np.ndarray, got: Matrices, want: Matrices, eps: float) -> float:
    """Of left vectors, right ones, or both; XLA's say which, where there are those of one side."""
    sides = [_left, _right]
    if len(got) == 2:
        sides = [min(sides, key=lambda side: side(a, want[0], want[1], eps))]
    return float(np.max([side(a, got[0], v, eps) for side, v in zip(sides, got[1:], strict=True)]))


def _right(a: np.ndarray, w: np.ndarray, v: np.ndarray, eps: float) -> float:
    lengths = np.abs(np.sqrt((np.abs(v) ** 2).sum(0)) - 1).max() / (len(a) * eps)
    return float(np.max([_residual(a @ v, v * w, a, eps), lengths]))


def _left(a: np.ndarray, w: np.ndarray, v: np.ndarray, eps: float) -> float:
    return _right(a.conj().T, w.conj(), v, eps)


def _values_first(a: np.ndarray, got: Matrices, want: Matrices, eps: float) -> float:
    return _eigh(a, got[::-1], want[::-1], eps)


def _values_between(a: np.ndarray, got: Matrices, want: Matrices, eps: float) -> float:
    return _svd(a, [got[1], got[0], got[2]], want, eps)


DECOMPOSITIONS = {
    "svd": Decomposition(0, _svd), "eigh": Decomposition(1, _eigh), "eig": Decomposition(0, _eig),
    "jax.numpy.linalg.eigh": Decomposition(0, _values_first), "jax.scipy.linalg.eigh": Decomposition(0, _values_first),
    "jax.numpy.linalg.svd": Decomposition(1, _values_between),
}  # fmt: skip
"""By the group of a case whose first argument are the matrices, whole also where an op reads a triangle of them."""
