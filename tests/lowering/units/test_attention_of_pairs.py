"""Attention of bf16 on a CPU that multiplies pairs of it, and of few rows: beside f64, XLA and its kernels on NumPy."""

import platform

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support.attentions import D, by_hand, filled
from support.differential import normal
from support.played.played_dots import HERE, run_played

import aotc
from aotc.frontend.importer import import_model
from aotc.ir.loop.ir import Alloc, Prefetch, Tile, walk
from aotc.ir.loop.run import run_kernel
from aotc.ir.semantics.run import interpret
from aotc.ir.tensor.text import parse_module
from aotc.lowering.lower import lower
from aotc.lowering.regions.lower_region import lower_region
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.targets import TARGETS
from aotc.vmfb.host.machine import cpu_features

TARGET = TARGETS["cpu:x86-64-v4-bf16"]
pytestmark = [pytest.mark.cpu]
runs_here = pytest.mark.skipif(
    not cpu_features().issuperset(TARGET.features), reason="this machine does not multiply pairs of bf16"
)
can_play = platform.machine() == "x86_64" and cpu_features() >= set(HERE.features)
attention = jax.nn.dot_product_attention


def wide(q, k, v):
    """Attention of one head of bf16 with weights of f32."""
    q, k, v = (x[0, :, 0].astype("f4") for x in (q, k, v))
    return jax.nn.softmax(q @ k.T) @ v


ROUNDED = 2.0**-8  # of a weight and of a result
BF16 = ml_dtypes.bfloat16


def heads(*shapes, dtype=BF16):
    return [normal(*shape, seed=n, dtype=dtype) for n, shape in enumerate(shapes)]


def exact(function, arguments):
    with jax.enable_x64(True):
        wide = [jnp.asarray(a, jnp.float64) if a.dtype != bool else a for a in arguments]
        return np.asarray(jax.jit(function)(*wide))


def loaded(function, arguments, **more):
    data = aotc.compile(jax.jit(function), *arguments, target=TARGET.name, verify_each=True, **more)
    return aotc.load(data, threads=2)


def is_near(found, function, arguments):
    """Is a result within a rounding of the weights and one of the result of what it is exactly?"""
    wanted = exact(function, arguments)
    largest = max(float(abs(arguments[2].astype("f8")).max()), 1e-9)
    assert found.dtype == BF16
    assert np.isnan(found).tolist() == np.isnan(wanted).tolist()
    return np.nanmax(abs(found.astype("f8") - wanted), initial=0) <= 2 * ROUNDED * largest


def forms(function, *arguments, target=TARGET.name, **more):
    """Return the forms of the tiles of a function."""
    options = Options(target=target, **more)
    exported = jax.export.export(jax.jit(function), platforms=["cpu"])(*arguments)
    kernels = lower(run_passes(import_model(exported), options), TARGETS[target], options).kernels
    return {s.form.name for kernel in kernels for s in walk(kernel.body) if isinstance(s, Tile)}


def test_bf16_pair_attention_is_chosen_by_dtype_and_target():
    q, k, v = heads((1, 20, 2, 16), (1, 40, 2, 16), (1, 40, 2, 16))
    assert forms(attention, q, k, v) == forms(by_hand, q, k, v) == {"bf16"}
    assert "bf16" not in forms(wide, q, k, v)
    for arguments in ([x.astype(dtype) for x in (q, k, v)] for dtype in ("f4", "f2")):
        assert "bf16" not in forms(by_hand, *arguments)
    assert "bf16" not in forms(attention, *(x[..., :15] for x in (q, k, v)))  # depths that make no pairs
    with jax.default_matmul_precision("highest"):
        assert "bf16" not in forms(lambda *x: by_hand(*x), q, k, v)
    for other in ("cpu:x86-64-v4-vnni", "cpu:x86-64-v3", "cpu:x86-64-amx"):
        assert "bf16" not in forms(attention, q, k, v, target=other)


