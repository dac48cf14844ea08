"""Functions that have no op in aotc and are expanded into others: error bounds, and arguments where these hold.

jaxlib expands ``chlo.zeta`` and ``chlo.polygamma``, jax writes ``bessel_i0e`` as a polynomial. The reference is mpmath.
:func:`complex_excess` is for ops on complex numbers that XLA does not have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import mpmath
import numpy as np

import aotc
from aotc.vmfb.dtypes import to_numpy
from conformance.edge_bounds import BOUNDS
from conformance.edges import errors, mlir_type
from conformance.sampled import SEED

DTYPES = ("f16", "bf16", "f32", "f64")
DIGITS = 40
Array = np.ndarray


@dataclass(frozen=True, slots=True)
class Expanded:
    """A function, how arguments are drawn, its value, and its bound: ``ulps[dtype]`` times ``growth(*args)``.

    ``formula`` and ``domain`` are the text of the growth and of the arguments.
    """

    name: str
    draw: Callable[[np.random.Generator, int], tuple[Array, ...]]
    value: Callable[..., Any]
    ulps: tuple[float, float, float, float]
    domain: str
    growth: Callable[..., Array] = lambda *args: np.ones(args[0].shape)
    formula: str = ""

    def bound(self, dtype: str) -> str:
        """Return the bound of a dtype as the page has it."""
        ulps = self.ulps[DTYPES.index(dtype)]
        return f"{ulps:g} {self.formula}" if self.formula and dtype in ("f32", "f64") else f"{ulps:g}"


def _zeta(x: Any, q: Any) -> Any:
    with mpmath.workdps(DIGITS + int(x * (1 + abs(mpmath.log(q))))):  # it sums with an absolute error
        return mpmath.zeta(x, q)


def _polygamma(n: Any, x: Any) -> Any:
    return (-1) ** (int(n) + 1) * mpmath.factorial(int(n)) * _zeta(n + 1, x)


def _size_of_polygamma(n: Array, x: Array) -> Array:
    import scipy.special

    return 1 + scipy.special.gammaln(n + 1) + np.abs((n + 1) * np.log(x))


def _between(random: np.random.Generator, count: int, low: float, high: float) -> Array:
    """Return numbers between powers of two, even over exponents."""
    return np.exp2(random.uniform(low, high, count))


EXPANDED = (
    Expanded(
        "zeta", lambda r, n: (1 + _between(r, n, -6, 5), _between(r, n, -6, 8)), _zeta, (0.51, 0.51, 3, 3),
        "x from 1.02 to 33, q from 1/64 to 256", lambda x, q: 1 + np.abs(x * np.log(q)), "(1 + abs(x log q))",
    ),
    Expanded(
        "polygamma", lambda r, n: (r.integers(1, 21, n).astype(np.float64), _between(r, n, -4, 4)), _polygamma,
        (0.51, 0.51, 8, 10), "n from 1 to 20, x from 1/16 to 16", _size_of_polygamma,
        "(1 + log(n!) + abs((n + 1) log x))",
    ),
    Expanded(
        "bessel_i0e", lambda r, n: (_between(r, n, -12, 14) * r.choice([-1, 1], n),),
        lambda x: mpmath.besseli(0, x) * mpmath.exp(-abs(x)), (0.51, 0.51, 8, 8), "abs(x) up to 16384",
    ),
)  # fmt: skip


def excess(row: Expanded, dtype: str, count: int, target: str = "cpu") -> tuple[float, tuple[Any, ...]]:
    """Return the largest error over its bound (at most 1 if it holds), and the arguments."""
    with np.errstate(all="ignore"):
        args = [a.astype(to_numpy(dtype)) for a in row.draw(np.random.default_rng(SEED), count)]
    with jax.enable_x64(True):
        module = jax.jit(getattr(jax.lax, row.name)).lower(*args)
    got = np.asarray(aotc.load(aotc.compile(module, target=target))(*args))
    with mpmath.workdps(DIGITS):
        values = [row.value(*(mpmath.mpf(float(v)) for v in point)) for point in zip(*args, strict=True)]
        want = np.array([np.longdouble(mpmath.nstr(v, 25)) for v in values])
    allowed = np.full(count, row.ulps[DTYPES.index(dtype)])
    if dtype in ("f32", "f64"):
        allowed = allowed * row.growth(*(a.astype(np.float64) for a in args))
    found = errors(got, want) / allowed
    at = int(np.argmax(found))
    return float(found[at]), tuple(a[at] for a in args)


COMPLEX: dict[str, tuple[int, Callable[..., Any]]] = {
    "cbrt": (1, lambda z: mpmath.power(z, mpmath.mpf(1) / 3)),
    "atan2": (2, lambda y, x: -1j * mpmath.log((x + 1j * y) / mpmath.sqrt(x * x + y * y))),
}


def complex_excess(name: str, dtype: str, count: int) -> tuple[float, tuple[Any, ...]]:
    """Return the largest error over its bound of a function of :data:`COMPLEX`, and the arguments."""
    arity, value = COMPLEX[name]
    random = np.random.default_rng(SEED)
    iterations = [np.exp(1j * random.uniform(-np.pi, np.pi, count)) for _ in range(arity)]
    args = [(_between(random, count, -10, 10) * iteration).astype(to_numpy(dtype)) for iteration in iterations]
    kind, names = mlir_type(dtype, count), ", ".join(f"%a{n}" for n in range(arity))
    signature = ", ".join(f"%a{n}: {kind}" for n in range(arity))
    types = ", ".join([kind] * arity)
    body = f'%r = "stablehlo.{name}"({names}) : ({types}) -> {kind}\n  return %r : {kind}'
    module = aotc.load(aotc.compile(f"func.func @main({signature}) -> {kind} {{\n  {body}\n}}"))
    got, want = np.asarray(module.invoke("main", *args)[0]), np.empty(count, np.clongdouble)
    with mpmath.workdps(DIGITS):
        for n, point in enumerate(zip(*args, strict=True)):
            y = value(*(mpmath.mpc(float(v.real), float(v.imag)) for v in point))
            want[n] = np.longdouble(mpmath.nstr(y.real, 25)) + 1j * np.longdouble(mpmath.nstr(y.imag, 25))
    bound = BOUNDS[name, dtype]
    found = errors(got, want) / (bound.ulp + bound.growing / np.abs(want))
    at = int(np.argmax(found))
    return float(found[at]), tuple(a[at] for a in args)
