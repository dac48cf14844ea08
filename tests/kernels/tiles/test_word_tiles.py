"""Tiles of words of a right operand that lies as a model has it, and tiles that add to what is there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kernels.tiles.test_tile import RUNNABLE, Native, build, check
from kernels.tiles.test_unpacked_tile import APART, PAIRS, dots, on_numpy, operands, zipped

from aotc.diagnostics import InternalError
from aotc.ir.loop.forms.tile_forms import FORMS
from aotc.ir.loop.ir import Buffer, Tile
from aotc.targets import TARGETS, Target

pytestmark = pytest.mark.cpu
QUADS = [t for t in RUNNABLE if "i8" in t.units]


def lanes(target: Target) -> int:
    return target.vector_bytes // 4


def rows_of_quads(rows: int, k: int, target: Target, adds: bool = True) -> Tile:
    cols = 4 * lanes(target)
    return Tile(
        rows, cols, Buffer("out", "i32", (rows, cols)), 0, cols, Buffer("a", "i8", (rows, k)), 0, k,
        Buffer("b", "i8", (k, APART)), 0, ((k // 4, 4, 4 * APART),), FORMS["i8_o8"], b_inner=APART, adds=adds,
    )  # fmt: skip


def moved(x: np.ndarray) -> np.ndarray:
    return x.astype(np.int32) + 128


@pytest.mark.parametrize("target", QUADS, ids=lambda t: t.name)
@pytest.mark.parametrize(("rows", "k"), [(1, 16), (3, 64), (13, 48), (16, 128), (24, 64)])
def test_tiles_transpose_words_of_the_right_operand(rows: int, k: int, target: Target) -> None:
    """One chain of sums for each row, and two where there are registers."""
    tile = dots("i8_o8", rows, lanes(target), k)
    a, b, out = operands(tile, k)
    Native(build([tile], target), target)(a, b, out)
    check(out[:, : lanes(target)], a, moved(b[:, :k].T))
    assert (out[:, lanes(target) :] == 7).all()


@pytest.mark.skipif(PAIRS not in RUNNABLE, reason="this machine does not multiply pairs of bf16")
@pytest.mark.parametrize(("rows", "cols", "k"), [(8, 16, 64), (14, 16, 8), (3, 16, 136), (3, 16, 10), (3, 15, 64)])
def test_pairs_are_turned_for_as_many_columns_as_lanes(rows: int, cols: int, k: int) -> None:
    """And for others added up across registers."""
    tile = dots("bf16", rows, cols, k)
    a, b, out = operands(tile, k)
    native = Native(build([tile], PAIRS), PAIRS)
    native(a, b, out)
    check(out[:, :cols], a, b[:, :k].T)
    assert ("{1to16}" in native.assembly) == ((cols, k % 8) == (16, 0))


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("target", QUADS, ids=lambda t: t.name)
@pytest.mark.parametrize(("rows", "k"), [(1, 4), (2, 8), (8, 8), (16, 32), (24, 8)])
def test_quads_of_rows(rows: int, k: int, target: Target, adds: bool) -> None:
    """Of four, two vectors of columns or one at a time."""
    tile = rows_of_quads(rows, k, target, adds)
    a, b, out = operands(tile, k)
    Native(build([tile], target), target)(a, b, out)
    check(out - 7 * adds, a, moved(b[:, : tile.cols]))


def packed(form: str, target: Target) -> Tile:
    cols = 2 * lanes(target)
    out = Buffer("out", "f32", (3, cols))
    return Tile(
        3, cols, out, 0, cols, Buffer("a", "f32", (3, 5)), 0, 5, Buffer("b", form, (5, cols)), 0, ((5, 1, cols),)
    )


@pytest.mark.parametrize("target", RUNNABLE, ids=lambda t: t.name)
def test_tiles_add_to_the_old_result(target: Target) -> None:
    tiles = [(packed("f32", target), 5)] + ([(zipped(4, 64, 8), 8)] if target is PAIRS else [])
    for tile, k in tiles:
        a, b, out = operands(tile, k)
        Native(build([replace(tile, adds=True)], target), target)(a, b, out)
        check(out - 7, a, b[:, : tile.cols])


@pytest.mark.parametrize("tile", [
    dots("i8_o8", 2, 16, 16), rows_of_quads(3, 8, PAIRS), replace(zipped(3, 32, 6), adds=True),
])  # fmt: skip
def test_word_tiles_agree_with_the_interpreter(tile: Tile) -> None:
    """And read back as they are printed."""
    a, b, out = on_numpy(tile)
    k = tile.a.shape[1]
    right = moved(b) if tile.form.offset else b
    check(out[:, : tile.cols] - 7 * tile.adds, a, right[:, :k].T if tile.b_column else right[:, : tile.cols])


@pytest.mark.parametrize(("wrong", "target"), [
    (dots("i8_o8", 2, 4, 16), PAIRS), (dots("i8_o8", 2, 16, 20), PAIRS),
    (replace(packed("i8", PAIRS), form=FORMS["i8_o8"]), PAIRS),
    (dots("i8_o8", 2, 16, 16), TARGETS["cpu:x86-64-v4"]), (rows_of_quads(2, 8, PAIRS), TARGETS["cpu:aarch64-dotprod"]),
    (replace(dots("f32", 2, 2, 16), adds=True), PAIRS),
])  # fmt: skip
def test_impossible_word_tiles_are_refused(wrong: Tile, target: Target) -> None:
    with pytest.raises(InternalError, match="tile"):
        build([wrong], target)
