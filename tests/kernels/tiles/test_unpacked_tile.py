"""Tiles whose right operand lies as a model has it: dot products of rows, and pairs of terms of two rows."""

from __future__ import annotations

from dataclasses import replace

import llvmlite.binding as llvm
import numpy as np
import pytest
from kernels.tiles.test_tile import RUNNABLE, Native, build, check, machine, numbers

from aotc.diagnostics import InternalError
from aotc.ir.dims.algebra import sym
from aotc.ir.loop.forms.tile_forms import FORMS
from aotc.ir.loop.ir import Buffer, Kernel, Tile
from aotc.ir.loop.parser import parse_kernel
from aotc.ir.loop.printer import print_kernel
from aotc.ir.loop.run import run_kernel
from aotc.kernels.cpu.tiles.tile import ZIPPED_PREFETCH_BYTES
from aotc.targets import TARGETS, Target
from aotc.vmfb.dtypes import to_numpy

pytestmark = pytest.mark.cpu
DOTS = ("f32", "f64", "f32_bf16", "f32_f16", "f32_s8", "bf16")
PAIRS = TARGETS["cpu:x86-64-v4-bf16"]
APART = 200  # from a row of ``b`` to the next


def has(form: str, target: Target) -> bool:
    return not (form == "bf16" and "bf16" not in target.units) and not (form == "f32_f16" and "f16" in target.lacks)


