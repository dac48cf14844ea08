"""Attention on a CPU that reads slices of larger arrays: one layer of a cache of all layers is not copied first."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.differential import LEVELS, check, normal

import aotc
from aotc.vmfb.bundle import open_bundle

pytestmark = [pytest.mark.cpu]
LAYERS, BATCH, HEADS, KEYS, DEPTH = 3, 2, 4, 160, 32


def attend(q, k, v, at):
    """Attention of ``q`` [b, h, t, d] over the keys up to ``at``; several queries may share a head of keys."""
    b, _, t, d = q.shape
    s = jnp.einsum("bngtd,bnsd->bngts", q.reshape(b, k.shape[1], -1, t, d), k) / np.sqrt(d).astype(q.dtype)
    s = jnp.where(jnp.arange(k.shape[2]) <= at, s, -1e30)
    return jnp.einsum("bngts,bnsd->bngtd", jax.nn.softmax(s, axis=-1), v).reshape(q.shape)


def carried(x, keys, values, at):
    """A decoding step whose caches are carried."""

    def layer(carry, i):
        x, keys, values = carry
        keys = lax.dynamic_update_slice(keys, jnp.sin(x)[None, :, : keys.shape[2]], (i, 0, 0, at, 0))
        values = lax.dynamic_update_slice(values, jnp.cos(x)[None, :, : keys.shape[2]], (i, 0, 0, at, 0))
        k, v = (lax.dynamic_index_in_dim(c, i, keepdims=False) for c in (keys, values))
        return (x + attend(x, k, v, at), keys, values), None

    return lax.scan(layer, (x, keys, values), jnp.arange(keys.shape[0]))[0]


def stacked(x, keys, values, at):
    """The same with caches that are scanned over and stacked again."""

    def layer(x, cache):
        k, v = cache
        k = lax.dynamic_update_slice(k, jnp.sin(x)[:, : k.shape[1]], (0, 0, at, 0))
        v = lax.dynamic_update_slice(v, jnp.cos(x)[:, : k.shape[1]], (0, 0, at, 0))
        return x + attend(x, k, v, at), (k, v)

    return lax.scan(layer, x, (keys, values))


def read_only(x, keys, values, at):
    """Caches that a loop does not change, indexed from behind, beyond both ends too."""

    def layer(i, x):
        return x + attend(x, keys[-i], lax.dynamic_index_in_dim(values, i - 2, keepdims=False), at)

    return lax.fori_loop(0, keys.shape[0] + 1, layer, x)


def window(x, keys, values, at):
    """The last keys before a place, of one layer."""
    k, v = (lax.dynamic_slice(c[1], (0, 0, at - 48, 0), (*c.shape[1:3], 144, c.shape[4])) for c in (keys, values))
    return attend(x, k, v, 130)


def sizes(dtype="float32", rows=1, heads=HEADS, keys=KEYS):
    """Return arguments; ``heads`` are those of the keys."""
    cache = (LAYERS, BATCH, heads, keys, DEPTH)
    some = [normal(BATCH, HEADS, rows, DEPTH), normal(*cache, seed=1), normal(*cache, seed=2)]
    return [x.astype(dtype) for x in some]


PROGRAMS = {f.__name__: f for f in (carried, stacked, read_only, window)}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("name", PROGRAMS)
def test_attention_on_slices_of_a_cache_matches_jax(name, rows, level):
    check(PROGRAMS[name], [*sizes(rows=rows), np.int32(100)], level, factor=10)


@pytest.mark.parametrize("at", [-7, 0, KEYS - 1, KEYS + 9])
@pytest.mark.parametrize("name", PROGRAMS)
def test_slice_indices_beyond_the_ends_are_clamped(name, at):
    check(PROGRAMS[name], [*sizes(), np.int32(at)], 2, factor=10)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_attention_on_slices_of_each_dtype_and_head_grouping_matches_jax(heads, dtype):
    with jax.enable_x64(dtype == "float64"):
        check(read_only, [*sizes(dtype, heads=heads), np.int32(77)], 2, factor=10)


def large_buffers(data, least):
    """Return the buffers of a bundle's arena of ``least`` bytes or more, by the kernel that fills them."""
    kernels = open_bundle(data).manifest["variants"][0]["kernels"]
    return [k["name"] for k in kernels if "slice" in k["name"] and "update" not in k["name"]] + [
        name for name, size in memory_of(data).items() if size >= least
    ]


