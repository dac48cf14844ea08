"""Maxima that may miss a NaN, since what is made of them is NaN all the same: which they are, and that it is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aotc
from aotc.frontend.importer import import_model
from aotc.ir.loop_ir import Store, walk
from aotc.kernels.cpu.compile import optimized_module
from aotc.lowering.lower import lower
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.targets import TARGETS

pytestmark = [pytest.mark.cpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


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


def combiners(function, shape, target="cpu:x86-64-v4"):
    """Return the functions by which reductions of a function combine floats, and the kernels."""
    options = Options(target=target)
    types = jax.ShapeDtypeStruct(shape, "float32")
    exported = jax.export.export(jax.jit(function), platforms=["cpu"])(types)
    kernels = lower(run_passes(import_model(exported), options), TARGETS[target], options).kernels
    stores = [s for kernel in kernels for s in walk(kernel.body) if isinstance(s, Store)]
    return {s.reduce for s in stores if s.buffer.dtype in ("f32", "bf16")} - {"", "add"}, kernels


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", MISSING)
def test_which_maxima_may_miss_nan(name, shape):
    assert combiners(MISSING[name], shape)[0] == {"max_number"}


@pytest.mark.parametrize("name", FINDING)
def test_which_maxima_find_nan(name):
    assert combiners(FINDING[name], (64, 64))[0] & {"max", "min"}
    assert "max_number" not in combiners(FINDING[name], (64, 64))[0]


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
def test_rows_with_a_nan_are_nan(name, shape, level):
    """Beside NumPy's float64, for XLA's own maximum of a row loses some."""
    function, x = (MISSING | FINDING)[name], rows(shape, np.float32)
    got = aotc.load(aotc.compile(jax.jit(function), x, opt_level=level), threads=2)(x)
    with np.errstate(all="ignore"):
        want = WANTED[name](x.astype(np.float64))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_a_maximum_that_may_miss_nan_is_one_instruction():
    _, kernels = combiners(jax.nn.softmax, (64, 4096))
    text = "\n".join(str(optimized_module(kernel, TARGETS["cpu:x86-64-v4"])) for kernel in kernels)
    assert "call nnan nsz <16 x float> @llvm.maxnum.v16f32" in text
    assert "@llvm.maximum.v16f32" not in text
    assert "@llvm.arithmetic.fence.f32" in text
