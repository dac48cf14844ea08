"""Sums with updates of zeros in loops keep the sign of each zero, also of arrays that begin with -0.0.

Random lists of statements run on NumPy, and as a JAX function whose program is rewritten and interpreted.
"""

import random
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.gpu_program import check_gpu

import aotc
from aotc.frontend.importer import import_raw
from aotc.frontend.mlir import fetch
from aotc.ir.semantics.run import interpret
from aotc.ir.tensor.ir import walk
from aotc.lowering.passes.canonicalize import array_passes
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.vmfb.devices.cuda import driver

SIZE = 9
NUMBERS = np.array([-0.0, -0.0, 0.0, 1.0, -1.0, np.nan, np.inf], np.float32)


@pytest.fixture(autouse=True)
def small_arrays(monkeypatch):
    """Let no array be too small for a flag."""
    for name in ("BRANCHED_BYTES", "BRANCHED_BYTES_CUDA"):
        monkeypatch.setattr(array_passes, name, replace(getattr(array_passes, name), default=0))


# ---------------------------------------------------------------- statements: (kind, number, inner lists)


def random_statements(r, depth, count):
    kinds = ["slice", "slice", "pad", "scatter", "set", "clear", "negate", "note", "branch", "choice", "loop"]
    found = []
    for _ in range(count):
        kind = r.choice(kinds if depth else kinds[:8])
        inner = [random_statements(r, depth - 1, r.randint(0, 2)) for _ in range(2)] if depth else []
        found.append((kind, r.randint(0, 5), inner))
    return found


def run_numpy(statements, x, y, i, parts):
    for kind, k, inner in statements:
        p, g = (i * k + k) % (SIZE - 1), parts[(i + k) % len(parts)]
        match kind:
            case "slice":
                z = np.zeros_like(x)
                z[p : p + 2] = g
                x = x + z
            case "pad":
                z = np.zeros_like(x)
                z[k : k + 2] = g
                x = x + z
            case "scatter":
                z = np.zeros_like(x)
                np.add.at(z, [p, k, p], [g[0], g[1], g[1]])
                x = x + z
            case "set" | "clear" | "negate":
                x = x.copy()
                x[p] = {"set": g[0], "clear": np.float32(0), "negate": -x[p]}[kind]
            case "note":
                y = y * 3 + int(np.signbit(x[p]) & (x[p] == 0))
            case "branch" | "choice":
                x, y = run_numpy(inner[int(np.signbit(x[p]))], x, y, i, parts)
            case "loop":
                for j in range(k % 4):
                    x, y = run_numpy(inner[0], x, y, i + j, parts)
    return x, y


def run_jax(statements, x, y, i, parts):
    for kind, k, inner in statements:
        p, g = (i * k + k) % (SIZE - 1), parts[(i + k) % len(parts)]
        match kind:
            case "slice":
                x = x + lax.dynamic_update_slice(jnp.zeros_like(x), g, (p,))
            case "pad":
                x = x + lax.pad(g, np.float32(0), [(k, SIZE - k - 2, 0)])
            case "scatter":
                x = x + jnp.zeros_like(x).at[jnp.stack([p, k, p])].add(jnp.stack([g[0], g[1], g[1]]))
            case "set" | "clear" | "negate":
                x = x.at[p].set({"set": g[0], "clear": 0.0, "negate": -x[p]}[kind])
            case "note":
                y = y * 3 + (jnp.signbit(x[p]) & (x[p] == 0))
            case "branch":
                sides = [lambda x, y, s=s: run_jax(s, x, y, i, parts) for s in inner]
                x, y = lax.cond(jnp.signbit(x[p]), sides[1], sides[0], x, y)
            case "choice":
                sides = [run_jax(s, x, y, i, parts) for s in inner]
                x, y = (jnp.where(jnp.signbit(x[p]), b, a) for a, b in zip(*sides))
            case "loop":
                x, y = lax.fori_loop(0, k % 4, lambda j, s, b=inner[0]: run_jax(b, *s, i + j, parts), (x, y))
    return x, y


