"""When two results agree: exactly for integers, booleans and moved data, else by the error that XLA has itself.

Errors are in units in the last place of the result's type. A float result agrees where it lies within
:data:`SLACK` units of XLA's; where it does not, both are compared with the same program in float64, and aotc's
largest error may not exceed the larger of XLA's largest and the slack. Where a result is a sum of many terms or
comes from a factorization, single elements may cancel: there the unit is that of the largest element
(:data:`NORMWISE`), as in the error bounds of Higham, "Accuracy and Stability of Numerical Algorithms", ch. 3 and 9.
Eigenvectors and singular vectors are not unique: :mod:`conformance.decompositions`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np

from aotc.tools.agreement import distance_in_units, is_float, unit_in_last_place
from conformance.decompositions import DECOMPOSITIONS, MOST, vectors_ratio

SLACK = 4.0  # units in the last place

NORMWISE = {
    # sums of products and sums: another order of summation, twice what the cases differ by
    "dot_general": 4, "conv_general_dilated": 8, "reduce_window_add": 4, "cumsum": 2, "cumprod": 2,
    "reduce_sum": 2, "reduce_prod": 2, "reduce": 4, "scatter_add": 2, "fft": 16, "scatter_mul": 2,
    "cumlogsumexp": 2, "select_and_scatter_add": 2, "reduce_window_mul": 2, "jax.lax.dot": 16,
    "jax.lax.batch_matmul": 16, "jax.lax.dot_general": 16, "jax.lax.ragged_dot": 16, "jax.lax.conv": 32,
    "jax.lax.conv_general_dilated_local": 32, "jax.lax.conv_with_general_padding": 32, "jax.lax.conv_transpose": 32,
    "jax.numpy.dot": 16, "jax.numpy.matmul": 16, "jax.numpy.inner": 16, "jax.numpy.tensordot": 16,
    "jax.numpy.einsum": 16, "jax.numpy.vdot": 16, "jax.numpy.vecdot": 16, "jax.numpy.convolve": 16,
    "jax.numpy.correlate": 16, "jax.numpy.polymul": 16, "jax.numpy.matvec": 16, "jax.numpy.vecmat": 16,
    "jax.numpy.cov": 16, "jax.numpy.fft": 16, "jax.numpy.corrcoef": 16, "jax.nn.dot_product_attention": 16,
    "jax.scipy.signal": 16, "jax.scipy.fft": 16, "jax.image": 16, "jax.scipy.ndimage": 16, "jax.scipy.spatial": 16,
    # factorizations and solves
    "cholesky": 128, "lu": 64, "qr": 64, "svd": 64, "eig": 256, "eigh": 64, "triangular_solve": 256,
    "tridiagonal_solve": 64, "custom_linear_solve": 256, "jax.numpy.linalg": 64, "jax.lax.linalg": 64,
    "jax.scipy.linalg": 256, "jax.lax.custom_linear_solve": 64, "jax.numpy.roots": 64, "jax.numpy.poly": 64,
    "jax.numpy.polyfit": 256, "jax.scipy.sparse": 64, "jax.scipy.optimize": 64, "jax.random.multivariate_normal": 64,
    "jax.random.orthogonal": 64, "jax.scipy.stats.multivariate_normal": 64, "jax.scipy.stats.gaussian_kde": 64,
    # zeros between poles: the series cancels
    "digamma": 4, "jax.scipy.special.digamma": 4,
    # series and iterations whose number of steps depends on the rounding
    "igamma": 64, "igammac": 64, "regularized_incomplete_beta": 64, "random_gamma": 64, "jax.lax.betainc": 64,
    "jax.scipy.special.betainc": 64, "jax.scipy.stats.beta": 512, "jax.random.f": 64, "jax.random.loggamma": 64,
    "jax.scipy.special.rel_entr": 8, "jax.scipy.stats.betabinom": 64, "jax.scipy.stats.nbinom": 64,
    "jax.scipy.stats.chi2.sf": 64, "jax.scipy.stats.chi2.logcdf": 64,
    # the smaller root of a quadratic equation: two terms cancel
    "jax.random.wald": 64,
}  # fmt: skip


UNSTABLE_SORT = "unstable_sort"  # rows with equal keys may come in any order


@dataclass(frozen=True, slots=True)
class Verdict:
    """How far one case agrees: the worst error of aotc and of XLA in ulp, and what is wrong if anything is."""

    worst: float = 0.0
    xla: float = 0.0
    problem: str = ""


def bound(group: str) -> tuple[float, bool]:
    """Return the allowed units for the nearest prefix of a dotted name, and whether they are normwise."""
    while group and group not in NORMWISE:
        group = group.rpartition(".")[0]
    return (float(NORMWISE[group]), True) if group else (SLACK, False)


def error(got: np.ndarray, want: np.ndarray, step: np.ndarray) -> float:
    """Return the largest distance of ``got`` from ``want`` in ``step``; special values must be equal."""
    return float(distance_in_units(got, want, step).max(initial=0.0))


def in_full_order(columns: list[np.ndarray]) -> list[np.ndarray]:
    """Return vectors of equal length with their rows sorted by all of them; others as they are."""
    if any(c.ndim != 1 for c in columns):
        return columns
    order = np.lexsort(columns[::-1])
    return [c[order] for c in columns]


Reference: TypeAlias = Callable[[], list[np.ndarray] | None]


def compare(
    group: str, args: Sequence[np.ndarray], got: list[np.ndarray], want: list[np.ndarray], reference: Reference
) -> Verdict:
    """Compare aotc's results ``got`` with XLA's ``want``; ``reference`` gives them in float64 where that exists."""
    shapes = [[(a.shape, a.dtype) for a in side] for side in (got, want)]
    if shapes[0] != shapes[1]:
        return Verdict(problem=f"types: found {shapes[0]}, expected {shapes[1]}")
    if group == UNSTABLE_SORT:
        got, want = in_full_order(got), in_full_order(want)
    if group in DECOMPOSITIONS and len(got) > 1 and args[0].size:
        ratio, values = vectors_ratio(group, args[0], got, want), DECOMPOSITIONS[group].values
        if not ratio <= MOST:
            return Verdict(ratio, problem=f"vectors: {ratio:.3g} times n * eps from what they must satisfy")
        got, want, reference = [got[values]], [want[values]], partial(_only, reference, values)
    limit, normwise = bound(group)
    worst = 0.0
    for n, (a, b) in enumerate(zip(got, want, strict=True)):
        if not is_float(a):
            if not np.array_equal(a, b):
                return Verdict(problem=f"result {n}: {int((a != b).sum())} of {a.size} elements differ")
            continue
        worst = max(worst, error(a, b, unit_in_last_place(b, normwise)))
    if worst <= limit:
        return Verdict(worst)
    return against_reference(got, want, reference(), worst, limit, normwise)


def _only(reference: Reference, number: int) -> list[np.ndarray] | None:
    truth = reference()
    return None if truth is None else [truth[number]]


def against_reference(
    got: list[np.ndarray], want: list[np.ndarray], truth: list[np.ndarray] | None, worst: float, limit: float,
    normwise: bool,
) -> Verdict:  # fmt: skip
    """Compare both sides' errors with the program in float64."""
    if truth is None:
        return Verdict(worst, problem=f"{worst:.3g} ulp from XLA, and nothing more exact exists")
    pairs = [(a, b, t) for a, b, t in zip(got, want, truth, strict=True) if is_float(a)]
    rounded = [(a, b, t.astype(a.dtype), unit_in_last_place(b, normwise)) for a, b, t in pairs]
    own = max(error(a, t, step) for a, _, t, step in rounded)
    theirs = max(error(b, t, step) for _, b, t, step in rounded)
    if own <= max(theirs, limit):
        return Verdict(own, theirs)
    return Verdict(own, theirs, f"error {own:.3g} ulp against more digits, where XLA's is {theirs:.3g}")
