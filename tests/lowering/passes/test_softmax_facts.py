"""Maxima of softmax's rows leave NaN to the sums, and its exponentials are known to be at most 1."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.differential import normal

import aotc
from aotc.frontend.importer import import_model
from aotc.ir.loop.ir import Store, walk
from aotc.ir.loop.printer import print_kernel
from aotc.kernels.cpu.compile import optimized_kernel_module
from aotc.lowering.lower import lower
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.targets import TARGETS, resolve_targets

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

TARGET = "cpu:x86-64-v4"
X = normal(9, 37)
ODD = X.copy()
ODD[0, 3], ODD[1, 5], ODD[2, 7], ODD[3], ODD[4] = np.nan, np.inf, -np.inf, -np.inf, np.nan
ODD[5, :2], ODD[6, 1], ODD[7] = (np.inf, np.nan), 90.0, 200.0


def apart(x, i=-1):
    return jnp.exp(x - x.max(i, keepdims=True))


def masked(x):
    """A choice by the maximum itself, which the sum says nothing of."""
    top = x.max(-1, keepdims=True)
    e = jnp.exp(x - top)
    return jnp.where(top > 1, e / e.sum(-1, keepdims=True), 0.0)


BOTH, DECAYS, NUMBERS = {"decay", "max_number"}, {"decay"}, {"max_number"}
CASES = {
    "softmax": (jax.nn.softmax, BOTH),
    "log-softmax": (jax.nn.log_softmax, BOTH),
    "scaled": (lambda x: jax.nn.softmax(x / 3) * 2 + 1, BOTH),
    "masked-input": (lambda x: jax.nn.softmax(jnp.where(x > 0, x, -1e9)), BOTH),
    "logsumexp": (lambda x: jax.nn.logsumexp(x, axis=-1), NUMBERS),
    "exponentials-are-stored": (lambda x: (apart(x), apart(x).sum(-1)), DECAYS),
    "maximum-is-stored": (lambda x: (jax.nn.softmax(x), x.max(-1)), DECAYS),
    "chosen-by-the-maximum": (masked, DECAYS),
    "another-number": (lambda x: jnp.exp(x - x.min(-1, keepdims=True)).sum(-1), set()),
    "only-a-maximum": (lambda x: x.max(-1), set()),
}


def kernels_of(function, x, target=TARGET):
    """Return the kernels of a function."""
    options, (machine,) = Options(target=target), resolve_targets(target)
    return lower(run_passes(import_model(jax.jit(function), x), options), machine, options).kernels


def found(function, x, target=TARGET):
    text = "".join(print_kernel(k) for k in kernels_of(function, x, target))
    return {name for name in BOTH if f"{name}(" in text}


@pytest.mark.parametrize("name", CASES)
def test_analysis_finds_the_facts_of_each_softmax_row(name):
    function, known = CASES[name]
    assert found(function, X) == known
    for x in (X, ODD, normal(3, 1), normal(2, 64) * 100):
        want = jax.tree.leaves(jax.jit(function)(x))
        for got, each in zip(aotc.load(aotc.compile(jax.jit(function), x)).invoke("main", x), want, strict=True):
            np.testing.assert_allclose(got, each, rtol=1e-5, atol=1e-6)


def test_a_rounded_maximum_is_not_a_bound():
    """Exponentials of more than 60 come of elements beside a maximum that was found in fewer bits."""

    def function(x):
        e = jnp.exp(x - x.astype("bfloat16").max(-1, keepdims=True).astype("float32"))
        return e / e.sum(-1, keepdims=True)

    assert "decay" not in found(function, X)
    x = np.full((3, 37), 33_000.0, np.float32)
    x[:, 5] += 70
    got = aotc.load(aotc.compile(jax.jit(function), x))(x)
    np.testing.assert_allclose(got, jax.jit(function)(x), rtol=1e-5)


def test_gpu_softmax_has_no_facts():
    assert found(jax.nn.softmax, X, "cuda:sm_90") == set()


# --- maxima that may miss a NaN: which they are, and that rows with one are NaN ---

MISSING = {
    "softmax": jax.nn.softmax,
    "log_softmax": jax.nn.log_softmax,
    "logsumexp": lambda x: jax.nn.logsumexp(x, -1),
    "masked": lambda x: jax.nn.softmax(jnp.where(x > 0, x, -jnp.inf)),
    "scaled": lambda x: jax.nn.softmax(x * 3 + 1),
    "bf16": lambda x: jax.nn.softmax(x.astype("bfloat16")),
    "cross_entropy": lambda x: -jax.nn.log_softmax(x)[:, 0],
}
FINDING = {
    "max": lambda x: x.max(-1),
    "beside": lambda x: (jax.nn.softmax(x), x.max(-1)),
    "columns": lambda x: jax.nn.softmax(x, 0),  # its sums are another kernel's
    "exponentials": lambda x: jnp.exp(x - x.max(-1, keepdims=True)),
    "difference": lambda x: x - x.max(-1, keepdims=True),
    "other rows": lambda x: jax.nn.softmax(x) + x.max(-1)[::-1, None],
    "sum of others": lambda x: (e := jnp.exp(x - x.max(-1, keepdims=True))) / e[:, 1:].sum(-1, keepdims=True),
    "selected": lambda x: jnp.where(jnp.isnan(s := jax.nn.softmax(x)), x.max(-1, keepdims=True), s),
    "least": lambda x: jnp.exp(x.min(-1, keepdims=True) - x),
}
SHAPES = [(5, 3), (7, 513), (64, 64), (4, 4096)]


def combiners(function, shape):
    """Return the functions by which reductions of a function combine floats, but for sums."""
    kernels = kernels_of(function, np.zeros(shape, np.float32))
    stores = [s for kernel in kernels for s in walk(kernel.body) if isinstance(s, Store)]
    return {s.reduce for s in stores if s.buffer.dtype in ("f32", "bf16")} - {"", "add"}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", MISSING)
def test_maxima_read_only_by_softmax_ignore_nan(name, shape):
    assert combiners(MISSING[name], shape) == {"max_number"}


@pytest.mark.parametrize("name", FINDING)
def test_maxima_with_other_readers_propagate_nan(name):
    found = combiners(FINDING[name], (64, 64))
    assert found & {"max", "min"}
    assert "max_number" not in found


def rows(shape, dtype):
    """Rows with a NaN of either sign, of nothing but -inf, and with inf."""
    x = np.random.default_rng(0).normal(size=shape).astype(dtype)
    x[0, 1], x[-1, -1] = np.nan, -np.nan
    x[1], x[2, 0] = -np.inf, np.inf
    return x


def exponentials(x):
    return np.exp(x - x.max(-1, keepdims=True))


def shares(x):
    return exponentials(x) / exponentials(x).sum(-1, keepdims=True)


def logsumexp(x):
    most = np.where(np.isinf(x.max(-1)), 0, x.max(-1))
    return np.log(np.exp(x - most[:, None]).sum(-1)) + most


WANTED = {
    "softmax": shares,
    "columns": lambda x: shares(x.T).T,
    "log_softmax": lambda x: x - x.max(-1, keepdims=True) - np.log(exponentials(x).sum(-1, keepdims=True)),
    "logsumexp": logsumexp,
    "masked": lambda x: shares(np.where(x > 0, x, -np.inf)),
    "beside": lambda x: (shares(x), x.max(-1)),
    "exponentials": exponentials,
}


@pytest.mark.parametrize("level", [0, 2])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", WANTED)
def test_softmax_rows_with_a_nan_are_nan(name, shape, level):
    """Beside NumPy's float64, for XLA's own maximum of a row loses some."""
    function, x = (MISSING | FINDING)[name], rows(shape, np.float32)
    got = aotc.load(aotc.compile(jax.jit(function), x, opt_level=level), threads=2)(x)
    with np.errstate(all="ignore"):
        want = WANTED[name](x.astype(np.float64))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_a_maximum_that_ignores_nan_is_one_instruction():
    kernels = kernels_of(jax.nn.softmax, np.zeros((64, 4096), np.float32))
    text = "\n".join(str(optimized_kernel_module(kernel, TARGETS[TARGET])) for kernel in kernels)
    assert "call nnan nsz <16 x float> @llvm.maxnum.v16f32" in text
    assert "@llvm.maximum.v16f32" not in text
    assert "@llvm.arithmetic.fence.f32" in text