def test_split_kv_parts_use_bf16_pairs_as_the_whole_does():
    """What parts give is f32, for they are combined."""
    q, k, v = heads((1, 20, 1, 16), (1, 4096, 1, 16), (1, 4096, 1, 16))
    own = lambda q, k, v: by_hand(q, k, v)
    assert "bf16" in forms(own, q, k, v)
    assert "bf16" not in forms(wide, q, k, v)


@runs_here
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("terms", [13, 64, 255, 257, 513])
@pytest.mark.parametrize("rows", [5, 17, 64, 65])
def test_bf16_pair_attention_next_to_block_boundaries_matches_f64(rows, terms, causal):
    function = lambda q, k, v: attention(q, k, v, is_causal=causal)
    arguments = heads((1, rows, 2, 24), (1, terms, 2, 24), (1, terms, 2, 24))
    assert is_near(loaded(function, arguments)(*arguments), function, arguments)


@runs_here
@pytest.mark.parametrize(("rows", "keys", "depth"), [(40, 1, 64), (40, 2, 80), (6, 2, 130), (1, 2, 64)])
def test_bf16_pair_attention_of_shared_keys_matches_f64(rows, keys, depth):
    """Of one row, the heads of a group are the rows."""
    arguments = heads((2, rows, 8, depth), (2, 300, keys, depth), (2, 300, keys, depth))
    assert is_near(loaded(attention, arguments)(*arguments), attention, arguments)


@runs_here
@pytest.mark.parametrize("fill", [-np.inf, -1e9])
def test_masked_bf16_pair_attention_matches_f32(fill):
    mask = np.random.default_rng(0).random((2, 1, 20, 601)) < 0.5
    mask[0, 0, 0], mask[1, 0, :, 100:400] = False, False
    arguments, function = [*heads((2, 20, 2, D), (2, 601, 2, D), (2, 601, 2, D)), mask], filled(fill)
    found = loaded(function, arguments)(*arguments)
    wide = [x.astype("f4") for x in arguments[:3]]
    wanted = np.asarray(jax.jit(function)(*wide, arguments[3]))
    assert np.isnan(found[0, 0]).all() == np.isinf(fill)
    np.testing.assert_allclose(found.astype("f4"), wanted, atol=2 * ROUNDED * 4, rtol=0)


@runs_here
def test_nan_and_infinity_stay_in_their_columns():
    """An odd number of terms has a partner of zeros, whatever the values are."""
    arguments = heads((1, 20, 1, 16), (1, 33, 1, 16), (1, 33, 1, 16))
    arguments[2][0, 32, 0, 3], arguments[2][0, 5, 0, 7] = np.inf, np.nan
    found = loaded(attention, arguments)(*arguments)
    assert np.isinf(found[..., 3]).all()
    assert np.isnan(found[..., 7]).all()
    assert np.isfinite(np.delete(found, [3, 7], -1)).all()


@runs_here
def test_bf16_pair_attention_of_symbolic_sizes_matches_f64():
    one = jax.ShapeDtypeStruct((1, 1, 2, 16), BF16)
    shapes = jax.export.symbolic_args_specs([one] * 3, ["1, t, 2, 16", "1, s, 2, 16", "1, s, 2, 16"])
    exported = jax.export.export(jax.jit(attention), platforms=["cpu"])(*shapes)
    module = aotc.load(aotc.compile(exported, target=TARGET.name))
    for rows, terms in ((1, 1), (4, 7), (5, 7), (3, 300), (70, 33), (257, 13), (20, 514)):
        arguments = heads((1, rows, 2, 16), (1, terms, 2, 16), (1, terms, 2, 16))
        assert is_near(module(*arguments), attention, arguments)


KERNEL = """module @main {
func @k(%q: bf16[t, 16], %k: bf16[s, 16], %v: bf16[s, 16]) attributes {kind = "single", root = ""} {
  %o = attention %q, %k, %v {q_dims = (0, 1), k_dims = (0, 1), v_dims = (0, 1), bias_dims = (), mask_dims = (),
    out_dims = (0, 1), scale = 1.0, fill = -inf, causal = ()} : bf16[t, 16]
  return %o
}
}
""".replace(",\n    ", ", ")


