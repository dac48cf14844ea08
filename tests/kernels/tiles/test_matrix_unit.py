"""Tiles on the matrix unit of a CPU: what is emitted, played by Python, beside the loop IR's meaning on NumPy."""

import re

import ml_dtypes
import numpy as np
import pytest
from support.played.emulated_matrix import run_emulated, runs_here

from aotc.ir.loop.forms.tile_forms import FORMS
from aotc.ir.loop.parser import parse_kernel
from aotc.ir.loop.printer import print_kernel
from aotc.ir.loop.run import run_kernel
from aotc.ir.loop.verify import verify_kernel
from aotc.kernels.cpu.compile import kernel_assembly, unoptimized_kernel_module
from aotc.targets import TARGETS
from aotc.vmfb.dtypes import to_numpy

TARGET, PAIRS = TARGETS["cpu:x86-64-amx"], TARGETS["cpu:x86-64-v4-bf16"]
pytestmark = [pytest.mark.cpu]
played = pytest.mark.skipif(not runs_here, reason="this machine lacks AVX-512")
INSTRUCTION = {"bf16": "tdpbf16ps", "i8": "tdpbssd", "u8": "tdpbusd"}


def kernel_of(tiles, form, shapes, a_dtype="", grid=1):
    """Return a kernel of tiles, each the keywords of one, on arrays of given shapes."""
    a, b, out = shapes
    left, b_dtype = a_dtype or form, form
    lines = [f"    tile(o0, a0, a1, {said}, form={FORMS[form]})" for said in tiles]
    head = f"def k(a0: \"{left}{list(a)}\", a1: \"{b_dtype}{list(b)}\", /, o0: \"{FORMS[form].out}{list(out)}\", *, "
    return parse_kernel("\n".join([f'{head}grid: "{grid}", flops: "1", bytes: "1"):', *lines, ""]))


def values(shape, dtype, seed):
    rng = np.random.default_rng(seed)
    if dtype in ("i8", "u8"):
        info = np.iinfo(to_numpy(dtype))
        return rng.integers(info.min, info.max, shape, endpoint=True).astype(to_numpy(dtype))
    return rng.integers(-8, 9, shape).astype(ml_dtypes.bfloat16)  # sums are exact in any order


def check(kernel, steps_before=0):
    """Compare a kernel on the unit that Python plays with its meaning; return the unit."""
    assert not verify_kernel(kernel)
    assert print_kernel(parse_kernel(print_kernel(kernel))) == print_kernel(kernel)
    arrays = [values(x.shape, x.dtype, n) for n, x in enumerate(kernel.inputs)]
    (out,) = kernel.outputs
    want, got = (np.full(out.shape, 7, to_numpy(out.dtype)) for _ in range(2))
    run_kernel(kernel, [*arrays, want], {})
    unit = run_emulated(kernel, TARGET, [*arrays, got])
    assert unit.faults == []
    np.testing.assert_array_equal(got, want)
    return unit


def plain(form, rows, cols, k, pad=0):
    """Return the keywords and shapes of one tile of whole operands; rows are ``pad`` elements longer."""
    group = FORMS[form].group
    steps, length = k // group, k + pad
    said = f"rows={rows}, cols={cols}, out_base=0, out_row={cols + pad}, a_base=0, a_row={length}, b_base=0, "
    shapes = (rows, length), (steps, cols * group), (rows, cols + pad)
    return said + f"levels=[({steps}, {group}, {cols * group})]", shapes


ROWS = [(1, 16), (1, 64), (4, 48), (15, 32), (16, 64), (17, 16), (31, 32), (32, 32), (32, 16)]


