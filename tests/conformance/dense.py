"""Every unary function on all f32 numbers but for a stride: beside NumPy and SciPy in 64 bits.

Where their result is farther from aotc's than the bound, mpmath decides: SciPy's functions lose digits next to zeros.
``PYTHONPATH=tests python -m conformance.dense`` prints the largest errors of aotc and of XLA.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import scipy.special

import aotc
from conformance.edge_references import Operation, growth, reference
from conformance.edges import EdgeCase, bound_of, errors, run_xla
from conformance.sampled import SEED, functions, program

STRIDE = int(os.environ.get("AOTC_DENSE_STRIDE", "257"))
"""A prime, so that all low bits occur; the first number is the seed, see :data:`conformance.sampled.SEED`."""
CHUNK = 1 << 20
DECIDED = 500  # elements beyond the bound of a chunk that mpmath looks at; more of them are a failure anyway

FUNCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    **{name: getattr(np, name) for name in (
        "exp", "expm1", "log", "log1p", "sqrt", "cbrt", "sin", "cos", "tan", "tanh", "sinh", "cosh", "square")},
    **{name: getattr(np, name.replace("a", "arc", 1)) for name in ("acos", "acosh", "asin", "asinh", "atan", "atanh")},
    **{name: getattr(scipy.special, name) for name in ("erf", "erfc")},
    "rsqrt": lambda x: 1 / np.sqrt(x), "logistic": scipy.special.expit, "erf_inv": scipy.special.erfinv,
    "lgamma": lambda x: np.where(np.isinf(x), np.inf, scipy.special.gammaln(x)), "digamma": scipy.special.psi,
    "bessel_i1e": scipy.special.i1e,
}  # fmt: skip


@dataclass(slots=True)
class Largest:
    """The largest error of a function in units in the last place, and where; the same of XLA if it was asked."""

    operation: Operation
    error: float = 0.0
    where: float = 0.0
    xla: float = 0.0
    xla_where: float = 0.0
    count: int = 0


def quick_errors(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Return the errors of f32 numbers in units in the last place as :func:`conformance.edges.errors` does, in f64."""
    exponent = ((want.view(np.int64) >> 52) & 2047) - 1023
    step = np.ldexp(1.0, np.clip(np.where(np.isfinite(want), exponent, 0), -126, 127) - 23)
    step[np.isinf(want)] = 2.0**-149  # where a number stands for an infinity
    with np.errstate(all="ignore"):
        ours, theirs = (np.clip(v, -(2.0**128), 2.0**128) for v in (got.astype(np.float64), want))
        apart = np.abs(ours - theirs) / step
    left, right = np.isnan(got), np.isnan(want)
    return np.where(left & right, 0.0, np.where(left != right, np.inf, apart))


def chunks(stride: int = STRIDE) -> Iterator[np.ndarray]:
    """Return f32 numbers whose bits are ``stride`` apart, :data:`CHUNK` at a time; the last begins again."""
    count = -(-(1 << 32) // (stride * CHUNK))
    for n in range(count):
        bits = np.arange(n * CHUNK, (n + 1) * CHUNK, dtype=np.uint64) * np.uint64(stride) + np.uint64(SEED)
        yield (bits % (1 << 32)).astype(np.uint32).view(np.float32)


def measure(xla: bool = False, stride: int = STRIDE) -> list[Largest]:
    """Run every unary function on all chunks."""
    found = [Largest(o) for o in functions("f32", 1) if o.name in FUNCTIONS]
    source = program([f.operation for f in found], "f32", CHUNK)
    call = aotc.load(aotc.compile(source)).invoke
    for x in chunks(stride):
        for one, got in zip(found, call("main", x), strict=True):
            with np.errstate(all="ignore"):
                want = FUNCTIONS[one.operation.name](x.astype(np.float64))
            _add(one, x, np.asarray(got), want)
            if xla:
                theirs = run_xla(program([one.operation], "f32", CHUNK), [x])
                assert theirs is not None
                error = quick_errors(theirs, want)
                tiny = np.finfo(np.float32).tiny  # it takes subnormals for zeros
                error[(np.abs(x) < 2 * tiny) | (np.abs(want) < 2 * tiny)] = 0
                at = int(error.argmax())
                if error[at] > one.xla:
                    one.xla, one.xla_where = float(error[at]), float(x[at])
    return found


def _add(one: Largest, x: np.ndarray, got: np.ndarray, want: np.ndarray) -> None:
    error = quick_errors(got, want)
    row = bound_of(EdgeCase(one.operation, "f32"))
    bound = row.ulp
    beyond = np.flatnonzero(error > bound)[:DECIDED]
    error[beyond] = errors(got[beyond], reference(one.operation, [x[beyond]]))
    if row.growing:
        error[beyond] -= row.growing * growth(one.operation.name, [x[beyond]])
    at = int(error.argmax())
    one.count += int((error > bound).sum())
    if error[at] > one.error:
        one.error, one.where = float(error[at]), float(x[at])


if __name__ == "__main__":
    for row in measure(xla=True):
        name, bound = row.operation.name, bound_of(EdgeCase(row.operation, "f32")).ulp
        print(f"{name}: {row.error:.3f} at {row.where!r}, bound {bound:g}, XLA {row.xla:.4g} at {row.xla_where!r}")
