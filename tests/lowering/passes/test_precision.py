"""Products of f32 in the precision that the option ``matmul_precision`` says, beside float64."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aotc
from aotc.diagnostics import CompileError
from aotc.frontend.importer import import_model
from aotc.ir.tensor.ir import walk
from aotc.options import Options
from aotc.pipeline import run_passes

RANDOM = np.random.default_rng(0)
W, KERNEL = RANDOM.standard_normal((256, 300)), RANDOM.standard_normal((3, 3, 8, 24))
# Of the largest result: what rounding both operands to so many bits may make of sums of some hundred terms.
MOST = {"model": 2e-6, "bf16": 1e-2, "bf16x3": 2e-5, "highest": 2e-6}
LEAST = {"bf16": 1e-4, "bf16x3": 5e-7}  # it is not more precise than it says


def products(x, image, a, b):
    w, kernel = W.astype(x.dtype), KERNEL.astype(x.dtype)
    form = {"padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC"), "feature_group_count": 2}
    return (
        x @ w, jax.lax.conv_general_dilated(image, kernel, (1, 1), **form), jnp.einsum("bij,bkj->bik", a, b), x @ x[0],
    )  # fmt: skip


ARRAYS = [RANDOM.standard_normal(s) for s in ((40, 256), (2, 12, 12, 16), (3, 17, 33), (3, 9, 33))]


@pytest.mark.parametrize("level", [0, 2, 3])
@pytest.mark.parametrize("precision", MOST)
def test_errors_are_within_the_bound_of_each_precision(precision, level):
    with jax.enable_x64(True):
        wanted = [np.asarray(y) for y in jax.jit(products)(*ARRAYS)]
    short = [x.astype(np.float32) for x in ARRAYS]
    flags = {"matmul_precision": precision, "opt_level": level, "verify_each": True}
    module = aotc.load(aotc.compile(jax.jit(products), *short, **flags))
    for found, want in zip(module.invoke("main", *short), wanted, strict=True):
        assert found.dtype == np.float32
        assert LEAST.get(precision, 0) < np.abs(found - want).max() / np.abs(want).max() < MOST[precision]


@pytest.mark.parametrize("precision", MOST)
def test_infinities_and_nan_propagate_as_in_f32(precision):
    """A row with an infinite number is infinite, with the signs of f32; one with NaN is NaN; others are not touched."""
    x = ARRAYS[0].astype(np.float32)
    x[3, 5], x[4, 6], x[5, 7:9] = np.inf, np.nan, (np.inf, -np.inf)
    w = W.astype(np.float32)
    found = aotc.load(aotc.compile(lambda x: x @ w, x, matmul_precision=precision)).invoke("main", x)[0]
    with np.errstate(invalid="ignore"):
        want = x @ w
    assert np.array_equal(np.isnan(found), np.isnan(want))
    assert np.array_equal(found[np.isinf(want)], want[np.isinf(want)])
    assert np.array_equal(np.isinf(found), np.isinf(want))


@pytest.mark.parametrize(("value", "finite"), [(3.38e38, True), (3.4e38, False)])
def test_values_beyond_the_bf16_range_become_infinite(value, finite):
    x = np.full((1, 1, 4), value, np.float32)
    module = aotc.load(aotc.compile(lambda x: x @ jnp.full((1, 4, 2), 0.25), x, matmul_precision="bf16x3"))
    assert np.isfinite(module.invoke("main", x)[0]).all() == finite


def test_bf16_matmuls_of_a_symbolic_size_match_numpy():
    (n,) = jax.export.symbolic_shape("n")
    x, w = jax.ShapeDtypeStruct((n, 256), "float32"), W.astype(np.float32)
    module = aotc.load(aotc.compile(jax.jit(lambda x: x @ w), x, matmul_precision="bf16"))
    for size in (1, 7, 40):
        found, want = module.invoke("main", x := ARRAYS[0][:size].astype(np.float32))[0], x @ w
        assert np.abs(found - want).max() < 1e-2 * np.abs(want).max()


def ops(function, *arguments, precision, target="cpu:x86-64-v3"):
    module = run_passes(import_model(function, *arguments), Options(target=target, matmul_precision=precision))
    return [op for f in module.functions.values() for op in walk(f.body)]


def test_precisions_that_the_model_requests_are_preserved():
    """A product that says ``highest``, those of other types, attention, and what is no sum of products."""
    x, q = ARRAYS[0].astype(np.float32), ARRAYS[2].astype(np.float32)

    def exact(x, q):
        attended = jax.nn.softmax(q @ q.swapaxes(1, 2)) @ q
        return jnp.dot(x, x.T, precision="highest"), x[:, :1] @ x[:1], attended

    counts = Counter(op.name for op in ops(exact, x, q, precision="bf16"))
    assert (counts["attention"], counts["convert"]) == (1, 0)


@pytest.mark.parametrize(
    ("rows", "target", "asked", "taken"),
    [
        (9, "cpu:x86-64-v4-bf16", "default", {"bf16"}), (9, "cpu:aarch64-bf16", "default", {"bf16"}),
        (8, "cpu:x86-64-v4-bf16", "default", {"f32"}), (9, "cpu:x86-64-v4", "default", {"f32"}),
        (9, "cpu:x86-64-v4-bf16", "highest", {"f32"}), (9, "cuda:sm_90a", "default", {"f32"}),
    ],
)  # fmt: skip
def test_attention_uses_bf16_pairs_if_profitable(rows, target, asked, taken):
    q, k = np.zeros((2, rows, 16), np.float32), np.zeros((2, 300, 16), np.float32)

    def attend(q, k):
        scores = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k, precision=asked) / 4)
        return jnp.einsum("bqk,bkd->bqd", scores, k, precision=asked)

    found = [op for op in ops(attend, q, k, precision="bf16", target=target) if op.name == "attention"]
    assert {v.type.dtype for op in found for v in (*op.operands[:3], op.result)} == taken


@pytest.mark.parametrize("rows", [8, 9, 70])
def test_attention_of_bf16_pairs_is_as_accurate_as_bf16(rows):
    q, k, v = (RANDOM.standard_normal((3, n, 16)) for n in (rows, 150, 150))
    mask = RANDOM.random((rows, 150)) < 0.8

    def attend(q, k, v):
        return jax.nn.softmax(jnp.where(mask, q @ k.swapaxes(1, 2), -jnp.inf)) @ v

    with jax.enable_x64(True):
        want = np.asarray(jax.jit(attend)(q, k, v))
    short = [x.astype(np.float32) for x in (q, k, v)]
    (found,) = aotc.load(aotc.compile(attend, *short, matmul_precision="bf16")).invoke("main", *short)
    assert found.dtype == np.float32
    assert np.abs(found - want).max() < 3e-2 * np.abs(want).max()


def test_gpu_matmuls_have_the_requested_precision():
    """TF32 unless the precision is the highest; products of bf16 are those of their tensor cores."""
    x = np.zeros((256, 256), np.float32)
    told = {}
    for precision in ("model", "highest", "bf16"):
        found = ops(jnp.dot, x, x, precision=precision, target="cuda:sm_90a")
        (product,) = (op for op in found if op.name == "matmul")
        told[precision] = (product.attrs.get("precision", "DEFAULT"), product.operands[0].type.dtype)
    assert told == {"model": ("DEFAULT", "f32"), "highest": ("HIGHEST", "f32"), "bf16": ("DEFAULT", "bf16")}


def test_an_unknown_precision_is_refused():
    with pytest.raises(CompileError, match=r"matmul_precision is 'tf32'") as refused:
        aotc.compile(jnp.sin, np.float32(1), matmul_precision="tf32")
    assert "model, bf16, bf16x3, highest" in str(refused.value)