def dots(form: str, rows: int, cols: int, k: int) -> Tile:
    group, (left, right) = FORMS[form].group, (FORMS[form].left, FORMS[form].right)
    return Tile(
        rows, cols, Buffer("out", FORMS[form].out, (rows, cols + 3)), 0, cols + 3, Buffer("a", left, (rows, k)), 0, k,
        Buffer("b", right, (cols, APART)), 0, ((k // group, group, group),), FORMS[form], b_column=APART,
    )  # fmt: skip


def zipped(rows: int, cols: int, k: int) -> Tile:
    return Tile(
        rows, cols, Buffer("out", "f32", (rows, cols)), 0, cols, Buffer("a", "bf16", (rows, k)), 0, k,
        Buffer("b", "bf16", (k, APART)), 0, ((k // 2, 2, 2 * APART),), FORMS["bf16"], b_inner=APART,
    )  # fmt: skip


def operands(tile: Tile, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(k)
    a, b = numbers(rng, (tile.rows, k), tile.a.dtype), numbers(rng, tuple(tile.b.shape), tile.b.dtype)
    return a, b, np.full(tile.out.shape, 7, to_numpy(tile.out.dtype))


@pytest.mark.parametrize("target", RUNNABLE, ids=lambda t: t.name)
@pytest.mark.parametrize("form", DOTS)
@pytest.mark.parametrize(("rows", "cols", "k"), [(1, 1, 64), (4, 4, 128), (3, 3, 40), (5, 4, 6), (8, 2, 70), (2, 4, 8)])
def test_dot_products(form: str, rows: int, cols: int, k: int, target: Target) -> None:
    """More products than lanes and fewer, terms that fill no vector; what lies beside the results stays."""
    if not has(form, target):
        pytest.skip("has no instruction for it")
    tile = dots(form, rows, cols, k)
    a, b, out = operands(tile, k)
    Native(build([tile], target), target)(a, b, out)
    check(out[:, :cols], a, b[:, :k].T)
    assert (out[:, cols:] == 7).all()


@pytest.mark.parametrize("form", ["f32", "bf16"])
def test_a_dot_product_is_the_same_in_every_tile(form: str) -> None:
    target = PAIRS if PAIRS in RUNNABLE else RUNNABLE[-1]
    if not has(form, target):
        pytest.skip("has no instruction for it")
    whole, one = dots(form, 4, 4, 72), dots(form, 1, 1, 72)
    a, b, out = operands(whole, 72)
    Native(build([whole], target), target)(a, b, out)
    single, alone = np.zeros((1, 4), np.float32), Native(build([one], target), target)
    for i, j in np.ndindex(4, 4):
        alone(a[i:], b[j:], single)
        assert single[0, 0] == out[i, j]


@pytest.mark.skipif(PAIRS not in RUNNABLE, reason="this machine does not multiply pairs of bf16")
@pytest.mark.parametrize(("rows", "cols", "k"), [(4, 64, 8), (1, 32, 2), (8, 32, 16), (3, 96, 10)])
def test_pairs_of_rows(rows: int, cols: int, k: int) -> None:
    tile = zipped(rows, cols, k)
    a, b, out = operands(tile, k)
    Native(build([tile], PAIRS), PAIRS)(a, b, out)
    check(out, a, b[:, :cols])


def test_pairs_of_rows_fetch_what_is_behind_them() -> None:
    text = str(build([zipped(4, 64, 8)], PAIRS))
    assert f"i64 {ZIPPED_PREFETCH_BYTES}" in text
    far = str(build([replace(zipped(4, 64, 8), levels=((4, 2, 20000),), b_inner=10000)], PAIRS))
    assert f"i64 {4 * 20000 * 2}" in far
    assert "llvm.prefetch" not in str(build([dots("f32", 4, 4, 64)], PAIRS))


def test_strides_that_only_a_call_knows() -> None:
    target, n = RUNNABLE[-1], sym("n")
    tile = replace(dots("f32", 2, 3, 20), b_column=n)
    a, b, out = operands(tile, 20)
    Native(build([tile], target, ("n",)), target)(a, b, out, APART)
    check(out[:, :3], a, b[:, :20].T)


@pytest.mark.parametrize("name", ["cpu:aarch64", "cpu:aarch64-bf16", "cpu:aarch64-sve256"])
def test_unpacked_tiles_compile_for_aarch64(name: str) -> None:
    target = TARGETS[name]
    tiles = [dots(form, 4, 4, 40) for form in DOTS if has(form, target)]
    tiles += [zipped(4, 4 * target.vector_bytes // 4, 8)] if has("bf16", target) else []
    module = build(tiles, target)
    assert "x86" not in str(module).replace(target.triple, "")
    assert ("bfdot" in str(module)) == has("bf16", target)
    if "sve" not in name:
        assert len(machine(target).emit_object(llvm.parse_assembly(str(module)))) > 0


@pytest.mark.parametrize("wrong", [
    dots("i8", 2, 2, 16), replace(dots("f32", 2, 2, 16), levels=((2, 8, 8), (8, 1, 1))), zipped(2, 16, 4),
    replace(dots("f32", 2, 2, 16), levels=((sym("n"), 1, 1),)),
])  # fmt: skip
def test_impossible_unpacked_tiles_are_refused(wrong: Tile) -> None:
    with pytest.raises(InternalError, match="tile"):
        build([wrong], PAIRS)


def on_numpy(tile: Tile) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return operands and the result of a tile, which reads back as it is printed, as the loop IR means it."""
    named = replace(tile, out=replace(tile.out, name="o0"), a=replace(tile.a, name="a0"), b=replace(tile.b, name="a1"))
    kernel = Kernel("k", (named.a, named.b), (named.out,), (), 1, (named,))
    assert parse_kernel(print_kernel(kernel)) == kernel
    k = tile.a.shape[1]
    a, b, out = operands(tile, k)
    run_kernel(kernel, [a, b, out], {})
    return a, b, out


@pytest.mark.parametrize("tile", [dots("bf16", 3, 4, 10), dots("f32_s8", 2, 2, 9), zipped(3, 32, 6)])
def test_unpacked_tiles_agree_with_the_interpreter(tile: Tile) -> None:
    """And read back as they are printed."""
    a, b, out = on_numpy(tile)
    k = tile.a.shape[1]
    check(out[:, : tile.cols], a, b[:, :k].T if tile.b_column else b[:, : tile.cols])
