"""How a product is computed: one decision, by size, dtypes and how the right operand lies."""

import pytest

from aotc.ir.dims.algebra import sym
from aotc.ir.loop.forms.tile_forms import BF16_PAIRS, F32, F64
from aotc.ir.tensor.ir import Op, TensorType, Value
from aotc.lowering.passes.pack_contractions.pack_contractions import tile_form_of_dtypes
from aotc.lowering.plans.cpu_tiles import in_place_cols
from aotc.lowering.plans.gpu_contract import BLOCKS, SKINNY, best_thread_block
from aotc.lowering.plans.matmul import (
    STREAM_ROWS,
    THIN_ROWS,
    TINY_FLOPS,
    conv_strategy,
    is_tiny_matmul,
    matmul_strategy,
    reads_operand_once,
)
from aotc.targets import resolve_targets

pytestmark = pytest.mark.ir

CPU, GPU = (resolve_targets(name)[0] for name in ("cpu:x86-64-v4", "cuda:sm_90"))
PAIRS = resolve_targets("cpu:x86-64-v4-bf16")[0]
B = sym("b")
STRATEGIES = {
    "constant-weights": ((128, 64, 768), "f32", False, True, "packed"),
    "unaligned-columns": ((128, 64, 70), "f32", False, False, "packed"),
    "large-right-operand": ((128, 512, 768), "f32", False, False, "packed"),
    "small-right-operand": ((128, 64, 96), "f32", False, False, "in_place"),
    "few-rows": ((THIN_ROWS.value, 512, 768), "f32", False, False, "sums"),
    "few-rows-near": ((STREAM_ROWS.value, 256, 256), "f32", False, False, "in_place"),
    "few-rows-of-columns": ((THIN_ROWS.value, 512, 768), "f32", True, False, "dots"),
    "few-rows-by-columns": ((STREAM_ROWS.value, 512, 768), "f32", True, True, "dots"),
    "rows-by-columns": ((STREAM_ROWS.value + 1, 512, 768), "f32", True, True, "packed"),
    "any-rows": ((B, 64, 96), "f32", False, False, "in_place"),
    "any-columns": ((128, 64, B), "f32", False, False, "copied"),
    "any-terms": ((128, B, 96), "f32", False, False, "copied"),
    "any-terms-converted": ((128, B, 96), "bf16", False, False, "copied"),
    "few-rows-unaligned-columns": ((STREAM_ROWS.value, 512, 70), "f32", False, False, "sums"),
    "few-rows-any-columns": ((STREAM_ROWS.value, 512, B), "f32", False, False, "sums"),
    "rows-unaligned-columns": ((THIN_ROWS.value + 1, 512, 70), "f32", False, False, "packed"),
    "tiny-many-terms": ((1, 50, 80), "f32", False, True, "sums"),
    "tiny-more-rows": ((8, 60, 8), "f32", False, False, "sums"),
    "tiny-by-columns": ((8, 60, 8), "f32", True, False, "loops"),
    "tiny-of-integers": ((8, 60, 8), "i32", False, False, "loops"),
    "tiny-unrolled-terms": ((1, 49, 80), "f32", False, True, "loops"),
    "tiny": ((8, 8, 16), "f32", False, True, "loops"),
    "no-terms": ((128, 0, 96), "f32", False, True, "loops"),
    "no-rows": ((0, 64, 96), "f32", False, True, "loops"),
    "integers": ((128, 64, 96), "i32", False, True, "packed"),
    "bytes": ((128, 64, 96), "i8", False, True, "packed"),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_matmuls_have_the_strategy_for_their_size_and_dtype(name):
    (m, k, n), dtype, by_columns, constant, strategy = STRATEGIES[name]
    result = TensorType({"i8": "i32"}.get(dtype, dtype), (m, n))
    lhs = Value("a", TensorType(dtype, (m, k)))
    rhs = Value("b", TensorType(dtype, (n, k) if by_columns else (k, n)))
    op = Op("matmul", (lhs, rhs), (Value("c", result),), {"lhs_transposed": False, "rhs_transposed": by_columns})
    assert matmul_strategy(op, tile_form_of_dtypes(dtype, dtype, result.dtype, CPU), constant, CPU) == strategy


FEW, SMALL = STREAM_ROWS.value, 64
PAIRED = {  # the shape, are columns contiguous, is the right operand constant; beside what a CPU without the unit does
    "few-rows": ((FEW, 512, 768), False, False, "sums", "sums"),
    "few-rows-by-columns": ((FEW, 512, 768), True, False, "dots", "dots"),
    "few-rows-by-constant-columns": ((FEW, 512, 768), True, True, "packed", "dots"),
    "more-rows": ((THIN_ROWS.value + 1, 512, 768), True, False, "packed", "packed"),
    "small": ((128, SMALL, 96), False, False, "packed", "in_place"),
    "small-odd": ((128, SMALL + 1, 96), False, False, "in_place", "in_place"),
    "large-odd": ((128, 769, 768), False, False, "packed", "packed"),
    "any-rows": ((B, SMALL, 96), False, False, "packed", "in_place"),
    "any-columns": ((128, SMALL, B), False, False, "copied", "copied"),
    "any-terms": ((128, B, 2048), False, False, "copied", "copied"),
    "tiny": ((8, 8, 16), False, True, "loops", "loops"),
}


@pytest.mark.parametrize("name", PAIRED)
def test_bf16_matmuls_have_the_strategy_for_their_size(name):
    (m, k, n), by_columns, constant, *strategies = PAIRED[name]
    lhs, rhs = Value("a", TensorType("bf16", (m, k))), Value("b", TensorType("bf16", (n, k) if by_columns else (k, n)))
    flags = {"lhs_transposed": False, "rhs_transposed": by_columns}
    op = Op("matmul", (lhs, rhs), (Value("c", TensorType("bf16", (m, n))),), flags)
    for target, strategy in zip((PAIRS, CPU), strategies, strict=True):
        assert matmul_strategy(op, tile_form_of_dtypes("bf16", "bf16", "bf16", target), constant, target) == strategy


def test_dot_product_instructions_decide_the_tile_form():
    forms = [tile_form_of_dtypes("bf16", "bf16", result, PAIRS) for result in ("bf16", "f32", "f64")]
    assert forms == [BF16_PAIRS, BF16_PAIRS, F64]
    assert tile_form_of_dtypes("bf16", "f32", "f32", PAIRS) == tile_form_of_dtypes("f16", "f16", "f16", PAIRS) == F32
    assert tile_form_of_dtypes("bf16", "bf16", "bf16", CPU) == F32


@pytest.mark.parametrize(
    ("dtype", "groups", "channels", "strategy"),
    [
        ("f32", 1, 8, "packed"),
        ("f32", 2, 8, "packed"),
        ("f32", 16, 5, "loops"),
        ("f32", 16, 6, "packed"),
        ("i32", 1, 8, "packed"),
        ("f32", 1, B, "packed"),
        ("f32", 2, B, "loops"),
        ("i32", 1, B, "packed"),
        ("f64", 1, 0, "loops"),
    ],
)
def test_convolutions_have_the_strategy_for_their_groups(dtype, groups, channels, strategy):
    lhs, rhs = TensorType(dtype, (1, 9, 9, channels)), TensorType(dtype, (3, 3, channels, 16))
    result = Value("c", TensorType(dtype, (1, 7, 7, 16)))
    op = Op("conv", (Value("a", lhs), Value("b", rhs)), (result,), {"feature_groups": groups})
    assert conv_strategy(op, tile_form_of_dtypes(dtype, dtype, dtype, CPU)) == strategy


def test_convolutions_of_tiny_groups_use_loops():
    lhs, rhs = TensorType("f32", (1, 4, 4, 16)), TensorType("f32", (3, 3, 8, 16))
    for pixels, strategy in ((1, "loops"), (2, "packed")):
        result = Value("c", TensorType("f32", (1, 2, pixels, 16)))
        op = Op("conv", (Value("a", lhs), Value("b", rhs)), (result,), {"feature_groups": 2})
        assert conv_strategy(op, F32) == strategy


def test_an_unknown_size_counts_as_large():
    assert reads_operand_once(STREAM_ROWS.value)
    assert not reads_operand_once(STREAM_ROWS.value + 1)
    assert not reads_operand_once(B)
    assert is_tiny_matmul((1, 1), TINY_FLOPS.value // 2)
    assert not is_tiny_matmul((1, 1), TINY_FLOPS.value // 2 + 1)
    assert not is_tiny_matmul((1, B), 1)
    assert is_tiny_matmul((0, B), 1)


@pytest.mark.parametrize("n", [16, 48, 96, 112, 768])
def test_tiles_over_unpacked_operands_divide_the_columns(n):
    cols = in_place_cols(128, n, 64, F32, CPU)
    assert n % cols == 0
    assert cols % 16 == 0


def test_gpu_blocks_are_chosen_by_matmul_size():
    assert best_thread_block((), 4096, 4096, 512, 4, GPU) == BLOCKS[0]
    assert best_thread_block((64,), 128, 64, 512, 4, GPU) == BLOCKS[1]
    assert best_thread_block((), 64, 64, 512, 4, GPU) == BLOCKS[-1]
    assert best_thread_block((), B, 64, 512, 4, GPU) == BLOCKS[1]
    assert best_thread_block((), 1, 4096, 512, 4, GPU) == SKINNY
    assert best_thread_block((), 1, 4096, 64, 4, GPU) is None
    assert best_thread_block((), 4096, 8, 512, 4, GPU) is None


def test_gpu_blocks_fit_the_shared_memory():
    for size in (4, 8, 16):
        for room in (1 << 10, 20 << 10, 40 << 10, 0):
            block = best_thread_block((), 4096, 4096, 512, size, GPU.with_limits(0, room))
            assert block is None or block.elements * size <= (room or 48 << 10)
    assert best_thread_block((), 4096, 4096, 512, 4, GPU.with_limits(0, 1 << 10)) is None
    assert best_thread_block((), 4096, 4096, 512, 8, GPU) in BLOCKS[1:]
