"""Matrix products and convolutions of every layout, type and odd size, beside ``jax.jit``."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.differential import LEVELS, check, integers, normal

pytestmark = pytest.mark.cpu

lax = jax.lax


def pair(m, k, n, dtype="float32"):
    return [normal(m, k, dtype=dtype), normal(k, n, seed=1, dtype=dtype)]


def dot(a, b):
    return a @ b


def exact(a, b):
    return lax.dot_general(a, b, (((a.ndim - 1,), (0,)), ((), ())), preferred_element_type=jnp.int32)


SIZES = [(1, 1, 1), (1, 7, 5), (7, 5, 1), (6, 1, 9), (1, 130, 70), (33, 65, 17), (5, 0, 3), (0, 3, 4), (100, 300, 129)]

PRODUCTS = {
    **{f"{m}x{k}x{n}": (dot, pair(m, k, n), 10) for m, k, n in SIZES},
    **{f"bf16-{m}x{k}x{n}": (dot, pair(m, k, n, "bfloat16"), 1) for m, k, n in SIZES[2:6]},
    "f16": (dot, pair(9, 33, 17, "float16"), 1),
    "bf16-f32": (lambda a, b: lax.dot(a, b, preferred_element_type=jnp.float32), pair(9, 33, 17, "bfloat16"), 20),
    "i8": (exact, [integers(9, 33, low=-128, high=128, dtype="int8"), integers(33, 17, low=-128, high=128, dtype="int8")], 1),  # noqa: E501
    "u8": (exact, [integers(9, 33, low=0, high=256, dtype="uint8"), integers(33, 17, low=0, high=256, dtype="uint8")], 1),  # noqa: E501
    "i32": (dot, [integers(9, 33), integers(33, 17)], 1),
    "i8-vector": (exact, [integers(33, dtype="int8"), integers(33, 17, dtype="int8")], 1),
    "dense-bias-relu": (lambda a, b, c: jax.nn.relu(a @ b + c), [*pair(13, 40, 24), normal(24, seed=2)], 10),
    "epilogue-rows": (lambda a, b, c: jnp.tanh((a * 2) @ b * c[:, None] + a[:, :1]), [*pair(13, 40, 24), normal(13)], 10),  # noqa: E501
    "transposed": (lambda a, b: (a.T @ b.T, (b @ a).T, jnp.einsum("ka,bk->ba", a, b)), [normal(9, 7), normal(5, 9)], 10),  # noqa: E501
    "batch": (lambda a, b: (a @ b, jnp.einsum("bij,bjk->kbi", a, b), jnp.einsum("bij,bjk->ik", a, b)),
              [normal(3, 5, 7), normal(3, 7, 4)], 10),
    "attention": (lambda q, k, v: jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k)), v),
                  [normal(2, 9, 3, 8, seed=n) for n in range(3)], 20),
    "vectors": (lambda a, b, m: (a @ b, m @ a, a @ m, jnp.outer(a, b)), [normal(17), normal(17, seed=1), normal(17, 17)], 10),  # noqa: E501
    "many-axes": (lambda a, b: (jnp.tensordot(a, b, ((1, 2), (2, 0))), jnp.einsum("abc,cdb->da", a, b)),
                  [normal(3, 4, 5), normal(5, 6, 4)], 10),
    "batch-vectors": (lambda a, b: jnp.einsum("bi,bi->b", a, b), [normal(6, 40), normal(6, 40, seed=1)], 10),
    "chain": (lambda a, b: (a @ b @ b.T @ a.T).sum(), pair(20, 30, 40), 40),
    "complex": (lambda a, b: lax.complex(a, a) @ lax.complex(b, -b), pair(5, 6, 7), 10),
    "grad": (jax.grad(lambda a, b: (jnp.tanh(a @ b) ** 2).sum(), (0, 1)), pair(9, 17, 11), 20),
    "outer-sum": (lambda a, b: (a[:, :, None] * b[None]).sum(1), pair(6, 9, 7), 10),
    "constant-weights": (lambda a: a @ jnp.asarray(normal(40, 24, seed=9)) + 1, [normal(13, 40)], 10),
    "bool-mask": (lambda a, b: jnp.where(a > 0, a, 0) @ b, pair(13, 40, 24), 10),
}  # fmt: skip


def conv(strides, padding, rhs=None, lhs=None, groups=1, dims=None, **options):
    def function(x, w):
        return lax.conv_general_dilated(x, w, strides, padding, lhs, rhs, dims, groups, **options)

    return function


NHWC = ("NHWC", "HWIO", "NHWC")
IMAGE, KERNEL = normal(2, 11, 9, 3), normal(3, 3, 3, 8, seed=1, scale=0.3)

CONVOLUTIONS = {
    "nhwc": (conv((1, 1), "SAME", dims=NHWC), [IMAGE, KERNEL]),
    "nhwc-strided": (conv((2, 3), "VALID", dims=NHWC), [IMAGE, KERNEL]),
    "nchw": (conv((2, 2), [(1, 2), (0, 1)]), [normal(2, 3, 11, 9), normal(5, 3, 3, 3, seed=1)]),
    "dilated": (conv((1, 1), "SAME", (2, 2), dims=NHWC), [IMAGE, KERNEL]),
    "transposed": (conv((1, 1), [(2, 2), (2, 1)], None, (2, 3), dims=NHWC), [IMAGE, KERNEL]),
    "negative-padding": (conv((1, 1), [(-1, -2), (1, -1)], dims=NHWC), [IMAGE, KERNEL]),
    "grouped": (conv((1, 1), "SAME", groups=2, dims=NHWC), [normal(2, 7, 6, 4), normal(3, 3, 2, 6, seed=1)]),
    "depthwise": (conv((2, 2), "SAME", groups=12, dims=NHWC), [normal(2, 9, 8, 12), normal(3, 3, 1, 24, seed=1)]),
    "batch-groups": (conv((1, 1), "VALID", dims=NHWC, batch_group_count=2), [normal(4, 7, 6, 3), normal(3, 3, 3, 6, seed=1)]),  # noqa: E501
    "1d": (conv((2,), "SAME"), [normal(2, 3, 20), normal(5, 3, 4, seed=1)]),
    "3d": (conv((1, 2, 1), "SAME"), [normal(1, 2, 5, 6, 7), normal(3, 2, 2, 3, 2, seed=1)]),
    "1x1": (conv((1, 1), "VALID", dims=NHWC), [IMAGE, normal(1, 1, 3, 8)]),
    "global": (conv((1, 1), "VALID", dims=NHWC), [IMAGE, normal(11, 9, 3, 4)]),
    "relu-bias": (lambda x, w: jax.nn.relu(conv((1, 1), "SAME", dims=NHWC)(x, w) + w[0, 0, 0]), [IMAGE, KERNEL]),
    "grad": (jax.grad(lambda x, w: (conv((2, 1), "SAME", dims=NHWC)(x, w) ** 2).sum(), (0, 1)), [IMAGE, KERNEL]),
    "grad-depthwise": (jax.grad(lambda x, w: (conv((1, 1), "SAME", groups=6, dims=NHWC)(x, w) ** 2).sum(), (0, 1)),
                       [normal(2, 6, 5, 6), normal(3, 3, 1, 6, seed=1)]),
    "flipped": (lambda x, w: conv((1, 1), "VALID", dims=NHWC)(x, w[::-1, ::-1]), [IMAGE, KERNEL]),
    "convolve": (lambda x, w: jnp.convolve(x, w), [normal(30), normal(7)]),
}  # fmt: skip


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", PRODUCTS)
def test_matmuls_match_jax_at_every_level(name, level):
    function, args, factor = PRODUCTS[name]
    check(function, args, level, factor)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_match_jax_at_every_level(name, level):
    function, args = CONVOLUTIONS[name]
    check(function, args, level, 20)


@pytest.mark.parametrize("level", LEVELS)
def test_double_precision_programs_match_jax(level):
    """Products, elementary functions and integers of 64 bits."""

    def f(a, b, i):
        return a @ b, jnp.exp(a), jnp.log(jnp.abs(a)), a.sum(1), jax.nn.softmax(a), i * i, jax.lax.erf(a), jnp.sin(a), i.sum()  # noqa: E501

    with jax.enable_x64(True):
        check(f, [*pair(13, 21, 8, "float64"), np.arange(5) + 2**33], level, 20)