def memory_of(data):
    return {"arena": open_bundle(data).manifest["variants"][0]["memory"]["main"]["arena"]}


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_layer_of_the_cache_is_copied(name, rows):
    """A layer's keys take ``layer`` bytes: no buffer of a call, and all of them together, are as large."""
    args = [*sizes(rows=rows, keys=1024), np.int32(100)]
    layer = args[1][0].nbytes
    donated = (1, 2) if name in ("carried", "stacked") else ()
    data = aotc.compile(jax.jit(PROGRAMS[name], donate_argnums=donated), *args, verify_each=True)
    assert large_buffers(data, layer) == []


def test_attention_on_slices_of_symbolic_sizes_matches_jax():
    b, s = jax.export.symbolic_shape("b, s")
    shapes = [(b, HEADS, 1, DEPTH), *[(LAYERS, b, HEADS, s, DEPTH)] * 2, ()]
    types = [jax.ShapeDtypeStruct(x, t) for x, t in zip(shapes, ["f4", "f4", "f4", "i4"])]
    module = aotc.load(aotc.compile(jax.export.export(jax.jit(carried))(*types), verify_each=True))
    for keys in (5, 300):
        args = [*sizes(keys=keys), np.int32(4)]
        for got, want in zip(module.invoke("main", *args), jax.jit(carried)(*args), strict=True):
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def also_a_result(x, keys, values, i):
    k, v = (lax.dynamic_index_in_dim(c, i, keepdims=False) for c in (keys, values))
    return attend(x, k, v, 100), v


def overwritten_before(x, keys, values, i):
    """The cache is cleared between the slice and attention: what is attended is older."""
    k, v = (lax.dynamic_index_in_dim(c, i, keepdims=False) for c in (keys, values))
    cleared = lax.dynamic_update_slice(keys, jnp.zeros_like(keys[:1]), (i, 0, 0, 0, 0))
    x = x + lax.dynamic_index_in_dim(cleared, i, keepdims=False)[:, :, :1]
    return attend(x, k, v, 100), cleared


def overwritten_by_a_loop(x, keys, values, i):
    k, v = (lax.dynamic_index_in_dim(c, i, keepdims=False) for c in (keys, values))
    cleared = lax.fori_loop(0, 2, lambda n, c: c.at[n].multiply(0.5), keys)
    return attend(x + cleared[0, :, :, :1], k, v, 100), cleared


def overwritten_in_a_branch(x, keys, values, i):
    k, v = (lax.dynamic_index_in_dim(c, i, keepdims=False) for c in (keys, values))
    cleared = lax.cond(i > 0, lambda: keys.at[i].set(1.0), lambda: keys)
    return attend(x + cleared[0, :, :, :1], k, v, 100), cleared


KEPT = {f.__name__: f for f in (also_a_result, overwritten_before, overwritten_by_a_loop, overwritten_in_a_branch)}


@pytest.mark.parametrize("donated", [(), (1,)])
@pytest.mark.parametrize("name", KEPT)
def test_overwritten_slices_are_copied(name, donated):
    args = [*sizes(), np.int32(1)]
    want = jax.jit(KEPT[name])(*args)
    data = aotc.compile(jax.jit(KEPT[name], donate_argnums=donated), *args, verify_each=True)
    got = aotc.load(data).invoke("main", *[x.copy() for x in args])
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
    if donated and name != "also_a_result":  # the array is overwritten in place
        assert memory_of(data)["arena"] < 2 * args[1].nbytes


def test_short_lines_are_gathered_once():
    """Eight numbers of a line are an eighth of what memory delivers with them."""

    def function(x, keys, values, at):
        k, v = (lax.dynamic_slice(c, (0, 0, 0, at), (*c.shape[:3], 8)) for c in (keys, values))
        return attend(x, k, v, 100)

    args = [normal(2, 4, 1, 8), normal(2, 4, 160, 64, seed=1), normal(2, 4, 160, 64, seed=2), np.int32(16)]
    check(function, args, 2, factor=10)
    data = aotc.compile(jax.jit(function), *args)
    assert any("slice" in k["name"] for k in open_bundle(data).manifest["variants"][0]["kernels"])
