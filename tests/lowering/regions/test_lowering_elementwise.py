"""Elementwise functions of every type, and reductions over every pattern of axes, beside ``jax.jit``."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.differential import LEVELS, check, integers, normal

pytestmark = pytest.mark.cpu

FLOATS = ["float16", "bfloat16", "float32"]
INTEGERS = ["int8", "int16", "int32", "uint8", "uint16", "uint32"]


def transcendental(x):
    p = jnp.abs(x) + 0.1
    return (jnp.exp(x), jnp.log(p), jnp.log1p(p), jnp.expm1(x), jnp.tanh(x), jax.nn.sigmoid(x), jnp.sin(x), jnp.cos(x),
            jnp.tan(x * 0.5), jax.lax.rsqrt(p), jnp.sqrt(p), jnp.cbrt(x), jnp.power(p, x), jnp.arctan2(x, p))  # fmt: skip  # noqa: E501


def special(x):
    return (jax.lax.erf(x), jax.lax.erfc(x), jax.lax.erf_inv(x * 0.2), jax.lax.lgamma(jnp.abs(x) + 0.5),
            jax.lax.digamma(jnp.abs(x) + 0.5), jnp.sinh(x), jnp.cosh(x), jnp.arcsin(x * 0.2), jnp.arctanh(x * 0.2),
            jnp.arcsinh(x), jnp.arccosh(1 + jnp.abs(x)))  # fmt: skip


def rounding(x):
    return (jnp.round(x), jax.lax.round(x), jnp.floor(x), jnp.ceil(x), jnp.sign(x), jnp.trunc(x), jnp.abs(x), -x,
            jnp.isfinite(x), jnp.fmod(x, 0.75), jnp.nextafter(x, x + 1) if x.dtype != jnp.float16 else x)  # fmt: skip


def arithmetic(x, y):
    return (x + y, x - y, x * y, jnp.maximum(x, y), jnp.minimum(x, y), x < y, x <= y, x == y, x != y, x > y, x >= y,
            jnp.where(x < y, x, y), jnp.clip(x, 2, 3))  # fmt: skip


def bitwise(x, y):
    s = jnp.abs(y) % 7
    return (x & y, x | y, x ^ y, ~x, x << s, jax.lax.shift_right_logical(x, s), jax.lax.shift_right_arithmetic(x, s),
            jax.lax.population_count(x), jax.lax.clz(x), x // jnp.where(y == 0, 1, y), x % jnp.where(y == 0, 1, y),
            jax.lax.div(x, y), jax.lax.rem(x, y), x**3)  # fmt: skip


def conversions(x):
    kinds = ("int8", "uint8", "int32", "uint32", "float16", "bfloat16", "float32", "bool")
    return tuple(jax.lax.convert_element_type(x, kind) for kind in kinds)


SPECIAL_VALUES = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 3.5, -2.5, 0.5, 1.5, 200.0], "float32")

CASES = {
    **{f"transcendental-{d}": (transcendental, [normal(37, dtype=d)], 4) for d in FLOATS},
    "transcendental-special": (
        lambda x: (jnp.exp(x), jnp.log(x), jnp.tanh(x), jnp.sin(x), jnp.sqrt(x), jax.lax.erf(x), x**2, jnp.cbrt(x)),
        [SPECIAL_VALUES], 2),
    "special": (special, [normal(37)], 20),
    **{f"rounding-{d}": (rounding, [normal(37, dtype=d, scale=3)], 1) for d in FLOATS},
    "rounding-special": (rounding, [SPECIAL_VALUES], 1),
    **{f"arithmetic-{d}": (arithmetic, [normal(5, 7, dtype=d), normal(7, dtype=d, seed=1)], 1) for d in FLOATS},
    "arithmetic-special": (arithmetic, [SPECIAL_VALUES[:, None], SPECIAL_VALUES], 1),
    **{f"arithmetic-{d}": (arithmetic, [integers(5, 7, low=0, dtype=d), integers(7, low=0, seed=1, dtype=d)], 1)
       for d in INTEGERS},
    **{f"bitwise-{d}": (bitwise, [integers(37, low=-100 * (d[0] == "i"), high=100, dtype=d),
                                  integers(37, low=-5 * (d[0] == "i"), high=7, seed=1, dtype=d)], 1) for d in INTEGERS},
    "integer-limits": (lambda x: (x + 1, x * x, -x, abs(x), x // -1, jax.lax.rem(x, x * 0 - 1), jnp.sign(x)),
                       [np.array([-(2**31), 2**31 - 1, 0, -1], "int32")], 1),
    "bool": (lambda a, b: (a & b, a | b, a ^ b, ~a, a == b, a < b, jnp.where(a, 1.5, 2.5), a + b, a.astype(int)),
             [integers(9, low=0, high=2, dtype=bool), integers(9, low=0, high=2, seed=1, dtype=bool)], 1),
    **{f"convert-{d}": (conversions, [normal(37, dtype=d, scale=20)], 1) for d in FLOATS},
    **{f"convert-{d}": (conversions, [integers(37, low=-100 * (d[0] == "i"), high=100, dtype=d)], 1)
       for d in INTEGERS},
    "bitcast": (lambda x: (jax.lax.bitcast_convert_type(x, jnp.int32) + 1, jax.lax.bitcast_convert_type(x, jnp.uint8),
                           jax.lax.bitcast_convert_type(x.reshape(-1, 2).astype(jnp.bfloat16), jnp.uint32)),
                [normal(6, 4)], 1),
    "complex": (lambda x, y: (lambda z: (z * z, z + 1j, jnp.abs(z), jnp.conj(z), jnp.real(z * 2j), jnp.exp(z)))
                (jax.lax.complex(x, y)), [normal(9), normal(9, seed=1)], 4),
    "scalars": (lambda a, b: (a + b, jnp.sin(a), a * 2), [np.float32(1.5), np.float32(-0.5)], 1),
    "constant-results": (lambda x: (jnp.zeros((3, 2)), jnp.arange(5), x, x, jnp.ones(())), [normal(4)], 1),
    "broadcast": (lambda a, b, c: a[:, None] * b[None] + c, [normal(5), normal(7), normal(1, 7)], 1),
    "empty": (lambda x: (jnp.sin(x), x.sum(), x.sum(0), jnp.concatenate([x, x])), [normal(0, 3)], 1),
    "reduce-precision": (lambda x: jax.lax.reduce_precision(x, 5, 7), [normal(50, scale=100)], 1),
    "iota": (lambda x: x + jax.lax.broadcasted_iota(jnp.float32, (3, 4), 1) * jnp.arange(3)[:, None], [normal(3, 4)], 1),  # noqa: E501
    "gelu-silu": (lambda x: (jax.nn.gelu(x), jax.nn.gelu(x, approximate=False), jax.nn.silu(x), jax.nn.softplus(x)),
                  [normal(5, 33)], 4),
}  # fmt: skip


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", CASES)
def test_elementwise_functions_match_jax_at_every_level(name, level):
    function, args, factor = CASES[name]
    check(function, args, level, factor)


AXES = [None, 0, 1, 2, (0, 1), (0, 2), (1, 2), (0, 1, 2)]


def every(reduce):
    return lambda x: tuple(reduce(x, axis=a) for a in AXES)


def normalized(x, g):
    mean = x.mean(-1, keepdims=True)
    var = ((x - mean) ** 2).mean(-1, keepdims=True)
    rms = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * g
    batch = (x - x.mean((0, 1))) / jnp.sqrt(x.var((0, 1)) + 1e-5)
    return (x - mean) * jax.lax.rsqrt(var + 1e-5) * g, rms, batch


REDUCTIONS = {
    **{f"sum-{d}": (every(jnp.sum), [normal(3, 5, 7, dtype=d)], 2) for d in FLOATS},
    **{f"sum-{d}": (every(jnp.sum), [integers(3, 5, 7, low=0, dtype=d)], 1) for d in INTEGERS},
    "max": (every(jnp.max), [normal(3, 5, 7)], 1),
    "max-nan": (every(jnp.max), [np.where(normal(3, 5, 7) > 1.5, np.nan, normal(3, 5, 7)).astype("float32")], 1),
    "min-i8": (every(jnp.min), [integers(3, 5, 7, dtype="int8")], 1),
    "max-u32": (every(jnp.max), [integers(3, 5, 7, low=2**31, high=2**32, dtype="uint32")], 1),
    "prod": (every(jnp.prod), [normal(3, 5, 7)], 8),
    "any": (lambda x: (*every(jnp.any)(x), *every(jnp.all)(x)), [integers(3, 5, 7, low=0, high=2, dtype=bool)], 1),
    "mean-var": (lambda x: (*every(jnp.mean)(x), *every(jnp.var)(x)), [normal(3, 5, 7)], 4),
    "argmax": (lambda x: tuple(f(x, axis=a) for a in (None, 0, 1, 2) for f in (jnp.argmax, jnp.argmin)),
               [integers(4, 5, 6).astype("float32")], 1),
    "argmax-nan": (lambda x: (jnp.argmax(x, 1), jnp.argmin(x, 0)),
                   [np.where(normal(4, 9) > 1, np.nan, normal(4, 9)).astype("float32")], 1),
    "wide-rows": (lambda x: (x.sum(1), x.max(1), x.sum(0), x.sum()), [normal(3, 20001)], 20),
    "long-columns": (lambda x: (x.sum(0), x.max(0), jnp.argmax(x, 0)), [normal(5003, 3)], 20),
    "large-sum": (lambda x: (x.sum(), (x * x).mean()), [normal(300001)], 100),
    "size-1": (lambda x: (x.sum(0), x.sum(1), x.max((1, 2)), jnp.argmax(x, 1)), [normal(1, 1, 6)], 1),
    "empty-axis": (lambda x: (x.sum(1), x.sum(0), jnp.prod(x, 1), x.sum()), [normal(4, 0)], 1),
    "softmax": (lambda x: tuple(jax.nn.softmax(x, a) for a in (0, 1, 2)), [normal(4, 5, 33)], 4),
    "log-softmax": (lambda x: (jax.nn.log_softmax(x, 1), jax.nn.logsumexp(x, 0)), [normal(7, 65, scale=5)], 4),
    "softmax-bf16": (lambda x: jax.nn.softmax(x, -1), [normal(7, 65, dtype="bfloat16")], 1),
    "softmax-masked": (lambda x: jax.nn.softmax(jnp.where(x > 0, x, -jnp.inf), -1), [normal(7, 65)], 4),
    "normalized": (normalized, [normal(3, 5, 48), normal(48, seed=1)], 8),
    "norm-grad": (jax.grad(lambda x, g: (normalized(x, g)[0] ** 2 * g).sum(), (0, 1)),
                  [normal(3, 5, 48), normal(48, seed=1)], 40),
    "cumulative": (lambda x: (jnp.cumsum(x, 0), jnp.cumsum(x, 1), jnp.cumprod(x, 1), jax.lax.cummax(x, 1),
                              jax.lax.cumlogsumexp(x, 0), jnp.cumsum(x[::-1], 0)), [normal(9, 17)], 20),
    "cumsum-int": (lambda x: jnp.cumsum(x, -1), [integers(3, 300)], 1),
    "transposed-sum": (lambda x: (x.T.sum(0), x.reshape(5, 3, 7).sum(1), (x.T * 2).max(1)), [normal(15, 7)], 4),
    "chain": (lambda x: x / (x - x.max(1, keepdims=True)).sum(1, keepdims=True) + x.sum(0), [normal(6, 11)], 8),
}  # fmt: skip


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_match_jax_at_every_level(name, level):
    function, args, factor = REDUCTIONS[name]
    check(function, args, level, factor)