def arguments(seed):
    generator = np.random.default_rng(seed)
    return generator.choice(NUMBERS, SIZE), generator.choice(NUMBERS, (4, 2))


def rewritten(function, args, stop_after="update-in-place", target="cpu:x86-64-v3"):
    options = Options(target=target, stop_after=stop_after, verify_each=True)
    return run_passes(import_raw(fetch(jax.jit(function), args, {}), options=options, platform="cpu"), options)


def flags_of(module):
    """Return the number of branches on flags."""
    return sum("runs_once" in op.attrs for f in module.functions.values() for op in walk(f.body))


def same(got, want):
    for one, other in zip(got, want, strict=True):
        other = np.asarray(other)
        one = np.asarray(one).astype(other.dtype, copy=False)
        np.testing.assert_array_equal(one, other)
        if other.dtype.kind == "f":
            np.testing.assert_array_equal(np.signbit(one)[other == 0], np.signbit(other)[other == 0])


def check(seed, iterations):
    r = random.Random(seed)
    statements = random_statements(r, 2, r.randint(1, 4))
    args = arguments(seed)

    def function(x, parts):
        return lax.fori_loop(0, iterations, lambda i, s: run_jax(statements, *s, i, parts), (x, jnp.int32(0)))

    module = rewritten(function, args)
    x, y = args[0], 0
    with np.errstate(all="ignore"):
        for i in range(iterations):
            x, y = run_numpy(statements, x, y, i, args[1])
        y = np.int64(y).astype(np.int32)
        same(interpret(module, *args), (x, y))
    return flags_of(module)


@pytest.mark.ir
def test_random_loops_keep_the_sign_of_zero():
    assert sum(check(seed, (0, 1, 2, 5)[seed % 4]) for seed in range(60)) > 30


@pytest.mark.slow
@pytest.mark.ir
@pytest.mark.parametrize("begin", range(60, 1060, 100))
def test_many_random_loops_keep_the_sign_of_zero(begin):
    for seed in range(begin, begin + 100):
        check(seed, (0, 1, 2, 5)[seed % 4])


# ---------------------------------------------------------------- whole programs


def gradient_of_carried(x, parts):
    """The gradient begins with an argument's numbers, and an update adds to it."""

    def loss(x):
        return lax.fori_loop(1, 7, lambda i, c: c.at[i].set(jnp.sin(c[i - 1]) * parts[i % 4, 0]), x)

    return jax.vjp(loss, x)[1](jnp.copysign(x, -1.0))[0]


def gradient_of_branch(x, parts):
    def step(i, c):
        return lax.cond(parts[i % 4, 1] > 0, lambda: c.at[i].set(c[i - 1] * parts[i % 4, 0]), lambda: c)

    return jax.vjp(lambda x: lax.fori_loop(1, 7, step, x), x)[1](jnp.copysign(x, -1.0))[0]


def same_place(x, parts):
    """Each iteration adds to the same elements: those with -0.0 and an update of -0.0 stay."""
    zeros = jnp.zeros_like(x)
    return lax.fori_loop(0, 4, lambda i, x: x + lax.dynamic_update_slice(zeros, parts[0], (3,)), x)


def no_iteration(x, parts):
    step = lambda i, x: x + lax.dynamic_update_slice(jnp.zeros_like(x), parts[i % 4], (i,))
    return lax.fori_loop(0, jnp.int32(parts[0, 0] > 9), step, x)


PROGRAMS = [gradient_of_carried, gradient_of_branch, same_place, no_iteration]


def numbers(function):
    x, parts = arguments(3)
    return (x, np.where(np.isfinite(parts), parts, -0.0).astype("f")) if "gradient" not in function.__name__ else (
        np.where(np.isfinite(x), x, 0).astype("f"), np.where(np.isfinite(parts), parts, -0.0).astype("f")
    )  # fmt: skip


