"""Tiles of weights of few bits against NumPy: bits, runs of terms, targets, where the left operand lies."""

from __future__ import annotations

import llvmlite.binding as llvm
import numpy as np
import pytest
from kernels.tiles.test_tile import RUNNABLE, Native, build, machine

from aotc.ir.loop.forms.quantized import chunk_bytes, dequantize, pack, quantize, unpack
from aotc.ir.loop.forms.tile_forms import FORMS
from aotc.ir.loop.ir import Buffer, Kernel, Tile
from aotc.ir.loop.printer import print_kernel
from aotc.ir.loop.run import run_kernel
from aotc.targets import TARGETS
from aotc.vmfb.dtypes import to_numpy

pytestmark = pytest.mark.cpu
PAIRED = TARGETS["cpu:x86-64-v4-bf16"]

BITS = {"f32_i8": 8, "f32_i4": 4, "bf16_i8": 8, "bf16_i4": 4}
PAIRS = ["bf16_i8", "bf16_i4"]
TURNS = [False, True]


def scaled_tile(form, rows, cols, terms, runs, transposed=False):
    """Return a tile of so many runs of terms; the left operand may lie by columns."""
    bits, k, per = BITS[form], terms * runs, FORMS[form].group
    chunk = chunk_bytes(cols, bits, terms)
    row, step = (1, rows) if transposed else (k, 1)
    a = Buffer("a", FORMS[form].left, (k, rows) if transposed else (rows, k))
    b, out = Buffer("b", "u8", (runs, chunk)), Buffer("out", "f32", (rows, cols))
    levels = ((runs, terms * step, chunk), (terms // per, per * step, per * cols * bits // 8))
    return Tile(rows, cols, out, 0, cols, a, 0, row, b, 0, levels, FORMS[form], a_inner=step)


def operands(form, rows, cols, terms, runs):
    """Return a left operand, panels, and what the product is in f64."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((rows, terms * runs)).astype("f4"), rng.standard_normal((terms * runs, cols))
    x = x.astype(to_numpy(FORMS[form].left))
    integers, scales = quantize(w, BITS[form], terms)
    want = x.astype("f8") @ dequantize(integers, scales, terms).astype("f8")
    return x, pack(integers, scales, cols, BITS[form], terms)[0], want


@pytest.mark.parametrize("target", RUNNABLE, ids=lambda t: t.name)
@pytest.mark.parametrize("form", BITS)
@pytest.mark.parametrize(
    ("rows", "vectors", "terms", "runs"),
    [(1, 4, 40, 1), (1, 4, 8, 5), (3, 2, 24, 2), (5, 1, 8, 3), (12, 2, 16, 4), (12, 2, 64, 1), (2, 1, 2, 1)],
)
@pytest.mark.parametrize("transposed", TURNS)
def test_tiles_widen_and_scale(form, rows, vectors, terms, runs, transposed, target):
    if form in PAIRS and "bf16" not in target.units:
        pytest.skip("multiplies no pairs of bf16")
    cols = vectors * target.vector_bytes // 4
    x, panels, want = operands(form, rows, cols, terms, runs)
    out = np.full((rows, cols), 7, np.float32)
    tile = scaled_tile(form, rows, cols, terms, runs, transposed)
    run = Native(build([tile], target), target)
    run(np.ascontiguousarray(x.T) if transposed else x, panels, out)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("form", BITS)
@pytest.mark.parametrize("transposed", TURNS)
def test_the_interpreter_does_the_same(form, transposed):
    x, panels, want = operands(form, 3, 16, 24, 2)
    tile = scaled_tile(form, 3, 16, 24, 2, transposed)
    kernel = Kernel("k", (tile.a, tile.b), (tile.out,), (), 1, (tile,))
    found = np.zeros((3, 16), np.float32)
    run_kernel(print_kernel(kernel), [np.ascontiguousarray(x.T) if transposed else x, panels, found])
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", BITS)
def test_other_processors_compile_it(form):
    target = TARGETS["cpu:aarch64-bf16" if form in PAIRS else "cpu:aarch64"]
    module = build([scaled_tile(form, 3, 8, 16, 2)], target)
    assert "x86" not in str(module).replace(target.triple, "")
    assert len(machine(target).emit_object(llvm.parse_assembly(str(module)))) > 0
    assert ("bfdot" in str(module)) == (form in PAIRS)


@pytest.mark.parametrize("form", PAIRS)
def test_pairs_are_multiplied_by_their_instruction(form):
    """Each sum by one of them in a step, of which four are written out; no sum leaves the registers."""
    text = machine(PAIRED).emit_assembly(llvm.parse_assembly(str(build([scaled_tile(form, 6, 32, 64, 1)], PAIRED))))
    assert text.count("vdpbf16ps") == 4 * 6 * 2
    assert "(%rsp), %zmm" not in text


def test_pairs_of_4_bits_are_looked_up_at_once():
    """A register of weights by one lookup in a step, of which four are written out, and no conversion."""
    tile = scaled_tile("bf16_i4", 6, 32, 64, 1)
    text = machine(PAIRED).emit_assembly(llvm.parse_assembly(str(build([tile], PAIRED))))
    assert text.count("vpermw") == 4 * 2
    assert "vpermps" not in text
    assert "vcvtdq2ps" not in text


@pytest.mark.skipif(PAIRED not in RUNNABLE, reason="multiplies no pairs of bf16")
def test_every_byte_is_two_numbers():
    """A column of zeros but for one pair of terms has both numbers of a byte, whichever it is."""
    words = np.arange(256, dtype=np.uint8).reshape(8, 32)  # eight steps of 32 columns
    panel = np.concatenate([np.ones(32, "f4").view("u1"), words.ravel()])[None]
    x = np.eye(16).astype(to_numpy("bf16"))
    out = np.zeros((16, 32), np.float32)
    run = Native(build([scaled_tile("bf16_i4", 8, 32, 16, 1)], PAIRED), PAIRED)
    for half in (slice(0, 8), slice(8, 16)):
        run(x[half], panel, out[half])
    low, high = (words & 15).astype("i4"), (words >> 4).astype("i4")
    want = np.stack([low - 16 * (low > 7), high - 16 * (high > 7)], 1).reshape(16, 32)
    np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize("rows", [1, 12])
def test_weights_are_prefetched_for_any_rows(rows):
    assert "llvm.prefetch" in str(build([scaled_tile("f32_i8", rows, 32, 16, 1)], TARGETS["cpu:x86-64-v4"]))


@pytest.mark.parametrize("runs", [1, 4])
@pytest.mark.parametrize("form", ["f32_i8", "f32_i4"])
def test_sums_stay_in_registers(form, runs):
    target = TARGETS["cpu:x86-64-v4"]
    tile = scaled_tile(form, 12, 32, 64, runs)
    assembly = Native(build([tile], target), target).assembly if target in RUNNABLE else ""
    assert "(%rsp), %zmm" not in assembly


# --- how weights are rounded, and how they lie ---


@pytest.mark.parametrize("shape", [(10, 7), (1, 1), (3, 33, 20), (64, 16)])
@pytest.mark.parametrize("terms", [8, 16, 64])
@pytest.mark.parametrize("bits", [8, 4])
def test_elements_are_off_by_half_a_step_at_most(shape, terms, bits):
    w = np.random.default_rng(1).standard_normal(shape).astype("f4")
    integers, scales = quantize(w, bits, terms)
    runs = -(-shape[-2] // terms)
    assert (integers.shape, scales.shape) == (shape, (*shape[:-2], runs, shape[-1]))
    assert np.abs(integers).max() == (1 << (bits - 1)) - 1
    each = np.repeat(scales, terms, -2)[..., : shape[-2], :]
    assert (np.abs(dequantize(integers, scales, terms) - w) <= each * 0.5001).all()


def test_columns_of_zeros_and_the_least_numbers():
    w = np.zeros((16, 3), np.float32)
    w[:, 1], w[2, 2] = 1e-44, np.finfo("f4").max
    integers, scales = quantize(w, 8, 16)
    back = dequantize(integers, scales, 16)
    assert not integers[:, 0].any()
    assert not scales[:, 0].any()
    assert np.isfinite(back).all()
    np.testing.assert_allclose(back[2, 2], w[2, 2], rtol=1e-6)
    assert (np.abs(back[:, 1]) <= 2e-44).all()


@pytest.mark.parametrize("shape", [(16, 32), (24, 33), (2, 40, 20)])
@pytest.mark.parametrize("terms", [8, 24])
@pytest.mark.parametrize("bits", [8, 4])
def test_panels_are_unpacked(shape, terms, bits):
    w = np.random.default_rng(2).standard_normal(shape).astype("f4")
    integers, scales = quantize(w, bits, terms)
    panels = pack(integers, scales, 16, bits, terms)
    *_, k, n = shape
    assert panels.shape == (*shape[:-2], -(-n // 16), -(-k // terms), chunk_bytes(16, bits, terms))
    back = unpack(panels, 16, bits)
    np.testing.assert_array_equal(back[..., :k, :n], dequantize(integers, scales, terms))
    assert not back[..., k:, :].any()
    assert not back[..., n:].any()


def test_a_byte_holds_two_terms_of_a_column():
    integers = np.array([[1, -2], [3, 7], [-1, 0], [5, -7]], np.int8)
    panels = pack(integers, np.ones((1, 2), np.float32), 2, 4, 4)
    assert panels[0, 0, :8].view(np.float32).tolist() == [1, 1]
    assert panels[0, 0, 8:].tolist() == [0x31, 0x7E, 0x5F, 0x90]
