"""A step of a decoder on a GPU whose caches are donated: no command copies a cache, only new rows are written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.gpu_traffic import copies, kernels, nbytes_of

from aotc.frontend.importer import import_raw
from aotc.frontend.mlir import fetch
from aotc.lowering.lower import lower
from aotc.pipeline import checked_options, run_passes
from aotc.targets import resolve_targets

pytestmark = pytest.mark.ir

GPU = "cuda:sm_90a"
LAYERS, HEADS, SHARED, WIDTH, LENGTH = 3, 8, 2, 64, 128
ZERO = np.int32(0)


def projections(x, w):
    """Return the query, the new key and the new value of each sequence."""
    heads = (HEADS, SHARED, SHARED)
    return ((x @ m).reshape(x.shape[0], 1, n, WIDTH) for m, n in zip(w[:3], heads, strict=True))


def attend(x, w, q, k, v, seen):
    return x + jax.nn.dot_product_attention(q, k, v, mask=seen).reshape(x.shape) @ w[3]


def layer(x, w, k, v, at):
    q, new_k, new_v = projections(x, w)
    k, v = (lax.dynamic_update_slice(c, n.astype(c.dtype), (ZERO, at, ZERO, ZERO)) for c, n in ((k, new_k), (v, new_v)))
    return attend(x, w, q, k.astype(x.dtype), v.astype(x.dtype), (jnp.arange(LENGTH) <= at)[None, None, None]), k, v


def unrolled(x, w, ks, vs, at):
    """A cache for each layer."""
    ks, vs = list(ks), list(vs)
    for n in range(LAYERS):
        x, ks[n], vs[n] = layer(x, [m[n] for m in w], ks[n], vs[n], at)
    return x, ks, vs


def scanned(x, w, ks, vs, at):
    """Stacked caches as inputs and outputs of a scan."""

    def step(x, each):
        x, k, v = layer(x, each[0], *each[1:], at)
        return x, (k, v)

    x, (ks, vs) = lax.scan(step, x, (w, ks, vs))
    return x, ks, vs


def carried(x, w, ks, vs, at):
    """Stacked caches that a scan carries."""

    def step(carry, each):
        (x, *caches), (w, n) = carry, each
        q, *new = projections(x, w)
        pairs = zip(caches, new, strict=True)
        caches = [lax.dynamic_update_slice(c, m[None].astype(c.dtype), (n, ZERO, at, ZERO, ZERO)) for c, m in pairs]
        k, v = (lax.dynamic_index_in_dim(c, n, 0, keepdims=False).astype(x.dtype) for c in caches)
        return (attend(x, w, q, k, v, (jnp.arange(LENGTH) <= at)[None, None, None]), *caches), None

    return lax.scan(step, (x, ks, vs), (w, jnp.arange(LAYERS)))[0]


def by_rows(x, w, ks, vs, at):
    """A position for each sequence."""
    q, *new = projections(x, [m[0] for m in w])
    rows = jnp.arange(x.shape[0])
    pairs = zip((ks, vs), new, strict=True)
    k, v = (c.at[rows, at].set(n[:, 0].astype(c.dtype)) for c, n in pairs)
    seen = (jnp.arange(LENGTH)[None] <= at[:, None])[:, None, None]
    return attend(x, [m[0] for m in w], q, k.astype(x.dtype), v.astype(x.dtype), seen), k, v


def lowered(model, batch, dtype, cache, **flags):
    """Return the program of a step; ``cache``: a cache for each layer, a stack of them, or one."""
    shape = (batch, LENGTH, SHARED, WIDTH)
    one = jax.ShapeDtypeStruct(shape, dtype)
    caches = {"each": [one] * LAYERS, "stack": jax.ShapeDtypeStruct((LAYERS, *shape), dtype), "one": one}[cache]
    width, shared = HEADS * WIDTH, SHARED * WIDTH
    sizes = ((width, width), (width, shared), (width, shared), (width, width))
    weights = [jax.ShapeDtypeStruct((LAYERS, *s), jnp.bfloat16) for s in sizes]
    x = jax.ShapeDtypeStruct((batch, width), jnp.bfloat16)
    at = jax.ShapeDtypeStruct((batch,) if model is by_rows else (), jnp.int32)
    donated = jax.jit(model, donate_argnums=(2, 3))
    options = checked_options(None, {"target": GPU, "source": False, **flags})
    module = run_passes(import_raw(fetch(donated, (x, weights, caches, caches, at), {}), options=options), options)
    (function,) = (f for f in module.functions.values() if f.public)
    return lower(module, resolve_targets(GPU)[0], options).steps[function.name]


# Kernels that copy the layer's keys and values in each iteration: attention reads addresses that are known when the
# graph of the loop is recorded (decision 263).
SLICES = {unrolled: 0, by_rows: 0, scanned: 2, carried: 2}


@pytest.mark.parametrize("batch", [8, 32])
@pytest.mark.parametrize(
    ("model", "cache"), [(unrolled, "each"), (scanned, "stack"), (carried, "stack"), (by_rows, "one")]
)
def test_no_kernel_copies_a_cache_but_slices_of_a_scan(model, cache, batch):
    program = lowered(model, batch, jnp.bfloat16, cache)
    size = batch * LENGTH * SHARED * WIDTH * 2
    sizes = {size, LAYERS * size}  # of a cache and of a stack of caches: no weights are as large
    moving = [
        kernel for kernel in kernels(program)
        if all(any(nbytes_of(x) in sizes for x in buffers) for buffers in (kernel.inputs, kernel.outputs))
    ]  # fmt: skip
    assert len(moving) == SLICES[model]
    assert all("dynamic_slice" in kernel.name for kernel in moving)
    assert all(nbytes_of(buffer) == size for kernel in moving for buffer in kernel.outputs)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("batch", [8, 32])
@pytest.mark.parametrize(
    ("model", "cache"), [(unrolled, "each"), (scanned, "stack"), (carried, "stack"), (by_rows, "one")]
)
def test_no_command_copies_a_cache(model, cache, batch, dtype):
    program = lowered(model, batch, dtype, cache)
    size = batch * LENGTH * SHARED * WIDTH * np.dtype(dtype).itemsize
    assert all(n < size // 8 for n in copies(program))
