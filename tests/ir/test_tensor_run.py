"""The reference interpreter against XLA, over functions that cover the ops; text round-trip and verifier on each."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from aotc.frontend.importer import import_model
from aotc.ir.opset.control import AssertionFailed
from aotc.ir.semantics.run import OperandError, interpret
from aotc.ir.semantics.verify import verify
from aotc.ir.tensor.text import parse_module, print_module

pytestmark = pytest.mark.ir
RNG = np.random.default_rng(0)


def f(*shape, dtype=np.float32):
    return RNG.standard_normal(shape).astype(dtype)


def positive(*shape):
    return RNG.uniform(0.2, 2.0, shape).astype(np.float32)


def unit(*shape):
    return RNG.uniform(-0.9, 0.9, shape).astype(np.float32)


def i(*shape, low=-9, high=9, dtype=np.int32):
    return RNG.integers(low, high, shape).astype(dtype)


def cx(*shape):
    return (RNG.standard_normal(shape) + 1j * RNG.standard_normal(shape)).astype(np.complex64)


def spd(n):
    a = f(n, n)
    return a @ a.T + n * np.eye(n, dtype=np.float32)


SPECIAL = np.array([0.0, -0.0, 1.5, -2.5, np.inf, -np.inf, np.nan, 1e-30, 3e38, 0.5, -0.5], np.float32)


def unary(name, make=f):
    return pytest.param(getattr(jnp, name, None) or getattr(lax, name), (make(3, 5),), id=name)


ELEMENTWISE = [
    *(
        unary(n)
        for n in ("sin", "cos", "tan", "tanh", "exp", "expm1", "floor", "ceil", "negative", "abs", "sign", "cbrt")
    ),
    *(unary(n, positive) for n in ("log", "log1p", "sqrt", "rsqrt")),
    *(unary(n, unit) for n in ("arcsin", "arccos", "arctan", "arctanh", "erf_inv")),
    *(unary(n) for n in ("sinh", "cosh", "arcsinh", "erf", "erfc", "logistic", "isfinite", "round")),
    unary("digamma", positive),
    unary("lgamma", positive),
    pytest.param(
        lambda x: (jnp.isinf(x), jnp.isnan(x), jnp.sign(x), jnp.floor(x), jnp.round(x)), (SPECIAL,), id="special"
    ),
    pytest.param(lambda x: x.astype(jnp.int32), (SPECIAL,), id="saturate"),
    pytest.param(lambda x: x.astype(jnp.uint8), (SPECIAL,), id="saturate-u8"),
    pytest.param(lambda x, y: (jnp.maximum(x, y), jnp.minimum(x, y)), (SPECIAL, SPECIAL[::-1].copy()), id="nan-max"),
    pytest.param(
        lambda x, y: (x + y, x - y, x * y, x / y, jnp.arctan2(x, y), x > y, x != y), (f(4), f(4)), id="binary"
    ),
    pytest.param(lambda x, y: x**y, (positive(4), f(4)), id="pow"),
    pytest.param(lambda x, y: (lax.div(x, y), lax.rem(x, y), x & y, x | y, x ^ y, ~x), (i(20), i(20)), id="integers"),
    pytest.param(
        lambda x, y: (lax.div(x, y), lax.rem(x, y)),
        (np.array([5, -5, 0, -(2**31), 7], np.int32), np.array([0, 0, 0, -1, -2], np.int32)),
        id="divide-edge",
    ),
    pytest.param(
        lambda x, y: (lax.shift_left(x, y), lax.shift_right_arithmetic(x, y), lax.shift_right_logical(x, y)),
        (i(8, low=-(2**30), high=2**30), np.array([0, 1, 5, 31, 32, 33, -1, 100], np.int32)),
        id="shifts",
    ),
    pytest.param(lambda x: (lax.population_count(x), lax.clz(x)), (i(9, low=-(2**31), high=2**31 - 1),), id="bits"),
    pytest.param(lambda x: lax.integer_pow(x, 5), (i(9),), id="integer_pow"),
    pytest.param(lambda x: jnp.float_power(x, 2), (i(4),), id="float_power"),
    pytest.param(
        lambda x: (jnp.real(x), jnp.imag(x), jnp.conj(x), jnp.abs(x), jnp.exp(x), jnp.sqrt(x)), (cx(5),), id="complex"
    ),
    pytest.param(
        lambda x, y: (x * y, x / y, x + y, jnp.sin(x), jnp.tanh(x), jnp.log(x)), (cx(5), cx(5)), id="complex2"
    ),
    pytest.param(lambda x, y: lax.complex(x, y), (f(5), f(5)), id="make-complex"),
    pytest.param(lambda x: jnp.clip(x, -0.5, 0.5), (f(7),), id="clamp"),
    pytest.param(lambda p, x, y: jnp.where(p, x, y), (i(7) > 0, f(7), f(7)), id="select"),
    pytest.param(lambda x: lax.bitcast_convert_type(x, jnp.int32), (f(3),), id="bitcast"),
    pytest.param(lambda x: lax.bitcast_convert_type(x, jnp.uint8), (f(3),), id="bitcast-narrow"),
    pytest.param(lambda x: lax.reduce_precision(x, 5, 10), (f(9) * 1000,), id="reduce_precision"),
    pytest.param(lambda x: jnp.nextafter(x, 0.0), (f(9),), id="nextafter"),
    pytest.param(
        lambda x, y: (x + y, x * y, jnp.exp(x)),
        (f(5).astype(ml_dtypes.bfloat16), f(5).astype(ml_dtypes.bfloat16)),
        id="bf16",
    ),
    pytest.param(lambda x: x.astype(jnp.float8_e4m3fn).astype(jnp.float32), (f(20),), id="f8"),
    pytest.param(lambda x: jax.nn.gelu(x, approximate=False), (f(3, 4),), id="gelu"),
    pytest.param(lambda x, y: x @ y, (f(3, 4).astype(np.float16), f(4, 2).astype(np.float16)), id="f16"),
]

MOVEMENT = [
    pytest.param(lambda x: jnp.broadcast_to(x[:, None], (3, 4)), (f(3),), id="broadcast"),
    pytest.param(lambda x: (x.T, x.reshape(-1), x[::-1], x[1:3, ::2]), (f(4, 6),), id="move"),
    pytest.param(lambda x: lax.pad(x, 1.0, ((1, 2, 0), (-1, 0, 2))), (f(3, 4),), id="pad"),
    pytest.param(lambda x, y: jnp.concatenate([x, y, x], 1), (f(2, 3), f(2, 1)), id="concatenate"),
    pytest.param(lambda: (lax.iota(jnp.int32, 5), lax.broadcasted_iota(jnp.float32, (2, 3), 1)), (), id="iota"),
    pytest.param(lambda x, n: lax.dynamic_slice(x, (n, n - 3), (2, 2)), (f(5, 5), np.int32(4)), id="dynamic_slice"),
    pytest.param(lambda x, u, n: lax.dynamic_update_slice(x, u, (n, 0)), (f(5, 5), f(2, 3), np.int32(9)), id="dus"),
    pytest.param(lambda x, n: x[n], (f(5, 3), i(4, low=-5, high=5)), id="take"),
    pytest.param(lambda x, n: jnp.take_along_axis(x, n, 1), (f(5, 3), i(5, 2, low=0, high=3)), id="take_along"),
    pytest.param(lambda x, n: x.at[n].get(mode="fill", fill_value=9), (f(5), i(4, low=-9, high=9)), id="gather-fill"),
    pytest.param(lambda x, n, u: x.at[n].add(u), (f(5, 3), i(4, low=0, high=5), f(4, 3)), id="scatter-add"),
    pytest.param(lambda x, n, u: x.at[n, :2].set(u), (f(5, 3), np.array([4, 0], np.int32), f(2, 2)), id="scatter-set"),
    pytest.param(lambda x, n, u: x.at[n].max(u, mode="drop"), (f(5), i(9, low=-9, high=9), f(9)), id="scatter-drop"),
    pytest.param(jax.vmap(lambda x, n: x[n]), (f(3, 5), i(3, 2, low=0, high=5)), id="gather-batched"),
    pytest.param(
        jax.vmap(lambda x, n, u: x.at[n].add(u)), (f(3, 5), i(3, 2, low=0, high=5), f(3, 2)), id="scatter-batched"
    ),
    pytest.param(lambda x: (x + 1).sum(0), (f(0, 4),), id="empty"),
    pytest.param(lambda x: jnp.concatenate([x, x]) @ jnp.zeros((3, 0)), (f(0, 3),), id="empty-dot"),
    pytest.param(lambda x: x * 2 + 1, (np.float32(3),), id="scalar"),
    pytest.param(lambda x: jnp.roll(x, 2, 1), (f(3, 7),), id="roll"),
    pytest.param(lambda x: jnp.tril(x), (f(4, 4),), id="tril"),
]

REDUCTIONS = [
    pytest.param(lambda x: (x.sum(), x.max(1), x.min((0, 2)), x.prod(0), x.mean()), (f(3, 4, 5),), id="reduce"),
    pytest.param(lambda x: (jnp.argmax(x, 1), jnp.argmin(x)), (f(3, 7),), id="argmax"),
    pytest.param(lambda x: (jnp.any(x), jnp.all(x, 0)), (i(3, 4) > 0,), id="any"),
    pytest.param(lambda x: (jnp.cumsum(x, 1), jnp.cumprod(x, 0), lax.cummax(x)), (f(3, 7),), id="cumulative"),
    pytest.param(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 3), (2, 1), "SAME"), (f(5, 6),), id="max_pool"),
    pytest.param(
        lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 2), (1, 2), ((1, 0), (0, 2)), (2, 1), (1, 2)),
        (f(5, 6),),
        id="window",
    ),
    pytest.param(
        jax.grad(lambda x: (lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID") ** 2).sum()),
        (f(6, 6),),
        id="select_and_scatter",
    ),
    pytest.param(jax.nn.softmax, (f(3, 9),), id="softmax"),
    pytest.param(lambda x: jax.nn.logsumexp(x, 1), (f(3, 9),), id="logsumexp"),
    pytest.param(lambda x: (jnp.sort(x), jnp.argsort(x, 0), lax.top_k(x, 3)), (f(5, 7),), id="sort"),
    pytest.param(lambda x: jnp.sort(x), (SPECIAL,), id="sort-special"),
    pytest.param(lambda x, y: lax.sort((x, y), num_keys=2), (i(30, low=0, high=4), f(30)), id="sort-keys"),
    pytest.param(lambda x: jnp.median(x), (f(9),), id="median"),
]


def conv(x, w, **k):
    return lax.conv_general_dilated(x, w, **{"window_strides": (1, 1), "padding": "SAME", **k})


LINEAR = [
    pytest.param(lambda x, y: x @ y, (f(3, 4), f(4, 5)), id="dot"),
    pytest.param(lambda x, y: jnp.einsum("abc,acd->abd", x, y), (f(2, 3, 4), f(2, 4, 5)), id="batched"),
    pytest.param(lambda x, y: jnp.einsum("abcd,cbe->ade", x, y), (f(2, 3, 4, 5), f(4, 3, 2)), id="two-contracted"),
    pytest.param(
        lambda x, y: lax.dot(x, y, preferred_element_type=jnp.int32),
        (i(3, 4, dtype=np.int8), i(4, 5, dtype=np.int8)),
        id="i8",
    ),
    pytest.param(
        lambda x, y: lax.dot(x, y, preferred_element_type=jnp.float32),
        (f(3, 4).astype(ml_dtypes.bfloat16), f(4, 5).astype(ml_dtypes.bfloat16)),
        id="bf16-f32",
    ),
    pytest.param(conv, (f(2, 3, 6, 5), f(4, 3, 3, 3)), id="conv"),
    pytest.param(
        lambda x, w: conv(x, w, window_strides=(2, 1), padding=((1, 0), (0, 2)), rhs_dilation=(1, 2)),
        (f(1, 2, 7, 8), f(3, 2, 2, 3)),
        id="conv-strided",
    ),
    pytest.param(
        lambda x, w: conv(x, w, lhs_dilation=(2, 2), padding=((1, 2), (2, 1))),
        (f(1, 2, 4, 4), f(3, 2, 3, 3)),
        id="conv-transpose",
    ),
    pytest.param(lambda x, w: conv(x, w, feature_group_count=4), (f(1, 4, 5, 5), f(8, 1, 3, 3)), id="depthwise"),
    pytest.param(
        lambda x, w: conv(x, w, dimension_numbers=("NHWC", "HWIO", "NHWC")), (f(2, 5, 6, 3), f(3, 3, 3, 4)), id="nhwc"
    ),
    pytest.param(
        jax.grad(lambda w, x: (conv(x, w, feature_group_count=2) ** 2).sum()),
        (f(4, 1, 3, 3), f(2, 2, 5, 5)),
        id="batch-groups",
    ),
    pytest.param(lambda x: (jnp.fft.fft(x), jnp.fft.rfft(x), jnp.fft.ifft(x), jnp.fft.fft2(x)), (f(3, 7),), id="fft"),
    pytest.param(lambda x: jnp.fft.irfft(x, 9), (cx(3, 5),), id="irfft"),
    pytest.param(lambda a: lax.linalg.cholesky(a), (spd(4),), id="cholesky"),
    pytest.param(
        lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=True),
        (np.tril(spd(4)), f(4, 2)),
        id="triangular",
    ),
    pytest.param(
        lambda a, b: lax.linalg.triangular_solve(a, b, lower=False, transpose_a=True),
        (np.triu(spd(4)), f(2, 4)),
        id="triangular-t",
    ),
]


def lstm(x, w):
    def step(carry, row):
        h, c = carry
        a, b, d, e = jnp.split(jnp.concatenate([row, h]) @ w, 4)
        c = jax.nn.sigmoid(a) * c + jax.nn.sigmoid(b) * jnp.tanh(d)
        h = jax.nn.sigmoid(e) * jnp.tanh(c)
        return (h, c), h

    return lax.scan(step, (jnp.zeros(3), jnp.zeros(3)), x)


def attention(x, w):
    q, k, v = jnp.split(x @ w, 3, -1)
    scores = jnp.where(jnp.tril(jnp.ones((5, 5), bool)), q @ k.T / 2.0, -1e9)
    y = jax.nn.softmax(scores) @ v
    return (y - y.mean(-1, keepdims=True)) * lax.rsqrt(y.var(-1, keepdims=True) + 1e-5)


def train(w, x, y):
    def loss(w):
        return -(jax.nn.log_softmax(jnp.tanh(x @ w)) * jax.nn.one_hot(y, 3)).sum(-1).mean()

    value, gradient = jax.value_and_grad(loss)(w)
    return value, w - 0.1 * gradient


CONTROL = [
    pytest.param(
        lambda n: lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * 1.5), (0, 1.0)),
        (np.int32(7),),
        id="while",
    ),
    pytest.param(lambda n, x: lax.switch(n, [jnp.sin, jnp.cos, lambda v: v * 2], x), (np.int32(5), f(3)), id="switch"),
    pytest.param(lambda p, x: lax.cond(p, jnp.sin, jnp.cos, x), (np.bool_(True), f(3)), id="cond"),
    pytest.param(
        lambda x, n: lax.fori_loop(0, n, lambda k, v: v.at[k].add(v[k - 1]), x), (f(6), np.int32(6)), id="fori"
    ),
    pytest.param(jax.jit(lambda x: jax.jit(jnp.sin)(x) + jax.jit(jnp.sin)(x + 1)), (f(3),), id="calls"),
    pytest.param(lambda x: jax.checkpoint(jnp.sin)(x), (f(3),), id="barrier"),
    pytest.param(
        lambda k: jax.random.normal(jax.random.wrap_key_data(k), (3, 4)), (np.array([1, 2], np.uint32),), id="normal"
    ),
    pytest.param(
        lambda k: jax.random.randint(jax.random.wrap_key_data(k), (9,), 0, 7),
        (np.array([1, 2], np.uint32),),
        id="randint",
    ),
    pytest.param(lambda k: lax.rng_bit_generator(k, (5, 3)), (i(4, low=0, high=99, dtype=np.uint32),), id="rng-bits"),
    pytest.param(
        lambda k: [
            lax.rng_bit_generator(k, shape, dtype, algorithm=lax.RandomAlgorithm.RNG_THREE_FRY)
            for shape in ((), (7,), (3, 2), (3, 3), (3, 5, 2))
            for dtype in (np.uint32, np.uint8)
        ],
        (i(4, low=0, high=99, dtype=np.uint32),),
        id="rng-bits-three-fry",
    ),
    pytest.param(lambda x: jnp.linalg.matrix_power(x, 3), (f(3, 3),), id="matrix_power"),
    pytest.param(lstm, (f(4, 5), f(8, 12)), id="lstm"),
    pytest.param(attention, (f(5, 4), f(4, 12)), id="attention"),
    pytest.param(train, (f(4, 3), f(6, 4), i(6, low=0, high=3)), id="train"),
]


@pytest.mark.parametrize(("fn", "args"), ELEMENTWISE + MOVEMENT + REDUCTIONS + LINEAR + CONTROL)
def test_the_interpreter_and_text_round_trip_match_xla(fn, args):
    module = import_model(jax.jit(fn), *args)
    assert verify(module) == []
    expected = jax.tree.leaves(jax.jit(fn)(*args))
    kept = module.functions["main"].attrs["kept"]
    found = interpret(module, *(args[k] for k in kept))
    compare(found, expected)
    constants = {}
    text = print_module(module, constants)
    again = parse_module(text, constants)
    assert print_module(again, {}) == text
    assert verify(again) == []
    for a, b in zip(interpret(again, *(args[k] for k in kept)), found):
        np.testing.assert_array_equal(a, b)


def compare(found, expected):
    """Check dtype and shape exactly, floats within a few ulp of the widest part."""
    assert len(found) == len(expected)
    for a, b in zip(found, map(np.asarray, expected)):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if b.dtype.kind in "biu":
            np.testing.assert_array_equal(a, b)
            continue
        wide = np.complex128 if b.dtype.kind == "c" else np.float64
        rtol = {4: 3e-5, 8: 3e-5 if b.dtype.kind == "c" else 1e-12}.get(b.dtype.itemsize, 2e-2)
        np.testing.assert_allclose(a.astype(wide), b.astype(wide), rtol=rtol, atol=rtol)


def test_the_interpreter_runs_a_symbolic_batch_at_several_sizes():
    b, n = jax.export.symbolic_shape("b, n")
    spec = jax.ShapeDtypeStruct((b, n), np.float32)
    fn = jax.jit(lambda x: jax.nn.softmax(jnp.concatenate([x, x * 2], 1)).reshape(-1))
    module = import_model(fn, spec)
    assert verify(module) == []
    for shape in ((1, 1), (3, 4), (5, 2)):
        x = f(*shape)
        compare(interpret(module, x), [fn(x)])


@pytest.mark.parametrize("shape", ["2*b, 3", "b + 1, 3", "b, b", "b, 2*b + 1", "b, floordiv(b, 2) + 1"])
def test_the_interpreter_runs_dims_that_are_expressions(shape):
    spec = jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape), np.float32)
    fn = jax.jit(lambda x: (x.sum(0), (x * 2).reshape(-1)[: x.shape[0]], jnp.arange(x.shape[1]) + x.shape[0]))
    module = import_model(fn, spec)
    assert verify(module) == []
    sizes = {"2*b, 3": (6, 3), "b + 1, 3": (5, 3), "b, b": (4, 4), "b, 2*b + 1": (3, 7)}.get(shape, (5, 3))
    x = f(*sizes)
    compare(interpret(module, x), fn(x))


def test_the_interpreter_refuses_a_violated_shape_constraint():
    spec = jax.ShapeDtypeStruct(jax.export.symbolic_shape("2*b, 3"), np.float32)
    module = import_model(jax.jit(lambda x: x.reshape(-1, 6)), spec)
    with pytest.raises((OperandError, AssertionFailed)):
        interpret(module, f(5, 3))


def test_the_interpreter_names_wrong_arguments():
    module = import_model(jax.jit(lambda x: x + 1), f(2, 3))
    with pytest.raises(OperandError, match="argument 0: expected f32"):
        interpret(module, f(3, 2))
    with pytest.raises(OperandError, match="float64"):
        interpret(module, f(2, 3, dtype=np.float64))
    with pytest.raises(OperandError, match="expected 1 arguments"):
        interpret(module)
