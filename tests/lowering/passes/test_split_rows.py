"""Rows that no worker can keep are read in parts: with the numbers of whole rows, where that is cheaper."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.differential import close, normal

import aotc
from aotc.frontend.importer import import_raw
from aotc.frontend.mlir import fetch
from aotc.ir.semantics.run import interpret
from aotc.ir.semantics.verify import verify
from aotc.ir.tensor.ir import walk
from aotc.lowering.passes.canonicalize.canonicalize import canonicalize
from aotc.lowering.passes.inline import inline
from aotc.lowering.passes.split_rows import long_row_splits_of, split_rows
from aotc.options import Options
from aotc.vmfb.dtypes import to_numpy

GPU = "cuda:sm_90"
LONG = 1 << 17
INF = np.float32(np.inf)


def layer_norm(x):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def attention_like(x):
    """A softmax of a softmax, of both trailing dims."""
    return jax.nn.softmax(jax.nn.softmax(x, axis=(1, 2)) * 3, axis=(1, 2))


FUNCTIONS = {
    "softmax": jax.nn.softmax,
    "log_softmax": jax.nn.log_softmax,
    "logsumexp": lambda x: jax.nn.logsumexp(x, -1),
    "plain": lambda x: jnp.exp(x - x.max(-1, keepdims=True)).sum(-1),
    "variance": lambda x: x.var(-1),
    "layer_norm": layer_norm,
}


def imported(function, *arguments, **flags):
    options = Options(**{"target": GPU, **flags})
    module = import_raw(fetch(jax.jit(function), arguments, {}), options=options)
    return canonicalize(inline(module, options), options), options


def in_parts(function, *arguments, **flags):
    """The results of a function whose rows are read in parts, which at least one is."""
    before, options = imported(function, *arguments, **flags)
    (main,) = before.functions.values()
    assert any(form.part for form in long_row_splits_of(main.body, options))
    after = split_rows(before, options)
    verify(after)
    count = [sum(op.name == "reduce" for f in m.functions.values() for op in walk(f.body)) for m in (before, after)]
    assert count[1] > count[0]
    return interpret(after, *arguments)


@pytest.mark.ir
@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16", "f16"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_split_rows_match_whole_rows(name, dtype):
    x = (3 * normal(2, LONG) + 100).astype(to_numpy(dtype))
    wide = x.astype(np.float64)
    with jax.enable_x64(True):
        want = np.asarray(jax.jit(FUNCTIONS[name])(jnp.asarray(wide)))
    with jax.enable_x64(dtype == "f64"):
        (got,) = in_parts(FUNCTIONS[name], x)
    # a bfloat16 is rounded where JAX rounds, before and after each step
    tolerance = {"f64": 1e-12, "f32": 2e-5, "f16": 2e-2, "bf16": 2e-1}[dtype]
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=tolerance, atol=tolerance * np.abs(want).max())


@pytest.mark.ir
@pytest.mark.parametrize("name", ["softmax", "logsumexp", "plain"])
def test_split_rows_with_infinities_match_jax(name):
    """A part of lowest values, a row of them, one with a largest value, one with no number."""
    x = normal(5, LONG) - 1000
    x[0, :5000], x[1], x[2, 7], x[3, 9], x[4, ::2] = -INF, -INF, INF, np.nan, -INF
    want = np.asarray(jax.jit(FUNCTIONS[name])(x))
    (got,) = in_parts(FUNCTIONS[name], x)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-9)


@pytest.mark.ir
def test_split_variance_far_from_zero_is_accurate():
    """Numbers whose squares would cancel: the sums are of what is left over the mean."""
    x = (normal(3, LONG).astype(np.float64) + 1e4).astype(np.float32)
    (got,) = in_parts(FUNCTIONS["variance"], x)
    np.testing.assert_allclose(got, x.astype(np.float64).var(-1), rtol=1e-3)


@pytest.mark.ir
def test_split_rows_over_several_dims_match_jax():
    x = normal(2, 256, 512)
    (got,) = in_parts(attention_like, x)
    np.testing.assert_allclose(got, np.asarray(jax.jit(attention_like)(x)), rtol=1e-5, atol=1e-9)


def form(function, shape, dtype="float32", **flags):
    before, options = imported(function, jax.ShapeDtypeStruct(shape, dtype), **flags)
    (main,) = before.functions.values()
    return [(f.part, f.reason) for f in long_row_splits_of(main.body, options)]


@pytest.mark.ir
def test_rows_beyond_shared_memory_are_split():
    ((part, reason),) = form(jax.nn.softmax, (256, LONG))
    assert (part, reason[:66]) == (4096, "524,288 bytes of a row > 231,936 bytes of shared memory: read in p")
    assert form(jax.nn.softmax, (256, 40_960)) == []  # shared memory holds it
    assert form(jax.nn.softmax, (256, 32_768), shared_memory_limit=4096) == []  # registers hold it
    ((part, reason),) = form(jax.nn.softmax, (256, 40_960), shared_memory_limit=4096)
    assert (part, reason[:56]) == (4096, "163,840 bytes of a row > 131,072 bytes of registers: rea")
    ((part, reason),) = form(FUNCTIONS["variance"], (256, LONG))
    assert (part, reason.endswith("its blocks' rows are read again from a cache")) == (0, True)
    ((part, reason),) = form(jax.nn.softmax, (256, 131_071))
    assert (part, "no part of 512 to 4096 elements divides them" in reason) == (0, True)
    assert form(jax.nn.softmax, (256, LONG), opt_level=1) == []


@pytest.mark.ir
def test_exp_is_recomputed_if_memory_costs_more():
    """Of a core, where the row lies in memory and its vectors are wide; not from a cache, nor with narrow vectors."""
    v4 = form(jax.nn.softmax, (1, 1 << 22), target="cpu:x86-64-v4")
    v2 = form(jax.nn.softmax, (1, 1 << 22), target="cpu:x86-64-v2")
    near = form(jax.nn.softmax, (1, LONG), target="cpu:x86-64-v4")
    assert [rows[0][0] for rows in (v4, v2, near)] == [1 << 15, 0, 0]
    assert "but exp again takes" in v2[0][1]
    for name in ("logsumexp", "log_softmax", "variance"):  # which need it once
        assert form(FUNCTIONS[name], (1, LONG), target="cpu:x86-64-v2")[0][0] == 1 << 13
        assert form(FUNCTIONS[name], (64, LONG), target="cpu:x86-64-v2") == []  # enough rows for all cores


@pytest.mark.cpu
@pytest.mark.parametrize("name", ["logsumexp", "layer_norm"])
def test_compiled_split_rows_match_jax(name):
    x = 3 * normal(2, LONG) + 1
    module = aotc.load(aotc.compile(jax.jit(FUNCTIONS[name]), x, verify_each=True), threads=2)
    close([module(x)], [jax.jit(FUNCTIONS[name])(x)], factor=40)
