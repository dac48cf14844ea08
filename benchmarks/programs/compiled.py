"""Programs whose compile time is measured next to XLA's: ``CATALOGUE`` by name, written with JAX alone.

Single operations, loops and solvers, networks and training steps; weights are arguments, sizes are small: the
compile time depends on the amount of code, not on its run time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.ops import cases
from benchmarks.programs import slower
from benchmarks.programs.models import integers, normal
from benchmarks.programs.networks import NETWORKS

Program = tuple[Callable[..., Any], tuple[Any, ...]]

CASES = (
    "sort f32 [10000]", "sort f32 with i32 [10000]", "sort f32 [1000, 1000] rows", "top_k 100 f32 [8, 50000]",
    "scatter-add 20000 rows of 128", "segment_sum sorted 100000 rows of 16", "gather 100000 rows of 16",
    "cumsum f32 [100000]", "cumlogsumexp f32 [100, 1000] rows", "associative_scan f32 [100000]", "normal [10000]",
    "permutation [100000]", "categorical [64, 1000]", "fft c64 [4096]", "rfft f32 [1000, 1000]", "sin f32 [100000]",
    "pow f64 [100000]", "tan c64 [100000]", "softmax f32 [512, 2048]", "gelu bf16 [512, 2048]",
    "pooling f32 [8, 56, 56, 64]",
)  # fmt: skip
"""Of ``benchmarks/ops/cases.py``."""
ALREADY = (
    "jacfwd_mlp", "hessian_mlp", "complex_exp", "kmeans_step", "circuit_gradient", "bitonic_network", "cnot_chain",
    "dense_training", "lstm_gradient", "group_norm_gradient", "top_k_ascending",
)  # fmt: skip
"""Of ``benchmarks/programs/slower.py``."""


def solvers() -> Iterator[tuple[str, Program]]:
    """Yield factorizations and programs that solve systems with them."""
    square, right = normal(24, 24) + 8 * np.eye(24, dtype="float32"), normal(24, 3, seed=1)
    positive = square @ square.T
    by_cholesky = lambda a, b: jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(a), True), b)
    yield "cholesky_solve", (by_cholesky, (positive, right))
    yield "solve", (jnp.linalg.solve, (square, right))
    yield "qr", (jnp.linalg.qr, (square,))
    yield "eigh", (jnp.linalg.eigh, (positive,))
    yield "svd", (lambda a: jnp.linalg.svd(a, compute_uv=False), (square,))
    yield "logdet_gradient", (jax.grad(lambda a: jnp.linalg.slogdet(a)[1]), (square,))

    def gaussian_process(x: Any, y: Any, new: Any) -> Any:
        kernel = lambda a, b: jnp.exp(-0.5 * ((a[:, None] - b[None]) ** 2).sum(-1))
        factor = jnp.linalg.cholesky(kernel(x, x) + 0.1 * jnp.eye(len(x)))
        half = jax.scipy.linalg.solve_triangular(factor, kernel(x, new), lower=True)
        mean = half.T @ jax.scipy.linalg.solve_triangular(factor, y, lower=True)
        return mean, 1 - (half**2).sum(0)

    yield "gaussian_process", (gaussian_process, (normal(40, 3), normal(40, seed=1), normal(10, 3, seed=2)))


def loops() -> Iterator[tuple[str, Program]]:
    """Yield programs around ``while``, ``scan`` and ``cond``."""

    def newton(x: Any) -> Any:
        step = lambda s: (s[0] - (s[0] ** 3 - 2 * s[0] - 5) / (3 * s[0] ** 2 - 2), s[1] + 1)
        return lax.while_loop(lambda s: (jnp.abs(s[0] ** 3 - 2 * s[0] - 5).max() > 1e-4) & (s[1] < 50), step, (x, 0))

    yield "newton_while", (newton, (np.linspace(2, 3, 64, dtype="float32"),))

    def conjugate_gradient(a: Any, b: Any) -> Any:
        return jax.scipy.sparse.linalg.cg(lambda v: a @ v, b, maxiter=20)[0]

    yield "conjugate_gradient", (conjugate_gradient, (np.eye(64, dtype="float32") * 4, normal(64)))

    def lorenz(state: Any) -> Any:
        def slope(s: Any) -> Any:
            x, y, z = s
            return jnp.stack([10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z])

        def step(s: Any, _: Any) -> Any:
            a = slope(s)
            b = slope(s + 0.005 * a)
            c = slope(s + 0.005 * b)
            d = slope(s + 0.01 * c)
            new = s + 0.01 / 6 * (a + 2 * b + 2 * c + d)
            return new, new

        return lax.scan(step, state, length=200)

    yield "runge_kutta_scan", (lorenz, (np.ones(3, "float32"),))

    def kalman(observed: Any, f: Any, h: Any) -> Any:
        def step(carry: Any, z: Any) -> Any:
            x, p = carry
            x, p = f @ x, f @ p @ f.T + 0.1 * jnp.eye(4)
            gain = p @ h.T @ jnp.linalg.inv(h @ p @ h.T + jnp.eye(2))
            x = x + gain @ (z - h @ x)
            return (x, p - gain @ h @ p), x

        return lax.scan(step, (jnp.zeros(4), jnp.eye(4)), observed)[1]

    yield "kalman_scan", (kalman, (normal(50, 2), np.eye(4, dtype="float32"), normal(2, 4)))

    def viterbi(start: Any, move: Any, seen: Any) -> Any:
        def forward(best: Any, row: Any) -> Any:
            scores = best[:, None] + move
            return scores.max(0) + row, scores.argmax(0)

        best, back = lax.scan(forward, start, seen)
        return lax.scan(lambda state, row: (row[state], state), best.argmax(), back, reverse=True)

    yield "viterbi", (viterbi, (normal(12), normal(12, 12), normal(30, 12)))

    def sinkhorn(cost: Any) -> Any:
        def body(_: Any, uv: Any) -> Any:
            u = -jax.nn.logsumexp(-cost * 5 + uv[1][None], 1)
            return u, -jax.nn.logsumexp(-cost * 5 + u[:, None], 0)

        return lax.fori_loop(0, 30, body, (jnp.zeros(32), jnp.zeros(32)))

    yield "sinkhorn", (sinkhorn, (np.abs(normal(32, 32)),))

    def mandelbrot(re: Any, im: Any) -> Any:
        c = re[None] + 1j * im[:, None]
        iteration = lambda _, s: (jnp.where(jnp.abs(s[0]) < 2, s[0] ** 2 + c, s[0]), s[1] + (jnp.abs(s[0]) < 2))
        return lax.fori_loop(0, 40, iteration, (c * 0, jnp.zeros(c.shape, "int32")))[1]

    yield "mandelbrot", (mandelbrot, (np.linspace(-2, 1, 64, dtype="float32"), np.linspace(-1, 1, 64, dtype="float32")))

    def branches(n: Any, x: Any) -> Any:
        return lax.switch(n, [jnp.sin, lambda x: jnp.cumsum(x, 1), lambda x: x @ x, lambda x: jnp.sort(x, 0)], x)

    yield "switch", (branches, (np.int32(2), normal(32, 32)))


def simulations() -> Iterator[tuple[str, Program]]:
    """Yield simulation steps on grids and particles, and derivatives of functions."""

    def life(board: Any) -> Any:
        shifts = [(a, b) for a in (-1, 0, 1) for b in (-1, 0, 1) if a or b]
        alive = lambda x: sum(jnp.roll(x, s, (0, 1)) for s in shifts)
        return lax.fori_loop(0, 8, lambda _, x: ((alive(x) == 3) | ((x == 1) & (alive(x) == 2))).astype(x.dtype), board)

    yield "game_of_life", (life, (integers(2, 64, 64).astype("int32"),))

    def bodies(x: Any, v: Any) -> Any:
        def force(x: Any) -> Any:
            d = x[None] - x[:, None]
            return (d * (1e-2 + (d**2).sum(-1, keepdims=True)) ** -1.5).sum(1)

        for _ in range(3):
            v = v + 0.01 * force(x)
            x = x + 0.01 * v
        return x, v

    yield "n_bodies", (bodies, (normal(64, 3), normal(64, 3, seed=1)))

    def spectral(u: Any) -> Any:
        k = jnp.fft.fftfreq(128) * 128
        for _ in range(3):
            u = jnp.fft.ifft(jnp.fft.fft(u) * jnp.exp(-0.001 * k**2)).real
        return u

    yield "spectral_heat", (spectral, (normal(128),))
    rosenbrock = lambda x: (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()
    curved = lambda x, v: jax.jvp(jax.grad(rosenbrock), (x,), (v,))[1]
    yield "hessian_vector", (curved, (normal(64), normal(64, seed=1)))

    def histogram(x: Any) -> Any:
        return jnp.histogram(x, 20, (-3, 3))[0], jnp.quantile(x, jnp.array([0.1, 0.5, 0.9])), jnp.unique(x, size=10)

    yield "histogram_quantiles", (histogram, (normal(1000),))
    windows = lambda x: jnp.stack([x[k : k + 16].mean() * k for k in range(24)])
    yield "sliding_means", (windows, (normal(64),))
    mixed = lambda a, b: jnp.einsum("bij,bjk,kl->bil", a, b, b[0]) + jnp.einsum("bij->bji", a)
    yield "einsum_f64", (mixed, (normal(4, 24, 24).astype("float64"), normal(4, 24, 24).astype("float64")))


def catalogue() -> dict[str, Callable[[], Program]]:
    """Return the builder of each program, by name."""
    found: dict[str, Callable[[], Program]] = {}
    of_ops = {case.name: case for group in cases.GROUPS for case in group()}
    for name in CASES:
        found[name] = lambda case=of_ops[name]: (case.function, case.args)
    for family in (solvers, loops, simulations):
        for name, program in family():
            found[name] = lambda program=program: program
    return {**found, **{name: slower.PROGRAMS[name] for name in ALREADY}, **NETWORKS}
