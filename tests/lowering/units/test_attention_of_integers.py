"""Attention of few queries that share keys of integers: products of integers on x86, which are as near as f32's."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from lowering.units.test_attention_of_caches import (
    BF16,
    BOUNDS,
    attention_op,
    computed,
    dequantized,
    exact,
    integers,
    is_near,
    normal,
    scales,
)

from aotc.ir.loop.ir import Tile, walk
from aotc.ir.loop.run import run_kernel
from aotc.ir.semantics.run import interpret
from aotc.ir.tensor.text import parse_module
from aotc.lowering.plans.attention.cpu_blocks import attention_blocks, final_attention_dtype
from aotc.lowering.regions.lower_region import lower_region
from aotc.targets import TARGETS
from aotc.vmfb.host.machine import cpu_features

pytestmark = [pytest.mark.cpu]
VNNI, FLOATS = TARGETS["cpu:x86-64-v4-vnni"], "cpu:x86-64-v3"


def given(rows=1, heads=8, keys=2, terms=333, depth=64, dtype=np.float32, batch=2):
    """Return queries, and a cache with its scales, keys of a head side by side."""
    cache = [integers(batch, keys, terms, depth, seed=n) for n in (1, 2)]
    factors = [scales(batch, keys, terms, 1, seed=n) for n in (3, 4)]
    return [normal(batch, rows, heads, depth, dtype=dtype), *cache, *factors]


def heads_first(q, k, v, k_scale, v_scale):
    return dequantized(q, *(x.swapaxes(1, 2) for x in (k, v, k_scale, v_scale)))


def side_by_side(arguments):
    """Return the same arguments with the keys of all heads of a term side by side, as ``dequantized`` takes them."""
    return [arguments[0], *(np.ascontiguousarray(x.swapaxes(1, 2)) for x in arguments[1:])]


def digits(function, arguments, target=VNNI):
    op = attention_op(function, arguments, target=target.name)
    (blocks,) = attention_blocks(tuple(v.type for v in op.operands), op.attrs, final_attention_dtype(op), target)
    return blocks.digits


def test_integer_attention_is_chosen_for_shared_integer_keys():
    """Queries that share keys, by an instruction; numbers have as many bits as results need."""
    assert digits(heads_first, given()) == 3
    assert digits(heads_first, given(rows=2, heads=2)) == 3
    assert digits(heads_first, given(dtype=BF16)) == 2
    assert digits(dequantized, side_by_side(given(dtype=BF16))) == 2
    assert digits(dequantized, side_by_side(given())) == 0  # products of three digits take longer than those of f32
    for arguments in (given(heads=2), given(depth=96), given(depth=40)):
        assert digits(heads_first, arguments) == 0
    assert digits(heads_first, given(), TARGETS["cpu:x86-64-v4"]) == 0
    assert digits(heads_first, given(), TARGETS["cpu:aarch64-bf16"]) == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("rows", "heads", "keys", "terms", "depth"), [
    (1, 8, 2, 333, 64), (1, 8, 1, 2049, 64), (2, 4, 2, 70, 128), (8, 2, 2, 17, 64), (3, 6, 3, 1501, 64),
    (1, 4, 2, 5, 64),
])  # fmt: skip
def test_integer_attention_of_shared_keys_matches_f64(rows, heads, keys, terms, depth, dtype):
    """Blocks of terms, terms that fill no tile, and fewer terms than one takes; parts."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    arguments = given(rows, heads, keys, terms, depth, kind)
    for function, own in ((heads_first, arguments), (dequantized, side_by_side(arguments))):
        found = computed(function, own, verify_each=True)
        assert is_near(found, function, own, 2 * BOUNDS[dtype])


@pytest.mark.parametrize("target", ["cpu:x86-64-v3-vnni", "cpu:x86-64-v4-vnni"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_integer_attention_on_each_cpu_target_matches_f64(dtype, target):
    if not cpu_features().issuperset(TARGETS[target].features):
        pytest.skip("another machine's")
    arguments = given(dtype=np.dtype(getattr(ml_dtypes, dtype, dtype)))
    assert is_near(computed(heads_first, arguments, target=target), heads_first, arguments, 2 * BOUNDS[dtype])


@pytest.mark.parametrize("level", [0, 1, 2])
def test_integer_attention_matches_f64_at_every_level(level):
    arguments = given()
    assert is_near(computed(heads_first, arguments, opt_level=level), heads_first, arguments, 4e-6)


def error(found, function, arguments):
    wanted = exact(function, arguments)
    return np.abs(found - wanted).max() / np.abs(wanted).max()


@pytest.mark.parametrize("outlier", [1.0, 30.0])
def test_integer_attention_is_as_accurate_as_f32(outlier):
    """Beside float64, also where an element of a query is much larger than all others."""
    arguments = given(terms=1024, batch=1)
    arguments[0][..., 3] *= outlier
    by_target = {t: error(computed(heads_first, arguments, target=t), heads_first, arguments) for t in ("cpu", FLOATS)}
    assert by_target["cpu"] < 3 * by_target[FLOATS]  # whose steps are relative to each element


def scored(q, k, v, k_scale, v_scale):
    """Attention, without a scale of scores, as XLA computes it."""
    keys, values = (x.astype(jnp.float32) * y for x, y in ((k, k_scale), (v, v_scale)))
    q = q.reshape(*q.shape[:2], k.shape[1], -1, q.shape[3])
    weights = jax.nn.softmax(jnp.einsum("btngd,bnsd->bngts", q, keys), axis=-1)
    return jnp.einsum("bngts,bnsd->btngd", weights, values)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 1e38, 0.0, 1e-38])
