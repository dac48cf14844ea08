"""Attention lowered for GPUs: what the loops mean beside the op's reference, and which tiles compute them."""

import ml_dtypes
import numpy as np
import pytest

from aotc.ir.loop.forms.attention import attention_shared
from aotc.ir.loop.forms.tiling import DecodeAttention, MmaAttention, Tiling, WgmmaAttention
from aotc.ir.loop.parser import parse_kernel
from aotc.ir.loop.printer import print_kernel
from aotc.ir.loop.run import run_kernel
from aotc.ir.opset.attention import ATTENTION
from aotc.ir.tensor.ir import TensorType
from aotc.ir.tensor.text import parse_module
from aotc.lowering.plans.attention import gpu as gpu_attention
from aotc.lowering.plans.attention.gpu_decode import split_kv_part_terms
from aotc.lowering.plans.attention.gpu_tiles import attention_tiling
from aotc.lowering.plans.attention.sizes import attention_sizes
from aotc.lowering.regions.lower_region import lower_region
from aotc.targets import TARGETS

pytestmark = pytest.mark.ir

TARGET = TARGETS["cuda:sm_90a"]
OLDER = TARGETS["cuda:sm_80"]
KINDS = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16, "i1": np.bool_}
HEADS = {"q_dims": (0, 1, 2, 3), "k_dims": (0, 1, 2, 3), "v_dims": (0, 1, 2, 3), "out_dims": (0, 1, 2, 3)}
TOKENS = {"q_dims": (0, 2, 1, 3), "k_dims": (0, 2, 1, 3), "v_dims": (0, 2, 1, 3), "out_dims": (0, 2, 1, 3)}
GROUPS = {
    "q_dims": (0, 1, 2, 3, 4), "k_dims": (0, 1, -1, 2, 3), "v_dims": (0, 1, -1, 2, 3), "out_dims": (0, 1, 2, 3, 4),
}  # fmt: skip
MINUS = -float(np.finfo(np.float32).max) * 0.7

# Attributes, and the shapes of operands.
CASES = {
    "heads": (HEADS, [(2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 16)]),
    "tokens": (TOKENS, [(2, 5, 3, 8), (2, 7, 3, 8), (2, 7, 3, 8)]),
    "causal": ({**TOKENS, "causal": (0,), "fill": MINUS}, [(2, 5, 3, 8), (2, 7, 3, 8), (2, 7, 3, 8)]),
    "causal, rows of none": ({**HEADS, "causal": (-2,), "fill": -np.inf}, [(1, 2, 5, 8), (1, 2, 7, 8), (1, 2, 7, 8)]),
    "causal, rows of all": ({**HEADS, "causal": (-2,), "fill": -1e9}, [(1, 2, 5, 8), (1, 2, 7, 8), (1, 2, 7, 8)]),
    "groups": (GROUPS, [(2, 2, 3, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8)]),
    "a query of groups": ({**GROUPS, "causal": (4,), "fill": -np.inf}, [(2, 2, 3, 1, 8), (2, 2, 7, 8), (2, 2, 7, 8)]),
    "bias": ({**HEADS, "bias_dims": (-1, 0, 1, 2)}, [(2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8), (3, 5, 7)]),
    "mask": (
        {**HEADS, "mask_dims": (0, -1, -1, 1), "fill": MINUS}, [(2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8), (2, 7)],
    ),
    "a query of groups, masked": (
        {**GROUPS, "mask_dims": (0, -1, -1, -1, 1), "fill": MINUS},
        [(2, 2, 3, 1, 8), (2, 2, 7, 8), (2, 2, 7, 8), (2, 7)],
    ),
    "parts": (
        {**TOKENS, "part": 64, "causal": (100,), "fill": -np.inf}, [(2, 5, 3, 8), (2, 200, 3, 8), (2, 200, 3, 16)],
    ),
    "parts of groups": ({**GROUPS, "part": 64}, [(2, 2, 3, 1, 8), (2, 2, 100, 8), (2, 2, 100, 8)]),
    "no heads": (
        {"q_dims": (0, 1), "k_dims": (0, 1), "v_dims": (0, 1), "out_dims": (0, 1)}, [(5, 8), (7, 8), (7, 8)],
    ),
}  # fmt: skip


def attributes(given):
    return {"bias_dims": (), "mask_dims": (), "scale": 0.5, "fill": -np.inf, "causal": (), **given}


