"""Bytes of weights that a call reads, bound and as constants, beside the bytes of the weights as they are stored."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.gpu_traffic import nbytes, written

from aotc.frontend.importer import import_raw
from aotc.frontend.mlir import fetch
from aotc.ir.tensor.ir import walk
from aotc.pipeline import checked_options, run_passes

pytestmark = pytest.mark.ir

GPU, CPU = "cuda:sm_90a", "cpu:x86-64-v3"
WIDTH, WORDS = 256, 700
BF16, F32, I8, I4, I32 = jnp.bfloat16, jnp.float32, jnp.int8, jnp.int4, jnp.int32


def linear(w, x):
    return x @ w["a"]


def converted(w, x):
    return x @ w["a"].astype(x.dtype)


def transposed(w, x):
    return x @ w["a"].T.astype(x.dtype)


def swiglu(w, x):
    return jax.nn.silu(x @ w["a"].astype(x.dtype)) * (x @ w["b"].astype(x.dtype))


def attention(w, x):
    q, k, v = ((x @ w[n]).reshape(1, x.shape[0], 4, WIDTH // 4) for n in "abc")
    return jax.nn.dot_product_attention(q, k, v).reshape(x.shape) @ w["d"]


def conv(w, x):
    dims = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, w["a"].astype(x.dtype), (1, 1), "SAME", dimension_numbers=dims)


def embedding(w, x):
    return w["table"].astype(F32)[x]


def tied(w, x):
    h = w["table"].astype(F32)[x]
    return h @ w["table"].astype(F32).T


def scaled(w, x):
    return x @ (w["a"].astype(x.dtype) * w["scale"])


def scaled_after(w, x):
    return (x @ w["a"].astype(x.dtype)) * w["scale"]


def scaled_runs(w, x):
    runs = w["a"].reshape(*w["runs"].shape[:1], -1, WIDTH).astype(x.dtype) * w["runs"][:, None]
    return x @ runs.reshape(WIDTH, WIDTH)


def elementwise(w, x):
    return x * w["a"].astype(x.dtype)


def layers(w, x):
    return jax.lax.scan(lambda c, m: (jnp.tanh(c @ m.astype(c.dtype)), None), x, w["stack"])[0]


def square(dtype, names="a"):
    return dict.fromkeys(names, ((WIDTH, WIDTH), dtype))


def rows(count, dtype):
    return (count, WIDTH), dtype


SCALE, RUNS = {"scale": ((1, WIDTH), BF16)}, {"runs": ((WIDTH // 64, WIDTH), BF16)}
TABLE = {"table": ((WORDS, WIDTH), BF16)}
# of each: the function, its weights, its argument, and by how much panels of a CPU exceed the weights
PROGRAMS = {
    **{f"linear, {m}": (linear, square(BF16), rows(m, BF16), 1.1) for m in (1, 8, 64)},
    **{f"f32 rows, {m}": (converted, square(BF16), rows(m, F32), 1.1) for m in (1, 8, 64)},
    **{f"f16, {m}": (converted, square(jnp.float16), rows(m, F32), 1.1) for m in (1, 8)},
    **{f"turned, {m}": (transposed, square(BF16), rows(m, F32), 1.1) for m in (1, 8)},
    **{f"swiglu, {m}": (swiglu, square(BF16, "ab"), rows(m, BF16), 1.1) for m in (1, 8)},
    **{f"swiglu of f32 rows, {m}": (swiglu, square(BF16, "ab"), rows(m, F32), 1.1) for m in (1, 8)},
    **{f"attention, {m}": (attention, square(BF16, "abcd"), rows(m, BF16), 1.1) for m in (1, 40)},
    "convolution": (conv, {"a": ((3, 3, 64, 64), BF16)}, ((1, 16, 16, 64), BF16), 1.1),
    "embedding": (embedding, TABLE, ((8,), I32), 1),
    "tied embedding": (tied, TABLE, ((8,), I32), 2.1),
    **{f"i8, {m}": (scaled, square(I8) | SCALE, rows(m, BF16), 2.1) for m in (1, 8, 64)},
    **{f"i8, scaled after, {m}": (scaled_after, square(I8) | SCALE, rows(m, BF16), 2.1) for m in (1, 8)},
    **{f"i8 with runs, {m}": (scaled_runs, square(I8) | RUNS, rows(m, BF16), 2.1) for m in (1, 8)},
    **{f"i4 with runs, {m}": (scaled_runs, square(I4) | RUNS, rows(m, BF16), 2.1) for m in (1, 8)},
    "elementwise": (elementwise, square(BF16), rows(WIDTH, F32), 1),
    **{f"layers, {m}": (layers, {"stack": ((3, WIDTH, WIDTH), BF16)}, rows(m, F32), 1.1) for m in (1, 8)},
}
# a copy made once is cheaper than one for each call, where tiles cannot widen what they load
COPIED = {
    "f32 rows, 256": (converted, square(BF16), rows(256, F32)),
    "i8, 128": (scaled, square(I8) | SCALE, rows(128, BF16)),
    "convolution of f32": (conv, {"a": ((3, 3, 64, 64), BF16)}, ((1, 16, 16, 64), F32)),
}


def types_of(weights, argument):
    return {n: jax.ShapeDtypeStruct(*w) for n, w in weights.items()}, jax.ShapeDtypeStruct(*argument)


def passed(model, args, **flags):
    options = checked_options(None, {"source": False, **flags})
    module = run_passes(import_raw(fetch(jax.jit(model), args, {}), options=options), options)
    return [f for f in module.functions.values() if f.public]


def bound_bytes(function, weights, argument, target):
    """Return the bytes that a call reads of bound weights, what it is made of, and what kernels of it write."""
    types, x = types_of(weights, argument)
    functions = passed(function, (types, x), target=target, bind=("w",))
    stored = sum(map(nbytes, functions[0].body.params[:-1]))
    call = next((f for f in functions if "takes" in f.attrs), functions[0])
    read = sum(nbytes(v) for v in call.body.params if v.name != functions[0].body.params[-1].name)
    return read, stored, written(call)


def constant_bytes(function, weights, argument, target):
    """Return the same of weights that are constants of the model."""
    types, x = types_of(weights, argument)
    random = np.random.default_rng(0)
    values = {n: jnp.asarray(random.integers(-7, 7, t.shape), t.dtype) for n, t in types.items()}
    (call,) = passed(lambda x: function(values, x), (x,), target=target)
    constants = {id(op.attrs["value"]): op for op in walk(call.body) if op.name == "constant"}
    read = sum(nbytes(op.result) for op in constants.values() if op.attrs["value"].ndim)
    stored = sum(int(np.prod(t.shape)) * np.dtype(t.dtype).itemsize for t in types.values())
    return read, stored, written(call)


@pytest.mark.parametrize("count", [bound_bytes, constant_bytes])
@pytest.mark.parametrize("target", [GPU, CPU])
@pytest.mark.parametrize("name", PROGRAMS)
def test_calls_read_no_more_bytes_than_the_stored_weights(name, target, count):
    """A GPU reads them as they are; a CPU's panels of integers that a model scales are of its type.

    A constant table that is gathered from and multiplied is there as it is, and transposed.
    """
    function, weights, argument, panels = PROGRAMS[name]
    read, stored, _ = count(function, weights, argument, target)
    twice = name == "tied embedding" and count is constant_bytes
    assert read <= (1.01 if target == GPU and not twice else panels) * stored


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_call_writes_wide_weights(name):
    """What is left to readers is computed by them, not written by each call."""
    function, weights, argument, _ = PROGRAMS[name]
    for count in (bound_bytes, constant_bytes):
        _, stored, more = count(function, weights, argument, GPU)
        results = 4 * int(np.prod(argument[0])) * 24
        assert more <= max(results, stored // 2)


@pytest.mark.parametrize("name", COPIED)
def test_a_wide_copy_of_weights_is_made_once(name):
    for count in (bound_bytes, constant_bytes):
        read, stored, _ = count(*COPIED[name], GPU)
        assert 1.9 * stored <= read <= 2.01 * stored