def test_infinite_and_nan_queries_match_f32(value):
    """One query, of those that share its keys, has such an element, or nothing else."""
    arguments = given(terms=100, batch=1)
    arguments[1][..., 5] = -3
    for some in (np.s_[0, 0, 2, 5], np.s_[0, 0, 2]):
        arguments[0][some] = value
        found, wanted = computed(scored, arguments), np.asarray(jax.jit(scored)(*arguments))
        assert np.isnan(found).tolist() == np.isnan(wanted).tolist()
        np.testing.assert_allclose(found, wanted, atol=4e-6, rtol=1e-5)


@pytest.mark.parametrize(("which", "value"), [
    *((3, x) for x in (np.nan, -0.5, 0.0)), *((4, x) for x in (np.inf, np.nan, -0.5, -0.0, 0.0, 1e-38)),
])  # fmt: skip
def test_extreme_scales_match_jax(which, value):
    arguments = given(terms=100, batch=1)
    arguments[which][0, 1, 40] = value
    found, wanted = computed(scored, arguments), np.asarray(jax.jit(scored)(*arguments))
    assert np.isnan(found).tolist() == np.isnan(wanted).tolist()
    np.testing.assert_allclose(found, wanted, atol=4e-6, rtol=1e-5)


@pytest.mark.parametrize("fill", [-np.inf, -1e9, -1.0])
@pytest.mark.parametrize("at", [0, 64, 700, 4098])
def test_masked_integer_attention_matches_f64(at, fill):
    def function(q, k, v, a, b, at):
        keys, values = (x.astype(q.dtype) * y for x, y in ((k, a), (v, b)))
        q = q.reshape(*q.shape[:2], k.shape[1], -1, q.shape[3])
        s = jnp.einsum("btngd,bnsd->bngts", q, keys)
        s = jnp.where(jnp.arange(k.shape[2]) <= at, s, fill)
        return jnp.einsum("bngts,bnsd->btngd", jax.nn.softmax(s, axis=-1), values)

    arguments = [*given(terms=4099, batch=1), np.int32(at)]
    assert digits(function, arguments) == 3
    assert is_near(computed(function, arguments), function, arguments, 4e-6)


@pytest.mark.parametrize("terms", [5, 65, 131])
@pytest.mark.parametrize("target", ["cpu:x86-64-v4-vnni", "cpu:x86-64-v3-vnni"])
def test_integer_attention_kernels_run_on_numpy(terms, target):
    """Every operand: scales of keys and of heads, a mask of terms, two parts, rows that share keys."""
    text = f"""module @main {{
func @k(%q: f32[2, 3, 64], %k: i8[2, {terms}, 64], %v: i8[2, {terms}, 64], %m: i1[{terms}], %a: f32[{terms}, 2],
  %b: f32[2]) attributes {{kind = "single", root = ""}} {{
  %o, %t, %n = attention %q, %k, %v, %m, %a, %b {{q_dims = (0, 1, 2), k_dims = (0, 1, 2), v_dims = (0, 1, 2),
    bias_dims = (), mask_dims = (-1, -1, 0), out_dims = (0, 1, 2), scale = 0.5, fill = -1e9, causal = (), split = 2,
    k_scale_dims = (1, -1, 0), v_scale_dims = (0, -1, -1)}} : f32[2, 2, 3, 64], f32[2, 2, 3], f32[2, 2, 3]
  return %o, %t, %n
}}
}}
""".replace(",\n    ", ", ").replace(",\n  ", ", ")
    module = parse_module(text)
    kernel = lower_region(module.functions["k"], TARGETS[target])
    assert {s.form.name for s in walk(kernel.body) if isinstance(s, Tile)} == {"i8_o8", "f32_s8"}
    cache = [integers(2, terms, 64), integers(2, terms, 64, seed=1)]
    arrays = [normal(2, 3, 64), *cache, np.arange(terms) % 3 < 2, scales(terms, 2), scales(2)]
    out = [np.ones(shape, np.float32) for shape in ((2, 2, 3, 64), (2, 2, 3), (2, 2, 3))]
    run_kernel(kernel, [*arrays, *out], {})
    for found, wanted in zip(out, interpret(module, *arrays, function="k"), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=1e-5)
