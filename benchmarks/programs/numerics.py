"""Simulations, circuits, matmuls, sorts and other operations on which aotc was slower than a peer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.programs.catalogue import Program, program
from benchmarks.programs.circuits import controlled_nots, energy, sorting_network
from benchmarks.programs.models import integers, normal


@program
def complex_exp() -> Program:
    """Complex exponentials, as S4D computes from its poles."""
    return jnp.exp, ((normal(32, 32, 512) * -0.1 + 1j * normal(32, 32, 512, seed=1) * 9).astype("complex64"),)


@program
def top_k_ascending() -> Program:
    return lambda x: jax.lax.top_k(-x, 10), (normal(64, 1000),)


@program
def sorted_smallest() -> Program:
    return lambda x: jnp.argsort(x, axis=-1)[:, :10], (normal(64, 1000),)


@program
def kmeans_step() -> Program:
    def run(points: Any, centres: Any) -> Any:
        distances = ((points[:, None] - centres[None]) ** 2).sum(-1)
        nearest = distances.argmin(1)
        sums = jax.ops.segment_sum(points, nearest, centres.shape[0])
        counts = jax.ops.segment_sum(jnp.ones(points.shape[0]), nearest, centres.shape[0])
        return sums / jnp.maximum(counts, 1)[:, None], nearest

    return run, (normal(10_000, 16), normal(32, 16, seed=1))


@program
def matvec_4096() -> Program:
    return lambda w, x: w @ x, (normal(4096, 4096), normal(4096, seed=1))


@program
def vecmat_4096() -> Program:
    return lambda w, x: x @ w, (normal(4096, 4096), normal(4096, seed=1))


@program
def circuit_gradient() -> Program:
    return jax.grad(energy), (normal(12),)


@program
def bitonic_network() -> Program:
    return sorting_network, (normal(32),)


@program
def cnot_chain() -> Program:
    return lambda x: controlled_nots(x, 15), (normal(2**16),)


@program
def forces() -> Program:
    """Ten steps of bodies that attract each other."""

    def run(x: Any, v: Any, mass: Any) -> Any:
        def pull(x: Any) -> Any:
            d = x[None] - x[:, None]
            return (d * (mass / ((d**2).sum(-1) + 1e-2) ** 1.5)[..., None]).sum(1)

        def step(_: Any, state: Any) -> Any:
            x, v = state
            v = v + 0.005 * pull(x)
            x = x + 0.01 * v
            return x, v + 0.005 * pull(x)

        return jax.lax.fori_loop(0, 10, step, (x, v))

    return run, (normal(64, 3), normal(64, 3, seed=1), np.abs(normal(64, seed=2)))


def leapfrog(q: Any, p: Any, x: Any, y: Any) -> Any:
    """Twenty steps of Hamiltonian Monte Carlo on a logistic regression."""

    def density(q: Any) -> Any:
        logits = x @ q
        return (y * logits - jnp.logaddexp(0, logits)).sum() - 0.5 * (q**2).sum()

    def step(_: Any, state: Any) -> Any:
        q, p = state
        p = p + 0.005 * jax.grad(density)(q)
        q = q + 0.01 * p
        return q, p + 0.005 * jax.grad(density)(q)

    q, p = jax.lax.fori_loop(0, 20, step, (q, p))
    return q, p, density(q)


@program
def monte_carlo() -> Program:
    """One chain of Hamiltonian Monte Carlo."""
    return leapfrog, (normal(20, scale=0.1), normal(20), normal(500, 20), integers(2, 500).astype("float32"))


@program
def monte_carlo_chains() -> Program:
    """Eight chains of Hamiltonian Monte Carlo."""
    _, (*_, x, y) = monte_carlo()
    return jax.vmap(leapfrog, (0, 0, None, None)), (normal(8, 20, scale=0.1), normal(8, 20), x, y)


@program
def top_k_sampling() -> Program:
    """Sampling of a token from the 40 most likely, for each of eight rows."""

    def sample(logits: Any, key: Any) -> Any:
        values, tokens = jax.lax.top_k(logits / 0.8, 40)
        return jnp.take_along_axis(tokens, jax.random.categorical(key, values)[:, None], 1)

    return sample, (normal(8, 8000), np.array([0, 1], "uint32"))


@program
def moving_average() -> Program:
    """Differences of cumulative sums that begin with a zero."""

    def average(x: Any) -> Any:
        sums = jnp.cumsum(jnp.pad(x, ((0, 0), (1, 0))), 1)
        return (sums[:, 20:] - sums[:, :-20]) / 20

    return average, (normal(16, 1000),)


@program
def integer_product() -> Program:
    """Matmul of integers modulo 2 ** 32."""
    return lambda a, b: a @ b, (integers(100, 256, 256), integers(100, 256, 256))


@program
def complex_product() -> Program:
    a, b = ((normal(256, 256, seed=n) + 1j * normal(256, 256, seed=n + 2)).astype("complex64") for n in (0, 1))
    return lambda a, b: a @ b, (a, b)


@program
def complex_matvec() -> Program:
    a = (normal(512, 512) + 1j * normal(512, 512, seed=1)).astype("complex64")
    return lambda a, x: a @ x, (a, a[0])


@program
def wave() -> Program:
    """Thirty steps of a wave equation, with a convolution of one channel as the second derivative."""
    stencil = np.array([[0, 1, 0], [1, -4, 1], [0, 1, 0]], "float32")[None, None]

    def step(state: Any, _: Any) -> Any:
        now, before = state
        curved = jax.lax.conv_general_dilated(now[None, None], stencil, (1, 1), "SAME")[0, 0]
        new = 2 * now - before + 0.1 * curved
        return (new, now), new[32, 32]

    return lambda u: jax.lax.scan(step, (u, u), None, length=30), (normal(64, 64),)


@program
def normal_densities() -> Program:
    """Log densities of a multivariate normal distribution at many points: a triangular solve of many rows."""
    density = jax.scipy.stats.multivariate_normal.logpdf
    return lambda x, mean, a: density(x, mean, a @ a.T + jnp.eye(16)), (normal(500, 16), normal(16), normal(16, 16))


@program
def triangular_solve() -> Program:
    lower = np.tril(normal(100, 100, scale=0.1)) + 2 * np.eye(100, dtype="float32")
    return lambda a, b: jax.scipy.linalg.solve_triangular(a, b, lower=True), (lower, normal(100, 500))


@program
def sums_of_96() -> Program:
    """Sums of rows of 96 elements, which LLVM unrolled before vectorization."""
    return lambda x: x.sum(1), (normal(4000, 96),)


@program
def turned_sums() -> Program:
    """Sums along rows, and along columns, of a transposed matrix."""
    return lambda x: (x.T.sum(1), x.transpose(1, 0).max(0)), (normal(256, 512),)


@program
def turned_product_sums() -> Program:
    """Sums of products of a row-major and a transposed matrix."""
    return lambda x, y: (x.T * y).sum(1), (normal(256, 512), normal(512, 256))


@program
def turned_softmax() -> Program:
    return lambda x: jax.nn.softmax(x.T, axis=1), (normal(256, 512),)


@program
def turned_statistics() -> Program:
    """Mean and variance of each channel; channels are last in memory and first in the program."""

    def statistics(x: Any) -> Any:
        x = x.transpose(0, 3, 1, 2)
        return x.mean((2, 3)), x.var((2, 3))

    return statistics, (normal(4, 32, 32, 48),)


@program
def symmetric_largest() -> Program:
    return lambda x: jnp.maximum(x, x.T).max(1), (normal(512, 512),)


@program
def channels_to_images() -> Program:
    return lambda x: x.transpose(0, 2, 3, 1), (normal(4, 32, 32, 48),)


@program
def twenty_beside_each_other() -> Program:
    return lambda *parts: jnp.concatenate(parts, 1), tuple(normal(256, 20, seed=n) for n in range(20))


@program
def overlapping_parts() -> Program:
    return lambda x: jnp.concatenate([x[:, i : i + 37] for i in range(0, 400, 20)], 1), (normal(256, 512),)


@program
def pool_of_halves() -> Program:
    """Maximum over 2 x 2 pixels in f16."""
    lowest, window = np.array(-np.inf, "float16"), (1, 2, 2, 1)
    pool = jax.lax.reduce_window
    return lambda x: pool(x, lowest, jax.lax.max, window, window, "VALID"), (normal(4, 32, 32, 48).astype("float16"),)


@program
def updates_of_rows() -> Program:
    """Fifty additions to three rows of a matrix, in place."""

    def updated(x: Any, places: Any, y: Any) -> Any:
        def iteration(k: Any, x: Any) -> Any:
            rows = jax.lax.dynamic_slice(x, (places[k], 0), (3, 64))
            return jax.lax.dynamic_update_slice(x, rows + y[k], (places[k], 0))

        return jax.lax.fori_loop(0, 50, iteration, x)

    return updated, (normal(256, 64), integers(250, 50), normal(50, 3, 64))


@program
def chosen() -> Program:
    """Selection of one of three values for each element."""
    return lambda i, x: jnp.choose(i, [x, x * 2, x + 1], mode="clip"), (integers(3, 256, 512), normal(256, 512))


@program
def patches_by_indices() -> Program:
    """All patches of 5 x 5 of an image, gathered by the indices of their pixels."""

    def patches(x: Any) -> Any:
        at = jnp.arange(60)[:, None] + jnp.arange(5)
        return x[at[:, None, :, None], at[None, :, None, :]]

    return patches, (normal(64, 64),)
