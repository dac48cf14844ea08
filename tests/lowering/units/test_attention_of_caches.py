"""Attention of few queries on a CPU: caches in every layout, of integers too, and what a mask leaves out of them."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support.differential import normal

import aotc
from aotc.frontend.importer import import_model
from aotc.ir.loop.run import run_kernel
from aotc.ir.semantics.run import interpret
from aotc.ir.tensor.ir import walk
from aotc.ir.tensor.text import parse_module
from aotc.lowering.regions.lower_region import lower_region
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.targets import TARGETS
from aotc.vmfb.host.machine import cpu_features

pytestmark = [pytest.mark.cpu]
attention = jax.nn.dot_product_attention
BF16 = ml_dtypes.bfloat16
BOUNDS = {"float32": 2e-6, "bfloat16": 2.0**-7, "float16": 2.0**-9, "float64": 1e-13}


def grouped(q, k, v):
    """Attention as ``attention`` is, which has no f16 on CPUs, and no softmax of f64."""
    b, t, _, d = q.shape
    s = jnp.einsum("btngd,bsnd->bntgs", q.reshape(b, t, k.shape[2], -1, d), k) / np.sqrt(d).astype(q.dtype)
    return jnp.einsum("bntgs,bsnd->btngd", jax.nn.softmax(s, axis=-1), v).reshape(q.shape)


def heads_first(q, k, v):
    return grouped(q, k.swapaxes(1, 2), v.swapaxes(1, 2))


def dequantized(q, k, v, k_scale, v_scale):
    keys, values = ((x.astype(jnp.float32) * y).astype(q.dtype) for x, y in ((k, k_scale), (v, v_scale)))
    return attention(q, keys, values)


def until(fill):
    """Attention of the terms up to a position."""

    def function(q, k, v, at):
        s = jnp.einsum("bthd,bshd->bhts", q, k)
        s = jnp.where(jnp.arange(k.shape[1]) <= at, s, fill)
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s, axis=-1), v)

    return function


def attention_op(function, arguments, **options):
    """Return the op after ``fuse_attention``, of which there is one."""
    module = run_passes(import_model(jax.jit(function), *arguments), Options(stop_after="fuse-attention", **options))
    (op,) = [op for f in module.functions.values() for op in walk(f.body) if op.name == "attention"]
    return op


def computed(function, arguments, **options):
    """Return the result, which is the same bits whatever the number of threads is."""
    data = aotc.compile(jax.jit(function), *arguments, **options)
    found = [np.asarray(aotc.load(data, threads=n).invoke("main", *arguments)[0]) for n in (1, 2, 3)]
    assert len({x.tobytes() for x in found}) == 1
    return found[0]


def exact(function, arguments):
    with jax.enable_x64(True):
        wide = [jnp.asarray(x, jnp.float64) if x.dtype.kind not in "bi" else jnp.asarray(x) for x in arguments]
        return np.asarray(jax.jit(function)(*wide))


def is_near(found, function, arguments, bound):
    wanted = exact(function, arguments)
    return abs(found.astype("f8") - wanted).max() <= bound * max(abs(wanted).max(), 1)


def integers(*shape, seed=0):
    return np.random.default_rng(seed).integers(-127, 128, shape).astype(np.int8)


def scales(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).uniform(0.005, 0.02, shape).astype(dtype)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("rows", "heads", "keys", "terms", "depth"), [
    (1, 4, 4, 1501, 32), (1, 8, 2, 1030, 40), (2, 4, 2, 333, 16), (1, 8, 1, 2049, 16), (3, 6, 3, 70, 7),
    (1, 5, 5, 64, 80), (1, 8, 2, 203, 64), (8, 1, 1, 300, 96), (6, 4, 2, 130, 32),
])  # fmt: skip
def test_decode_attention_on_caches_of_either_layout_matches_f64(rows, heads, keys, terms, depth, dtype):
    """Heads that share keys, up to eight rows, odd lengths, parts that differ in length, depths that are no vectors."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    q = normal(2, rows, heads, depth, dtype=kind)
    for function, shape in ((grouped, (2, terms, keys, depth)), (heads_first, (2, keys, terms, depth))):
        arguments = [q, *(normal(*shape, seed=n, dtype=kind) for n in (1, 2))]
        with jax.enable_x64(True):
            found = computed(function, arguments, verify_each=True)
        assert is_near(found, function, arguments, BOUNDS[dtype])


