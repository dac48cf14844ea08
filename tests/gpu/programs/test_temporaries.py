"""Arrays that a GPU's program stores between its kernels: none is larger than twice what it is made of or makes.

Products written out, broadcasts, one-hot matrices and patches of convolutions are such arrays.
"""

import jax
import jax.numpy as jnp
import pytest
from support.gpu_program import gpu_program
from support.gpu_traffic import nbytes
from support.small_models import MODELS

pytestmark = pytest.mark.ir

BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32
SMALL = 4096  # bytes that are not counted


def of(dtype, *shapes):
    return [jax.ShapeDtypeStruct(s, dtype) for s in shapes]


def conv(x, w):
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def conv_gradients(x, w):
    return jax.grad(lambda x, w: (conv(x, w) ** 2).sum(), (0, 1))(x, w)


def swiglu(x, gate, up):
    return jax.nn.silu(x @ gate) * (x @ up)


def swiglu_gradients(*args):
    return jax.grad(lambda *a: swiglu(*a).sum().astype(F32), (0, 1, 2))(*args)


def adapted(x, w, down, up):
    return x @ w + (x @ down) @ up


def cross_entropy(logits, labels):
    one_hot = jax.nn.one_hot(labels, logits.shape[-1])
    return jax.value_and_grad(lambda y: -(one_hot * jax.nn.log_softmax(y)).sum())(logits)


def kernels_of_distances(a, b, w, v):
    near = jnp.exp(-((a[:, None] - b[None]) ** 2))
    return (near * w).sum(0), (near * v).sum(1)


def experts(x, gate, w):
    best, at = jax.lax.top_k(jax.nn.softmax(x @ gate), 2)
    share = (jax.nn.one_hot(at, gate.shape[1]) * best[..., None]).sum(1)
    return jnp.einsum("td,edf,te->tf", x, w, share)


def normalized(x):
    groups = x.reshape(*x.shape[:-1], 8, -1)
    mean, var = (f(groups, (1, 2, 4), keepdims=True) for f in (jnp.mean, jnp.var))
    return ((groups - mean) * jax.lax.rsqrt(var + 1e-5)).reshape(x.shape)


def rotated(x, at):
    angle = at[:, None, None] / 10000 ** (jnp.arange(32) / 32)
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)], -1)


def enlarged(x, w):
    return conv(jnp.repeat(jnp.repeat(x, 2, 1), 2, 2), w)


def biased(q, k, v, bias):
    return jax.nn.dot_product_attention(q, k, v, bias=bias)


def additive_mask(q, k, v, mask):
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5 + mask
    return jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores.astype(F32)).astype(q.dtype), v)


def of_words(words, table):
    return jax.nn.one_hot(words, table.shape[0], dtype=table.dtype) @ table


def nearest(x):
    return jnp.linalg.norm(x[:, None] - x[None], axis=-1).min(1)


def weighted(a, b, w):
    return jnp.exp(-((a[:, None] - b[None]) ** 2).sum(-1)) @ w


def summed_before(x, w):
    return (jnp.tril(jnp.ones((x.shape[0],) * 2)) @ x) @ w


HEADS = of(BF16, *[(2, 128, 4, 64)] * 3)
BATCHES = of(BF16, *[(2, 4, 128, 64)] * 3)
PROGRAMS = {
    **{name: (row[0], row[1:3]) for name, row in MODELS.items()},
    "convolution": (conv, of(BF16, (4, 28, 28, 64), (3, 3, 64, 128))),
    "convolution of f32": (conv, of(F32, (4, 28, 28, 64), (3, 3, 64, 128))),
    "convolution of few channels": (conv, of(BF16, (4, 64, 64, 3), (7, 7, 3, 64))),
    "gradients of a convolution": (conv_gradients, of(BF16, (4, 28, 28, 64), (3, 3, 64, 128))),
    **{f"swiglu, {m}": (swiglu, of(BF16, (m, 1024), (1024, 1408), (1024, 1408))) for m in (1, 8, 64)},
    **{f"gradients, {m}": (swiglu_gradients, of(BF16, (m, 512), (512, 704), (512, 704))) for m in (1, 64)},
    **{f"adapted, {m}": (adapted, of(BF16, (m, 512), (512, 512), (512, 8), (8, 512))) for m in (1, 64)},
    "cross entropy": (cross_entropy, [*of(F32, (64, 4000)), *of(I32, (64,))]),
    "kernels of distances": (kernels_of_distances, of(F32, (512,), (600,), (512, 600), (512, 600))),
    "experts": (experts, of(F32, (64, 128), (128, 8), (8, 128, 256))),
    "normalized": (normalized, of(BF16, (4, 28, 28, 64))),
    "rotated": (rotated, [*of(BF16, (128, 8, 64)), *of(F32, (128,))]),
    "enlarged": (enlarged, of(BF16, (2, 14, 14, 64), (3, 3, 64, 64))),
    **{
        f"attention, {dtype.__name__} bias of {b} x {h} x {t}": (biased, [*HEADS, *of(dtype, (b, h, t, 128))])
        for dtype in (BF16, F32) for b, h, t in ((1, 1, 128), (2, 1, 128), (2, 1, 1), (1, 4, 128))
    },
    "attention, additive mask": (additive_mask, [*BATCHES, *of(F32, (2, 1, 128, 128))]),
}  # fmt: skip
# each with the only array that is larger, and why
LARGER = {
    "of words": (of_words, [*of(I32, (64,)), *of(BF16, (4000, 256))], (64, 4000), "0 times an infinity of W is NaN"),
    "nearest": (nearest, of(F32, (512, 16)), (512, 512), "a row of sums of rows is no stage of a kernel"),
    "weighted": (weighted, of(F32, (512, 8), (600, 8), (600, 4)), (512, 600), "tiles compute no sums as they load"),
    "summed before": (summed_before, of(F32, (512, 64), (64, 64)), (512, 512), "tiles compute right operands only"),
}


def larger(function):
    """Return the types of arrays between kernels of more than twice the bytes of what makes and of what reads them."""
    return [v.type for region in _regions(function.body) for v in _larger(region)]


def _regions(region):
    yield region
    for op in region.ops:
        for inner in op.regions:
            yield from _regions(inner)


def _larger(region):
    readers = {}
    for op in region.ops:
        for v in op.operands:
            readers.setdefault(v, []).append(op)
    for op in region.ops:
        for v in op.results if op.name == "dispatch" else ():
            made_of = sum(map(nbytes, op.operands))
            makes = max((sum(map(nbytes, reader.results)) for reader in readers.get(v, ())), default=0)
            if v not in region.results and nbytes(v) > max(2 * made_of, 2 * makes, SMALL):
                yield v


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_array_between_kernels_is_large(name):
    function, _ = gpu_program(*PROGRAMS[name], target="cuda:sm_90a")
    assert larger(function) == []


@pytest.mark.parametrize("name", LARGER)
def test_exceptions(name):
    model, args, shape, reason = LARGER[name]
    function, _ = gpu_program(model, args, target="cuda:sm_90a")
    assert [t.shape for t in larger(function)] == [shape], reason
