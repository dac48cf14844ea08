"""Attention is found however it is written, and computed as well as its ops one by one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.attentions import SPELLINGS, B, D, H, S, T, by_hand, dot_product_attention, filled

import aotc
from aotc.frontend.importer import import_model
from aotc.ir.loop.run import run_kernel
from aotc.ir.semantics.run import interpret
from aotc.ir.tensor.ir import walk
from aotc.ir.tensor.text import parse_module
from aotc.lowering.passes.fuse_attention import fuse_attention
from aotc.lowering.regions.lower_region import lower_region
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.targets import resolve_targets

EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}


def attentions(module):
    return [op for f in module.functions.values() for op in walk(f.body) if op.name == "attention"]


def fused(function, arguments, **options):
    """Return the module after the passes up to ``fuse_attention``, which must find one attention."""
    chosen = Options(stop_after="fuse-attention", verify_each=True, **options)
    return run_passes(import_model(function, *arguments), chosen)


def exact(function, arguments):
    """Return what the function computes in f64."""
    wide = [jnp.asarray(a, jnp.float64) if jnp.issubdtype(a.dtype, jnp.floating) else a for a in arguments]
    return jax.tree.leaves(jax.jit(function)(*wide))


def largest(found, wanted):
    """Return the largest difference; NaN must be where NaN is."""
    found, wanted = (np.asarray(x).astype(np.float64) for x in (found, wanted))
    assert (np.isnan(found) == np.isnan(wanted)).all()
    return np.abs(np.nan_to_num(found) - np.nan_to_num(wanted)).max(initial=0.0)


def compiled(function, arguments, **options):
    data = aotc.compile(function, *arguments, **options)
    return aotc.load(data, threads=2).invoke("main", *arguments)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.mark.ir
@pytest.mark.parametrize("name", SPELLINGS)
def test_each_spelling_is_fused_and_the_reference_is_as_accurate_as_xla(name, x64):
    spelling = SPELLINGS[name]
    arguments = spelling.arguments("float32")
    module = fused(spelling.function, arguments)
    assert len(attentions(module)) == 1
    wanted = exact(spelling.function, arguments)
    apart = jax.tree.leaves(jax.jit(spelling.function)(*arguments))
    for found, best, xla in zip(interpret(module, *arguments), wanted, apart, strict=True):
        assert largest(found, best) <= 2 * largest(xla, best) + 4 * EPSILON["float32"]


@pytest.mark.ir
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
@pytest.mark.parametrize("name", ["by hand", "flax", "equinox", "keras", "hugging face", "-1e9"])
def test_each_spelling_is_fused_in_f16_bf16_and_f64(name, dtype, x64):
    spelling = SPELLINGS[name]
    assert len(attentions(fused(spelling.function, spelling.arguments(dtype)))) == 1


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", EPSILON)
@pytest.mark.parametrize("name", ["by hand", "columns", "flax", "decode of one head", "hugging face"])
def test_fused_attention_is_as_near_to_f64_as_separate_ops(name, dtype, x64):
    spelling = SPELLINGS[name]
    arguments = spelling.arguments(dtype)
    (wanted,), (found,) = exact(spelling.function, arguments), compiled(spelling.function, arguments)
    (apart,) = compiled(spelling.function, arguments, opt_level=1)
    assert found.dtype == apart.dtype
    scale = float(np.abs(np.asarray(wanted)).max())
    assert largest(found, wanted) <= 2 * largest(apart, wanted) + 2 * EPSILON[dtype] * scale


@pytest.mark.cpu
@pytest.mark.parametrize("name", ["window", "one product", "repeated keys", "decode with a cache", "refused", "bqhk"])
def test_compiled_attention_matches_xla(name):
    spelling = SPELLINGS[name]
    arguments = spelling.arguments("float32")
    wanted = jax.tree.leaves(jax.jit(spelling.function)(*arguments))
    for found, best in zip(compiled(spelling.function, arguments, verify_each=True), wanted, strict=True):
        assert largest(found, best) < 1e-5


@pytest.mark.cpu
@pytest.mark.parametrize("fill", [-np.inf, -1e9, float(jnp.finfo(jnp.float32).min)])
@pytest.mark.parametrize("rows", [1, T])
def test_fully_masked_rows_match_xla(fill, rows):
    """NaN where masked scores are -inf, the mean of the values where they are finite."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((B, n, H, D)).astype(np.float32) for n in (rows, 600, 600))
    mask = rng.random((B, 1, rows, 600)) < 0.5
    mask[0, 0, 0] = False
    mask[1, 0, :, 100:400] = False
    (found,) = compiled(filled(fill), [q, k, v, mask])
    assert largest(found, jax.jit(filled(fill))(q, k, v, mask)) < 1e-5
    assert np.isnan(found[0, 0]).all() == np.isinf(fill)