@pytest.mark.parametrize("dtype", BOUNDS)
def test_decode_attention_on_transposed_keys_matches_f64(dtype):
    """A cache of turned keys: vectors of terms."""

    def transposed(q, k, v):
        s = jnp.einsum("bthd,bhds->bhts", q, k)
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s, axis=-1), v)

    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    cache = [normal(*shape, dtype=kind) for shape in ((1, 2, 32, 131), (1, 131, 2, 32))]
    arguments = [normal(1, 3, 2, 32, dtype=kind, scale=0.3), *cache]
    with jax.enable_x64(True):
        found = computed(transposed, arguments, verify_each=True)
    assert is_near(found, transposed, arguments, 2 * BOUNDS[dtype])


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_decode_attention_of_symbolic_rows_and_terms_matches_f64(rows):
    """The form for few rows, and the one for more, of sizes that only a call knows."""
    b, t, s = jax.export.symbolic_shape("b, t, s")
    shapes = [jax.ShapeDtypeStruct(x, BF16) for x in ((b, t, 4, 64), (b, s, 2, 64), (b, s, 2, 64))]
    module = aotc.load(aotc.compile(jax.export.export(jax.jit(grouped))(*shapes)), threads=2)
    for terms in (1, 77, 300):
        arguments = [normal(2, rows, 4, 64, dtype=BF16), *(normal(2, terms, 2, 64, seed=n, dtype=BF16) for n in (1, 2))]
        assert is_near(np.asarray(module.invoke("main", *arguments)[0]), grouped, arguments, 2.0**-7)


@pytest.mark.parametrize("target", ["cpu:x86-64-v3", "cpu:x86-64-v4", "cpu:x86-64-v4-bf16"])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8"])
def test_decode_attention_on_each_cpu_target_matches_f64(name, target):
    if not cpu_features().issuperset(TARGETS[target].features):
        pytest.skip("another machine's")
    q = normal(1, 2, 8, 64, dtype=np.float32 if name == "float32" else BF16)
    if name == "int8":
        function, cache = dequantized, [integers(1, 205, 2, 64), integers(1, 205, 2, 64, seed=1)]
        cache += [scales(1, 205, 2, 1, seed=n) for n in (2, 3)]
    else:
        function, cache = attention, [normal(1, 205, 2, 64, seed=n, dtype=q.dtype) for n in (1, 2)]
    found = computed(function, [q, *cache], target=target)
    assert is_near(found, function, [q, *cache], 2e-6 if name == "float32" else 2.0**-6)


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_decode_attention_matches_f64_at_every_level(level):
    arguments = [normal(1, 1, 2, 32), *(normal(1, 2051, 2, 32, seed=n) for n in (1, 2)), np.int32(700)]
    assert is_near(computed(until(-1e9), arguments, opt_level=level), until(-1e9), arguments, 2e-6)


def test_split_kv_parts_cover_all_heads():
    """Few items have parts; heads that are items need none."""
    q, k = normal(1, 1, 16, 32), normal(1, 1500, 16, 32)
    assert attention_op(attention, [q, k, k]).attrs["split"] == 8
    transposed = np.ascontiguousarray(k.swapaxes(1, 2))
    assert "split" not in attention_op(heads_first, [q, transposed, transposed]).attrs