@pytest.mark.cpu
@pytest.mark.parametrize("function", PROGRAMS, ids=lambda f: f.__name__)
def test_compiled_loops_keep_the_sign_of_zero(function):
    args = numbers(function)
    assert flags_of(rewritten(function, args)) > 0
    with jax.disable_jit():
        want = function(*args)
    same(aotc.load(aotc.compile(function, *args, verify_each=True)).invoke("main", *args), [want])


@pytest.mark.ir
@pytest.mark.parametrize("function", PROGRAMS, ids=lambda f: f.__name__)
def test_loops_on_a_simulated_gpu_keep_the_sign_of_zero(function):
    check_gpu(function, numbers(function))


@pytest.mark.cuda
@pytest.mark.skipif(bool(driver.missing()), reason="no GPU")
@pytest.mark.parametrize("function", PROGRAMS, ids=lambda f: f.__name__)
def test_loops_on_a_gpu_keep_the_sign_of_zero(function):
    args = numbers(function)
    with jax.disable_jit():
        want = function(*args)
    same(aotc.load(aotc.compile(function, *args, target="cuda")).invoke("main", *args), [want])


@pytest.mark.ir
def test_arrays_without_negative_zeros_need_no_flag():
    """A sum that begins with zeros, and a flag that could never be true."""
    x, parts = arguments(0)
    begins = lambda x, p: lax.fori_loop(
        0, 4, lambda i, c: c + lax.dynamic_update_slice(jnp.zeros_like(c), p[i], (i,)), jnp.zeros_like(x)
    )
    never = lambda x, p: lax.fori_loop(0, 4, lambda i, c: c.at[i].set(p[i, 0]), x)
    for function in (begins, never):
        assert flags_of(rewritten(function, (x, parts))) == 0


# ---------------------------------------------------------------- programs around such sums


def _beside_a_sort(x, g, keys, values):
    added = lax.fori_loop(0, 9, lambda i, w: w + lax.dynamic_update_slice(jnp.zeros_like(w), g, (i,)), x)
    return added, lax.sort((keys, values), num_keys=1)


def _both_results_of_a_branch(p, g, h):
    a, b = lax.cond(p, lambda: (h, jnp.zeros_like(g)), lambda: (jnp.zeros_like(g), g))
    return a + b


def _a_narrow_state_that_counts(x, indices, g):
    """200 iterations leave i8, which is a state before the counter of the loop."""

    def outer(x, row):
        def inner(carry, j):
            t, narrow = carry
            return (lax.dynamic_update_slice(t, g, (j,)), narrow + jnp.int8(1)), None

        (t, _), _ = lax.scan(inner, (jnp.zeros_like(x), jnp.int8(0)), row)
        return x + t, None

    return lax.scan(outer, x, indices)[0]


R = np.random.default_rng(0)
G, H = R.standard_normal((2, 64), "f4")
AROUND = {
    "several results": (
        _beside_a_sort, G, R.standard_normal(8, "f4"), R.integers(0, 99, 16).astype("i4"), R.standard_normal(16, "f4"),
    ),
    "both results": (_both_results_of_a_branch, np.array(True), G, H),
    "the other side": (_both_results_of_a_branch, np.array(False), G, H),
    "a narrow state": (
        _a_narrow_state_that_counts, np.abs(R.standard_normal(1 << 14, "f4")),
        R.integers(0, 1 << 14, (3, 200)).astype("i4"), R.standard_normal(4, "f4"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", AROUND)
def test_programs_around_sums_of_updates_match_eager_jax(name):
    function, *arguments = AROUND[name]
    found = jax.tree.leaves(aotc.load(aotc.compile(function, *arguments))(*arguments))
    with jax.disable_jit():
        expected = jax.tree.leaves(function(*arguments))
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