def causal(offset, fill):
    def function(q, k, v):
        s = jnp.einsum("td,sd->ts", q, k)
        t, n = jnp.arange(s.shape[0])[:, None], jnp.arange(s.shape[1])
        return jax.nn.softmax(jnp.where(n <= t + offset, s, fill), axis=-1) @ v

    return function


@pytest.mark.cpu
@pytest.mark.parametrize("offset", [-50, 0, 530])
@pytest.mark.parametrize("fill", [-np.inf, -30.0])
def test_causal_blocks_are_skipped_only_without_weight(offset, fill):
    """Blocks that no row of an item sees are left out unless they have weight: beside -30, and in rows without any."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((n, D)).astype(np.float32) for n in (150, 700, 700))
    module = fused(causal(offset, fill), [q, k, v])
    assert attentions(module)[0].attrs["causal"] == (offset,)
    (found,) = compiled(causal(offset, fill), [q, k, v])
    assert largest(found, jax.jit(causal(offset, fill))(q, k, v)) < 1e-5


@pytest.mark.cpu
@pytest.mark.parametrize("special", [np.inf, -np.inf, np.nan])
def test_nan_and_infinite_scores_match_xla(special):
    """A row of -inf beside others weighs nothing; inf and NaN make their row NaN."""
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal((1, n, 2, D)).astype(np.float32) for n in (T, 600, 600))
    bias = np.zeros((1, 2, T, 600), np.float32)
    bias[0, 0, 3, :300] = special
    bias[0, 1, 5] = special

    def function(q, k, v, bias):
        return dot_product_attention(q, k, v, bias=bias)

    (found,) = compiled(function, [q, k, v, bias])
    assert largest(found, jax.jit(function)(q, k, v, bias)) < 1e-5


SIZES = [(1, 1, 1), (2, 0, 5), (0, 3, 3), (1, 3, 300), (3, 70, 33), (1, 257, 13)]


@pytest.mark.cpu
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_attention_of_symbolic_sizes_matches_xla(level):
    """Batch, rows and terms are known to the call only: none, one, a few, no multiple of a block.

    JAX exports no sizes that may be 0, but what a slice leaves of others.
    """

    def but_first(q, k, v):
        return by_hand(q[1:, 1:], k[1:], v[1:])

    shapes = jax.export.symbolic_args_specs(
        [jax.ShapeDtypeStruct((1, 1, 2, D), np.float32)] * 3, ["b, t, 2, 16", "b, s, 2, 16", "b, s, 2, 16"]
    )
    exported = jax.export.export(jax.jit(but_first), platforms=["cpu"])(*shapes)
    assert len(attentions(fuse_attention(import_model(exported), Options()))) == 1
    main = aotc.load(aotc.compile(exported, opt_level=level), threads=2)
    rng = np.random.default_rng(3)
    for batch, rows, terms in SIZES:
        q, k, v = (rng.standard_normal((batch, n, 2, D)).astype(np.float32) for n in (rows, terms, terms))
        (found,) = main.invoke("main", *(np.pad(x, ((1, 0), (int(x is q), 0), (0, 0), (0, 0))) for x in (q, k, v)))
        wanted = np.zeros(q.shape) if 0 in (batch, rows) else jax.jit(by_hand)(q, k, v)
        assert largest(found, wanted) < 1e-5


@pytest.mark.cpu
@pytest.mark.parametrize("fill", [-np.inf, -1e9])
@pytest.mark.parametrize("rows", [1, 5])
def test_split_kv_with_masked_parts_matches_xla(fill, rows):
    """Few rows against many terms are split over the terms; parts of which nothing is allowed weigh nothing."""
    rng = np.random.default_rng(6)
    q, k, v = (rng.standard_normal((1, n, 2, D)).astype(np.float32) for n in (rows, 4096, 4096))
    mask = rng.random((1, 2, rows, 4096)) < 0.5
    mask[..., 1024:2048] = False
    mask[0, 0, 0] = False
    (op,) = attentions(fused(filled(fill), [q, k, v, mask]))
    assert len(op.results) == 3
    (found,) = compiled(filled(fill), [q, k, v, mask], verify_each=True)
    assert largest(found, jax.jit(filled(fill))(q, k, v, mask)) < 1e-5


KERNEL = """module @main {
func @k(%q: f32[t, 16], %k: f32[s, 16], %v: f32[s, 16]) attributes {kind = "single", root = ""} {
  %o = attention %q, %k, %v {q_dims = (0, 1), k_dims = (0, 1), v_dims = (0, 1), bias_dims = (), mask_dims = (),
    out_dims = (0, 1), scale = 1.0, fill = -inf, causal = ()} : f32[t, 16]
  return %o
}
}
"""


@pytest.mark.ir
@pytest.mark.parametrize("terms", [0, 1, 12, 30])
def test_attention_of_fewer_terms_than_a_tile_matches_the_reference(terms):
    """Fewer than a tile has rows; JAX takes no maximum of what may be nothing."""
    module = parse_module(KERNEL.replace(",\n    ", ", "))
    kernel = lower_region(module.functions["k"], resolve_targets("cpu:x86-64-v4")[0])
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((n, 16)).astype(np.float32) for n in (5, terms, terms))
    out = np.ones_like(q)
    run_kernel(kernel, [q, k, v, out], {"t": 5, "s": terms})
    assert largest(out, interpret(module, q, k, v, function="k")[0]) < 1e-5
    assert terms or not out.any()


@pytest.mark.cpu
@pytest.mark.parametrize("terms", [13, 64, 255, 257, 513])
@pytest.mark.parametrize("rows", [5, 17, 64, 65])
def test_sizes_next_to_block_boundaries_match_jax(rows, terms):
    rng = np.random.default_rng(4)
    q, k, v = (rng.standard_normal((1, n, 1, 24)).astype(np.float32) for n in (rows, terms, terms))
    (found,) = compiled(dot_product_attention, [q, k, v])
    assert largest(found, dot_product_attention(q, k, v)) < 1e-5


@pytest.mark.ir
def test_attention_whose_weights_have_other_readers_is_not_fused():
    """Scores, weights and their sums that are results, or what a gradient needs."""

    def weights(q, k, v):
        p = jax.nn.softmax(q @ k.T)
        return p @ v, p

    def scores(q, k, v):
        s = q @ k.T
        return jax.nn.softmax(s) @ v, s.max()

    shapes = [jax.ShapeDtypeStruct((n, D), np.float32) for n in (T, S, S)]
    gradient = jax.grad(lambda q, k, v: (jax.nn.softmax(q @ k.T) @ v).sum(), argnums=(0, 1, 2))
    for function in (weights, scores, gradient):
        assert attentions(fused(function, shapes)) == []


@pytest.mark.ir
@pytest.mark.parametrize(("dtype", "precision", "found"), [
    ("bfloat16", "default", 1), ("float32", "default", 1), ("float32", "highest", 0), ("float64", "default", 0),
])  # fmt: skip
def test_gpu_attention_is_fused_only_if_a_template_supports_it(dtype, precision, found, x64):
    """Of f32 that is rounded to TF32, where products may be."""
    spelling = SPELLINGS["causal"]
    with jax.default_matmul_precision(precision):
        module = fused(spelling.function, spelling.arguments(dtype), target="cuda:sm_90")
    assert len(attentions(module)) == found


@pytest.mark.ir
def test_a_bf16_bias_is_not_widened_before_attention():
    """Not widened by a kernel of its own before it is added to scores of f32."""
    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((B, T, 4, D), (B, S, 4, D), (B, S, 4, D), (1, 4, T, S))]
    (op,) = attentions(fused(lambda q, k, v, bias: dot_product_attention(q, k, v, bias=bias), shapes))
    assert str(op.operands[3].type) == f"bf16[4, {T}, {S}]"