def region(given, shapes, dtype="bf16"):
    """Return the function of a region, and its attributes."""
    attrs = attributes(given)
    kinds = [dtype] * 3 + [dtype] * bool(attrs["bias_dims"]) + ["i1"] * bool(attrs["mask_dims"])
    names = [f"%p{n}: {kind}[{', '.join(map(str, s))}]" for n, (kind, s) in enumerate(zip(kinds, shapes))]
    types = tuple(TensorType(kind, tuple(s)) for kind, s in zip(kinds, shapes))
    result = ", ".join(map(str, ATTENTION["attention"].infer(types, attrs, (), ())))
    text = ", ".join(f"{name} = {_text(value)}" for name, value in attrs.items())
    made = "%0, %1" if "part" in attrs else "%0"
    operands = ", ".join(f"%p{n}" for n in range(len(shapes)))
    return (
        parse_module(
            f'module @main {{\nfunc @k({", ".join(names)}) attributes {{kind = "single"}} {{\n'
            f"  {made} = attention {operands} {{{text}}} : {result}\n  return {made}\n}}\n}}\n"
        ).functions["k"],
        attrs,
        types,
    )


def _text(value):
    return repr(value) if isinstance(value, tuple | int) else repr(float(value))


def arrays_of(types, seed=0):
    random = np.random.default_rng(seed)
    draw = {"i1": lambda s: random.random(s) < 0.7}
    return [draw.get(t.dtype, random.standard_normal)(t.shape).astype(KINDS[t.dtype]) for t in types]


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("name", CASES)
def test_loops_agree_with_the_reference(name, dtype):
    function, attrs, types = region(*CASES[name], dtype)
    kernel = lower_region(function, TARGET)
    assert parse_kernel(print_kernel(kernel)) == kernel
    arrays = arrays_of(types)
    if attrs["mask_dims"]:
        arrays[-1][0] = False  # nothing is allowed
    want = ATTENTION["attention"].reference(arrays, attrs, (), [v.type for v in function.body.results])
    got = [np.full(w.shape, 99, w.dtype) for w in want]
    run_kernel(kernel, [*arrays, *got])
    for g, w in zip(got, want):
        np.testing.assert_allclose(g.astype("f4"), w.astype("f4"), atol=0.03 if dtype == "bf16" else 2e-3)


@pytest.mark.parametrize(
    ("given", "shape", "tiling"),
    [
        (HEADS, (8, 16, 1024, 64), Tiling(WgmmaAttention(), 192, 128, 2)),
        ({**HEADS, "causal": (0,)}, (8, 16, 1024, 64), Tiling(WgmmaAttention(), 128, 128, 2)),
        ({**HEADS, "causal": (0,)}, (8, 16, 4096, 64), Tiling(WgmmaAttention(), 192, 128, 2)),
        ({**HEADS, "causal": (0,), "fill": -1e9}, (8, 16, 4096, 64), Tiling(WgmmaAttention(), 128, 128, 2)),
        (HEADS, (8, 16, 1024, 128), Tiling(WgmmaAttention(), 128, 128, 2)),
        (HEADS, (8, 16, 1024, 256), Tiling(WgmmaAttention(), 128, 64, 2)),
        (HEADS, (8, 16, 1, 128), Tiling(DecodeAttention(), 128, 16, 3)),
        (HEADS, (8, 16, 1, 64), Tiling(DecodeAttention(), 128, 32, 3)),
    ],
)
def test_tiles_by_size(given, shape, tiling):
    sizes = attention_sizes((TensorType("bf16", shape),) * 3, attributes(given))
    assert attention_tiling(sizes, TARGET) == tiling


@pytest.mark.parametrize(
    ("shape", "tiling"),
    [
        ((8, 12, 1024, 64), Tiling(MmaAttention(), 128, 64, 2)),
        ((8, 12, 1024, 128), Tiling(MmaAttention(), 128, 32, 2)),
        ((1, 6, 128, 64), Tiling(MmaAttention(), 32, 32, 2)),
        ((8, 16, 1, 64), Tiling(DecodeAttention(), 128, 16, 3)),
        ((8, 16, 1, 128), Tiling(DecodeAttention(), 64, 16, 3)),
        ((8, 16, 1, 256), Tiling(DecodeAttention(), 32, 16, 3)),
        ((8, 12, 1024, 256), Tiling(MmaAttention(), 128, 16, 2)),
    ],
)
def test_tiles_of_f32(shape, tiling):
    sizes = attention_sizes((TensorType("f32", shape),) * 3, attributes(HEADS))
    assert attention_tiling(sizes, TARGET) == tiling


@pytest.mark.parametrize(
    ("dtype", "depth", "tiling"),
    [("bf16", 128, Tiling(MmaAttention(), 16, 32, 3)), ("bf16", 64, Tiling(MmaAttention(), 16, 64, 3)),
     ("f32", 64, Tiling(MmaAttention(), 16, 32, 3)), ("f32", 128, Tiling(MmaAttention(), 16, 16, 3)),
     ("f32", 256, Tiling(MmaAttention(), 16, 16, 3))],
)  # fmt: skip
def test_few_queries_without_clusters(dtype, depth, tiling):
    sizes = attention_sizes((TensorType(dtype, (8, 16, 1, depth)),) * 3, attributes(HEADS))
    assert attention_tiling(sizes, OLDER) == tiling