@played
@pytest.mark.parametrize("form", ["bf16", "i8"])
@pytest.mark.parametrize(("rows", "cols"), ROWS)
def test_rows_and_columns(rows, cols, form):
    """Whole registers and parts of them, with what is left of k and without."""
    for k in (64, 128 + 4):
        said, shapes = plain(form, rows, cols, k, pad=3)
        unit = check(kernel_of([said], form, shapes))
        iterations = k // (32 if form == "bf16" else 64) + (k % (32 if form == "bf16" else 64) != 0)
        sums = -(-rows // 16) * cols // 16
        assert unit.seen.count(INSTRUCTION[form]) == iterations * sums
        assert unit.seen[0] == "ldtilecfg"
        assert unit.seen[-1] == "tilerelease"


@played
@pytest.mark.parametrize("form", ["bf16", "i8"])
@pytest.mark.parametrize("steps", [0, 1, 2, 15, 16, 17, 31, 32, 33, 50])
def test_terms(steps, form):
    """None, fewer than a register takes, as many, more."""
    said, shapes = plain(form, 20, 32, steps * FORMS[form].group)
    unit = check(kernel_of([said], form, shapes))
    assert unit.seen.count(INSTRUCTION[form]) == 4 * -(-steps // 16)


@played
def test_a_left_operand_without_sign():
    said, shapes = plain("i8", 18, 32, 100)
    unit = check(kernel_of([said], "i8", shapes, a_dtype="u8"))
    assert "tdpbusd" in unit.seen
    assert "tdpbssd" not in unit.seen


@played
def test_levels_of_a_convolution():
    """The window's rows are a level of their own, each with a rest: zeros behind it are written once."""
    said = (
        "rows=14, cols=32, out_base=0, out_row=32, a_base=0, a_row=6, b_base=0, "
        "levels=[(3, 100, 576), (9, 2, 64)]"
    )
    unit = check(kernel_of([said], "bf16", ((3, 100), (27, 64), (14, 32))))
    assert unit.seen.count("tdpbf16ps") == 3 * 2


@played
def test_rows_are_said_once_for_tiles_alike():
    """Only another number of rows or columns is said again; each run of a kernel begins anew."""
    k, width = 32, 96
    shapes = (64, k), (16, 128), (64, width)

    def tile(rows, cols, first):
        place = f"out_base={first * width}, out_row={width}, a_base={first * k}, a_row={k}, b_base=0"
        return f"rows={rows}, cols={cols}, {place}, levels=[(16, 2, {2 * cols})]"

    unit = check(kernel_of([tile(32, 32, 0), tile(32, 32, 32)], "bf16", shapes))
    assert unit.seen.count("ldtilecfg") == 1
    unit = check(kernel_of([tile(32, 32, 0), tile(31, 32, 32), tile(32, 32, 0)], "bf16", shapes))
    assert unit.seen.count("ldtilecfg") == 3
    unit = check(kernel_of([tile(16, 32, 0), tile(16, 64, 32)], "bf16", shapes))
    assert unit.seen.count("ldtilecfg") == 2


def test_tiles_that_do_not_fit_the_matrix_unit_use_vectors():
    """Rows, columns or operands that do not fit are multiplied by vectors, as without the unit."""
    wide, shapes = plain("bf16", 8, 80, 64)
    column = plain("bf16", 32, 32, 64)[0].replace("a_row=64", "a_row=1").replace("(32, 2, 64)", "(32, 64, 64)")
    odd = f"{column}, a_inner=32"
    tall, more = plain("bf16", 33, 16, 64)
    for said, form, of, a_dtype in (
        (wide, "bf16", shapes, ""), (odd, "bf16", ((64, 32), (32, 64), (32, 32)), ""), (tall, "bf16", more, ""),
        (plain("bf16", 8, 32, 64)[0], "bf16", plain("bf16", 8, 32, 64)[1], "f32"),
    ):  # fmt: skip
        text = str(unoptimized_kernel_module(kernel_of([said], form, of, a_dtype), TARGET))
        assert "llvm.x86.tdp" not in text
        assert "tilerelease" not in text


def test_other_targets_have_none():
    said, shapes = plain("bf16", 32, 32, 64)
    kernel = kernel_of([said], "bf16", shapes)
    assert "tdpbf16ps" in kernel_assembly(kernel, TARGET)
    assert "tdpbf16ps" not in kernel_assembly(kernel, PAIRS)


@pytest.mark.parametrize("form", ["bf16", "i8"])
def test_the_inner_loop(form):
    """As many products as loads, and nothing else but addresses and the counting: nothing is spilled."""
    said, shapes = plain(form, 32, 32, 64 * 200)
    text = kernel_assembly(kernel_of([said], form, shapes), TARGET)
    blocks = [re.split(r"\n\tj\w+", x)[0] for x in re.split(r"^\.LBB\d+_\d+:", text, flags=re.MULTILINE)]
    (inner,) = (x for x in blocks if INSTRUCTION[form] in x)
    names = re.findall(r"^\t([a-z]\w+)", inner, re.MULTILINE)
    products = names.count(INSTRUCTION[form])
    assert products == names.count("tileloadd") > 0
    others = {x for x in names if not x.startswith(("lea", "add", "sub", "cmp", "mov"))}
    assert others == {INSTRUCTION[form], "tileloadd"}
    assert len(names) <= 4 * products
    assert text.count("ldtilecfg") == text.count("tilerelease") == 1
