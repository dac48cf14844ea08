"""Functions of a vector; for each, one emitter of kernels writes code into the kernel of a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Emitter = Callable[[Any], Any]


def _table(n: int, m: int, dtype: str = "f4") -> Any:
    """Return a matrix of small numbers that every float dtype represents."""
    return ((jnp.arange(n * m) * 7 % 5 - 2) / 4).reshape(n, m).astype(dtype)


def _spectrum(x: Any) -> Any:
    n = x.shape[0]
    return jnp.fft.irfft(jnp.fft.rfft(x) * jnp.exp(-0.1 * jnp.arange(n // 2 + 1, dtype=x.dtype)), n)


def _complex_spectrum(x: Any) -> Any:
    spectrum = jnp.fft.fft(x * (1 + 0.5j)) * jnp.exp(-0.1j * jnp.arange(x.shape[0]))
    return jnp.fft.ifft(spectrum).real.astype("f4")


def _columns(x: Any) -> Any:
    """Transform three neighbouring signals along an axis that is not the last."""
    y = jnp.stack([x, x + 1, 2 * x], axis=1)
    return jnp.fft.ifft(jnp.fft.fft(y, axis=0) * 0.5, axis=0).real.sum(1).astype("f4")


def _transposed(x: Any) -> Any:
    y = jnp.outer(x, _table(1, 16)[0] + 1)
    return jnp.fft.ifft(jnp.fft.fft(y.T, axis=1), axis=1).real.sum(0).astype("f4")


def _matmul(dtype: str) -> Emitter:
    def product(x: Any) -> Any:
        n = x.shape[0]
        left = (jnp.outer(_table(1, 3)[0], x)).astype(dtype)
        accumulated = "i4" if dtype == "i1" else None
        both = jnp.dot(left, _table(n, n, dtype), preferred_element_type=accumulated)
        return both.sum(0).astype("f4") / n

    return product


def _converted(dtype: str) -> Emitter:
    return lambda x: (x * 2).astype(dtype).astype("f4")


def _factor(x: Any) -> Any:
    a = jnp.outer(x, x) * 0.1 + 2 * jnp.eye(x.shape[0], dtype="f4")
    return jax.scipy.linalg.solve_triangular(jnp.linalg.cholesky(a), x, lower=True)


def _solved(x: Any) -> Any:
    n = x.shape[0]
    return jnp.linalg.solve(jnp.outer(x, _table(1, n)[0]) * 0.1 + 2 * jnp.eye(n, dtype="f4"), x)


def _scattered(x: Any) -> Any:
    n = x.shape[0]
    places = (jnp.abs(x) * 100).astype("i4") % n
    return jnp.zeros(n, "f4").at[places].add(x) + x[places]


def _random(x: Any) -> Any:
    key = jax.random.fold_in(jax.random.key(3), (jnp.abs(x[0]) * 10).astype("i4"))
    return x * 0.5 + jax.random.uniform(key, x.shape, x.dtype)


def _rare(x: Any) -> Any:
    y = x.astype("f8") * 1e9
    return (jnp.sin(y) + jnp.fmod(y, 0.7) + jnp.exp(x.astype("f8"))).astype("f4") / 2


def _special(x: Any) -> Any:
    return (jax.lax.lgamma(x + 3) + jax.lax.erf(x) + jnp.cos(x) + jax.lax.erf_inv(x * 0.5) + jnp.log1p(x * x)) / 4


def _complex(x: Any) -> Any:
    z = x + 0.5j
    return (jnp.exp(z * 1j) + jnp.sqrt(z) + 1 / z).imag.astype("f4")


def _nested(x: Any) -> Any:
    return jax.lax.fori_loop(0, 3, lambda i, y: jnp.cos(y + i), x)


def _branch(x: Any) -> Any:
    return jax.lax.cond(x[0] > 0.1, lambda y: jnp.tanh(y), lambda y: y[::-1] * 0.5, x)


def _integers(x: Any) -> Any:
    y = (x * 1000).astype("i4")
    bits = jax.lax.population_count(y) + jax.lax.clz(y) + y // 7 + y % 11
    return (bits % 8).astype("f4") / 8


def _convolved(x: Any) -> Any:
    return jnp.convolve(x, jnp.array([0.25, 0.5, 0.125], "f4"), mode="same")


def _pooled(x: Any) -> Any:
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (3,), (1,), "SAME")


EMITTERS: dict[str, Emitter] = {
    "real spectrum": _spectrum,
    "complex spectrum": _complex_spectrum,
    "spectrum of f64": lambda x: _spectrum(x.astype("f8")).astype("f4"),
    "spectra of columns": _columns,
    "transposed rows": _transposed,
    "matmul of f32": _matmul("f4"),
    "matmul of f64": _matmul("f8"),
    "matmul of bf16": _matmul("bfloat16"),
    "matmul of f16": _matmul("f2"),
    "matmul of i8": _matmul("i1"),
    "sort": lambda x: jnp.sort(x),
    "argsort": lambda x: x[jnp.argsort(-x)],
    "top_k": lambda x: jnp.pad(jax.lax.top_k(x, (len(x) + 1) // 2)[0], (0, len(x) // 2)),
    "cumulative sum": lambda x: jnp.cumsum(x) / len(x),
    "associative scan": lambda x: jax.lax.associative_scan(jnp.maximum, x),
    "argmax": lambda x: x + jnp.argmax(x),
    "Cholesky factor": _factor,
    "linear system": _solved,
    "scatter and gather": _scattered,
    "random numbers": _random,
    "rare arguments": _rare,
    "special functions": _special,
    "complex functions": _complex,
    "small floats": _converted("float8_e4m3fn"),
    "halves": _converted("f2"),
    "bf16": _converted("bfloat16"),
    "small integers": _converted("int4"),
    "integers": _integers,
    "nested loop": _nested,
    "branch": _branch,
    "convolution": _convolved,
    "window": _pooled,
    "zeros": lambda x: jnp.zeros_like(x).at[0].set(x[0]),
    "softmax": lambda x: jax.nn.softmax(x * 3),
}


def in_a_loop(emitters: list[Emitter], iterations: int = 3) -> Emitter:
    """Return a function whose loop sums the results of ``emitters`` for a vector that changes by exact steps."""

    def step(state: Any, _: Any) -> Any:
        x, sums = state
        return (x * -0.75, [total * 0.5 + emitter(x) for emitter, total in zip(emitters, sums)]), None

    def run(x: Any) -> Any:
        return jax.lax.scan(step, (x, [jnp.zeros_like(x) for _ in emitters]), length=iterations)[0][1]

    return run