@pytest.mark.parametrize(
    ("heads", "terms", "part"),
    [(12, 1024, 64), (64, 8192, 1376), (128, 4096, 1376), (396, 8192, 0), (1, 130, 0), (1, 1000, 96)],
)
def test_parts_fill_the_gpu(heads, terms, part):
    """Of warps alone three blocks on each of 132 multiprocessors; few terms are read faster than parts put together."""
    shapes = [TensorType("bf16", (heads, n, 128)) for n in (1, terms, terms)]
    dims = {f"{x}_dims": (0, 1, 2) for x in ("q", "k", "v", "out")}
    assert split_kv_part_terms(attention_sizes(tuple(shapes), attributes(dims)), OLDER) == part


def of_few(heads, rows, terms, depth, dtype="bf16"):
    shapes = [TensorType(dtype, (heads, n, depth)) for n in (rows, terms, terms)]
    dims = {f"{x}_dims": (0, 1, 2) for x in ("q", "k", "v", "out")}
    return attention_sizes(tuple(shapes), attributes(dims))


@pytest.mark.parametrize(
    ("given", "tiling", "part"),
    [
        ((64, 4, 8192, 128), Tiling(DecodeAttention(2), 128, 16, 3), 0),
        ((128, 1, 4096, 64), Tiling(DecodeAttention(), 128, 32, 3), 0),
        ((8, 4, 32768, 128), Tiling(DecodeAttention(8), 128, 16, 3), 0),
        ((8, 4, 4096, 128), Tiling(DecodeAttention(8), 128, 16, 3), 0),
        ((32, 1, 2048, 128, "f32"), Tiling(DecodeAttention(2), 64, 16, 3), 0),
        ((12, 1, 1024, 64, "f32"), Tiling(DecodeAttention(8), 128, 16, 3), 0),
        ((32, 1, 2048, 256, "f32"), Tiling(DecodeAttention(), 32, 16, 3), 512),
        ((12, 1, 64, 64), Tiling(DecodeAttention(), 128, 32, 3), 0),
    ],
)
def test_few_queries_by_clusters(given, tiling, part):
    """No more blocks than are there at a time; parts for other kernels only where a cluster's blocks are too few."""
    sizes = of_few(*given)
    assert attention_tiling(sizes, TARGET) == tiling
    assert sizes.shared_memory_bytes(attention_tiling(sizes, TARGET)) <= TARGET.shared_memory
    assert split_kv_part_terms(sizes, TARGET) == part
    assert attention_tiling(sizes, TARGETS["cuda:sm_80"]).template == MmaAttention()


@pytest.mark.parametrize("name", ["a query of groups", "mask", "parts"])
def test_clusters_are_asked_for_in_the_kernel(name):
    kernel = lower_region(region(*CASES[name])[0], TARGET)
    assert isinstance(kernel.tiling.template, DecodeAttention)
    assert parse_kernel(print_kernel(kernel)) == kernel


def test_operands_that_no_tensor_map_describes_are_copied_by_lanes(monkeypatch):
    monkeypatch.setattr(
        gpu_attention, "are_operands_async_copyable", lambda _, tiling: tiling.template == MmaAttention()
    )
    kernel = lower_region(region(*CASES["groups"])[0], TARGET)
    assert kernel.tiling.template == MmaAttention()


def test_tiles_fit_the_shared_memory_limit():
    """Of any limit: what does not fit is no attention, and stays two products and a softmax."""
    sizes = attention_sizes((TensorType("bf16", (8, 16, 1024, 128)),) * 3, attributes(HEADS))
    for limit in (4096, 48 << 10, 100 << 10, 0):
        target = TARGET.with_limits(0, limit)
        tiling = attention_tiling(sizes, target)
        assert (tiling is None) == (limit in (4096, 48 << 10))
        assert tiling is None or attention_shared(tiling, 128, 128) <= target.shared_memory


@pytest.mark.parametrize(
    ("dtype", "depth", "precision"),
    [("f64", 64, "DEFAULT"), ("f32", 264, "DEFAULT"), ("f32", 64, "HIGHEST"), ("bf16", 60, "DEFAULT"),
     ("f16", 264, "DEFAULT")],
)  # fmt: skip
def test_templates_refuse_other_dtypes_depths_and_precisions(dtype, depth, precision):
    attrs = attributes({**HEADS, "precision": precision})
    assert attention_sizes((TensorType(dtype, (8, 16, 1024, depth)),) * 3, attrs) is None