@pytest.mark.parametrize("target", ["cpu:x86-64-v4", "cpu:x86-64-v2", "cpu:aarch64"])
@pytest.mark.parametrize("terms", [5, 65, 131])
def test_split_kv_kernels_run_on_numpy(terms, target):
    """Every operand: scales of keys and values, a mask of terms, two parts, heads side by side that share keys."""
    text = f"""module @main {{
func @k(%q: f32[2, 3, 16], %k: i8[{terms}, 2, 16], %v: i8[{terms}, 2, 16], %m: i1[{terms}], %a: f32[{terms}, 2],
  %b: f32[2]) attributes {{kind = "single", root = ""}} {{
  %o, %t, %n = attention %q, %k, %v, %m, %a, %b {{q_dims = (0, 1, 2), k_dims = (1, 0, 2), v_dims = (1, 0, 2),
    bias_dims = (), mask_dims = (-1, -1, 0), out_dims = (0, 1, 2), scale = 0.5, fill = -1e9, causal = (), split = 2,
    k_scale_dims = (1, -1, 0), v_scale_dims = (0, -1, -1)}} : f32[2, 2, 3, 16], f32[2, 2, 3], f32[2, 2, 3]
  return %o, %t, %n
}}
}}
""".replace(",\n    ", ", ").replace(",\n  ", ", ")
    module = parse_module(text)
    kernel = lower_region(module.functions["k"], TARGETS[target])
    mask = np.arange(terms) % 3 < 2
    cache = [integers(terms, 2, 16), integers(terms, 2, 16, seed=1)]
    given = [normal(2, 3, 16), *cache, mask, scales(terms, 2), scales(2)]
    out = [np.ones(shape, np.float32) for shape in ((2, 2, 3, 16), (2, 2, 3), (2, 2, 3))]
    run_kernel(kernel, [*given, *out], {})
    for found, wanted in zip(out, interpret(module, *given, function="k"), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=1e-5)


# --- integers ---

SCALES = {
    "keys": ((2, 333, 2, 1), "float32"), "heads": ((2, 1), "float32"), "terms": ((333, 1, 1), "float32"),
    "all": ((), "float32"), "bf16": ((2, 333, 2, 1), "bfloat16"),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SCALES)
def test_integer_caches_are_read_without_conversion(name, dtype):
    shape, kind = SCALES[name]
    kind = np.dtype(getattr(ml_dtypes, kind, kind))
    q = normal(2, 1, 8, 32, dtype=np.dtype(getattr(ml_dtypes, dtype, dtype)))
    factors = [scales(*shape, seed=n, dtype=kind) for n in (2, 3)]
    arguments = [q, integers(2, 333, 2, 32), integers(2, 333, 2, 32, seed=1), *factors]
    op = attention_op(dequantized, arguments)
    assert [v.type.dtype for v in op.operands[1:3]] == ["i8", "i8"]
    assert is_near(computed(dequantized, arguments, verify_each=True), dequantized, arguments, 2 * BOUNDS[dtype])


def test_integer_caches_with_a_scalar_scale_match_f64():
    function = lambda q, k, v: dequantized(q, k, v, 0.01, 0.02)
    arguments = [normal(1, 1, 4, 16), integers(1, 333, 4, 16), integers(1, 333, 4, 16, seed=1)]
    assert attention_op(function, arguments).operands[1].type.dtype == "i8"
    assert is_near(computed(function, arguments), function, arguments, 4e-6)


@pytest.mark.parametrize("target", ["cpu", "cuda:sm_90"])
def test_other_integer_caches_are_widened_first(target):
    """Scales of channels, many rows, and GPUs: the attention is the same op of floats."""
    row, rows = (normal(1, n, 4, 64, dtype=BF16) for n in (1, 40))
    cache = [integers(1, 2048, 4, 64), integers(1, 2048, 4, 64, seed=1)]
    channels, keys = [scales(4, 64), scales(4, 64)], [scales(1, 2048, 4, 1), scales(1, 2048, 4, 1)]
    for q, factors in ((row, channels), (rows, keys), *([(row, keys)] if "cuda" in target else [])):
        assert attention_op(dequantized, [q, *cache, *factors], target=target).operands[1].type.dtype == "bf16"
    if target == "cpu":
        arguments = [row, *cache, *channels]
        assert is_near(computed(dequantized, arguments), dequantized, arguments, 2.0**-6)


# --- what a mask leaves out ---