@pytest.mark.parametrize("rows", [4, 9])
@pytest.mark.parametrize("terms", [1, 12, 33])
def test_bf16_pair_attention_kernels_run_on_numpy(rows, terms):
    """The loop IR means the same without the unit: few rows and many, and a last term without a partner."""
    module = parse_module(KERNEL)
    kernel = lower_region(module.functions["k"], TARGET)
    q, k, v = heads((rows, 16), (terms, 16), (terms, 16))
    out = np.ones_like(q)
    run_kernel(kernel, [q, k, v, out], {"t": rows, "s": terms})
    (wanted,) = interpret(module, q, k, v, function="k")
    np.testing.assert_allclose(out.astype("f4"), wanted.astype("f4"), atol=4 * ROUNDED * 3, rtol=0)


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32", "f64"])
def test_attention_of_few_rows_prefetches_keys_and_values_without_a_copy(dtype):
    """Without a copy, and fetch them before they are multiplied."""
    kernel = lower_region(parse_module(KERNEL.replace("bf16", dtype).replace("[t,", "[3,")).functions["k"], TARGET)
    shapes = {s.buffer.shape for s in walk(kernel.body) if isinstance(s, Alloc) and s.buffer.space == "scratch"}
    assert shapes == {(3,), (3, 16), (3, 256)}
    fetched = {s.buffer for s in walk(kernel.body) if isinstance(s, Prefetch)}
    zipped = {s.b for s in walk(kernel.body) if isinstance(s, Tile) and s.b_inner != 0}  # which fetches by itself
    assert fetched | zipped == set(kernel.inputs[1:])


def test_f16_values_are_copied_if_the_target_cannot_widen_them():
    text = KERNEL.replace("bf16", "f16").replace("[t,", "[9,")
    kernel = lower_region(parse_module(text).functions["k"], TARGETS["cpu:x86-64-v2"])
    tiles = [s for s in walk(kernel.body) if isinstance(s, Tile)]
    assert {(tile.form.name, tile.b.space) for tile in tiles} == {("f32", "scratch")}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize(("rows", "depth"), [(1, 16), (3, 24), (4, 40), (2, 7)])
def test_attention_of_few_rows_matches_f64(rows, depth, dtype):
    """Scores are sums of vectors, of what is left of a depth, and of terms that are no multiple of a turn's."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    arguments = heads((1, rows, 2, depth), (1, 515, 2, depth), (1, 515, 2, depth), dtype=kind)
    function = lambda q, k, v: by_hand(q, k, v)
    with jax.enable_x64(True):
        found = aotc.load(aotc.compile(jax.jit(function), *arguments, verify_each=True), threads=2)(*arguments)
    bound = {"bfloat16": 2.0**-7, "float16": 2.0**-9, "float32": 1e-6, "float64": 1e-14}[dtype]
    assert abs(found.astype("f8") - exact(function, arguments)).max() < bound


@pytest.mark.skipif(not can_play, reason="the instructions are played by an x86 processor")
@pytest.mark.parametrize(("rows", "terms"), [(13, 40), (20, 33)])
def test_bf16_pair_attention_kernels_for_aarch64_run_on_numpy(rows, terms):
    """Scores by two keys and two queries at a time, weights and values by pairs."""
    target = TARGETS["cpu:aarch64-bf16"]
    text = KERNEL.replace("[t,", f"[{rows},").replace("[s,", f"[{terms},")
    module = parse_module(text)
    kernel = lower_region(module.functions["k"], target)
    q, k, v = heads((rows, 16), (terms, 16), (terms, 16))
    out = np.ones_like(q)
    assert run_played(kernel, target, [q, k, v, out]) == {"bfmmla", "bfdot"}
    (wanted,) = interpret(module, q, k, v, function="k")
    np.testing.assert_allclose(out.astype("f4"), wanted.astype("f4"), atol=4 * ROUNDED * 3, rtol=0)