@pytest.mark.parametrize("fill", [-np.inf, -1e9])
@pytest.mark.parametrize("heads", [2, 16])
@pytest.mark.parametrize("at", [0, 63, 700, 4098])
def test_fully_masked_blocks_are_not_read(at, heads, fill):
    """What lies there may be anything: NaN here, which a weight of 0 would spread. Two heads are in parts."""
    q, k, v = normal(1, 1, heads, 16), *(normal(1, 4099, heads, 16, seed=n) for n in (1, 2))
    seen = [q, k[:, : at + 1], v[:, : at + 1]]
    behind = (at // 512 + 1) * 512  # no block is longer, and each of a part begins in its own
    k[:, behind + 512 :], v[:, behind + 512 :] = np.nan, np.nan
    found = computed(until(fill), [q, k, v, np.int32(at)])
    wanted = exact(lambda q, k, v: until(fill)(q, k, v, np.int32(at)), seen)
    assert abs(found - wanted).max() < 2e-6


@pytest.mark.parametrize("heads", [2, 16])
@pytest.mark.parametrize(("fill", "at"), [(-1e9, -1), (-2.0, 100), (-np.inf, -1), (5.0, 2000)])
def test_masked_terms_with_weight_match_f64(fill, at, heads):
    """Where nothing is allowed, or all that is has low scores, all blocks count: in no part, and in several."""
    arguments = [normal(1, 1, heads, 16), *(normal(1, 4099, heads, 16, seed=n) for n in (1, 2)), np.int32(at)]
    found, wanted = computed(until(fill), arguments), exact(until(fill), arguments)
    assert np.isnan(found).tolist() == np.isnan(wanted).tolist()
    assert np.nanmax(abs(found - wanted), initial=0) < 5e-6


def test_masks_by_head_and_row_match_f64():
    q, k, v = normal(2, 2, 4, 16), *(normal(2, 2100, 2, 16, seed=n) for n in (1, 2))
    mask = np.random.default_rng(0).random((2, 4, 2, 2100)) < 0.3
    mask[..., 300:1700] = False
    function = lambda q, k, v, mask: attention(q, k, v, mask=mask)
    arguments = [q, k, v, mask]
    assert is_near(computed(function, arguments), function, arguments, 2e-6)


@pytest.mark.parametrize("fill", [-np.inf, -1e9, -1.0])
@pytest.mark.parametrize("offset", [-1, 0, 40, 1000])
def test_causal_attention_of_few_rows_matches_f64(offset, fill):
    def function(q, k, v):
        s = jnp.where(np.arange(200) <= np.arange(3)[:, None] + offset, jnp.einsum("thd,shd->hts", q, k), fill)
        return jnp.einsum("hts,shd->thd", jax.nn.softmax(s, axis=-1), v)

    arguments = [normal(3, 2, 16), normal(200, 2, 16, seed=1), normal(200, 2, 16, seed=2)]
    found, wanted = computed(function, arguments), exact(function, arguments)
    assert np.isnan(found).tolist() == np.isnan(wanted).tolist()
    assert np.nanmax(abs(found - wanted), initial=0) < 2e-6


def test_a_donated_cache_is_updated_in_place():
    """A step of decoding writes its key and value where the cache lies, and reads it there."""

    def step(q, new, keys, values, at):
        keys, values = (jax.lax.dynamic_update_slice(x, new, (0, at, 0, 0)) for x in (keys, values))
        return until(-1e9)(q, keys, values, at), keys, values

    arguments = [*(normal(1, 1, 4, 16, seed=n) for n in (0, 1)), *(normal(1, 900, 4, 16, seed=n) for n in (2, 3))]
    arguments.append(np.int32(300))
    wanted = [np.asarray(x) for x in jax.jit(step)(*arguments)]
    caches = arguments[2:4]
    module = aotc.load(aotc.compile(jax.jit(step, donate_argnums=(2, 3)), *arguments))
    found = module.invoke("main", *arguments, donate=True)
    for mine, best in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, best, atol=4e-6)
    assert all(np.shares_memory(x, cache) for x, cache in zip(found[1:], caches, strict=True))
