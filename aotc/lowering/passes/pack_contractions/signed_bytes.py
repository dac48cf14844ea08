"""Multiply signed bytes with an instruction whose left operand is unsigned bytes.

VNNI multiplies unsigned bytes by signed bytes. ``x + 128`` as an unsigned byte has the bits of ``x`` with the first bit
inverted. The correction of a sum depends only on the column::

    x @ w = (x + 128) @ w - 128 * sum(w, 0)

Tiles can do this themselves, at a cost in every step of every tile: two more products for each 24, and a vector
operation for each row. Here the addition is a separate op on ``x``, which may be fused with its producer, and the
correction is a row that is subtracted from the result. The row is constant if ``w`` is; otherwise it is computed only
for matmuls of many rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from aotc.ir.dims.algebra import Dim, product, static
from aotc.ir.loop.forms.tile_forms import I8_QUADS, TileForm
from aotc.ir.tensor.ir import Op, TensorType, Value
from aotc.lowering.analysis.constant_values import constant_of
from aotc.lowering.passes.rewrite import Builder
from aotc.lowering.threshold import Limit
from aotc.targets import Target

SHIFT = 128


SIGNED_ROWS = Limit(
    127,
    "rows of an i8 matmul of two arguments whose tiles correct for the offset of 128 themselves",
    "Zen 5, one core, VNNI, time of a separate correction relative to tiles: 1024 x 1024 with 16 rows 1.15, 64 rows "
    "1.02; 768 x 3072 with 192 rows 0.96",
)
SIGNED_TERMS = Limit(
    128,
    "terms of an i8 matmul whose tiles correct for the offset of 128 themselves",
    "as SIGNED_ROWS, with constants: 512 x 512 of 64 terms 1.07, of 128 terms 1.01; 3136 x 256 of 128 terms 1.04; 64 "
    "x 256 of 256 terms 0.96",
)
SIGNED_FLOPS = Limit(
    1 << 21,
    "operations of an i8 matmul whose tiles correct for the offset of 128 themselves",
    "as SIGNED_ROWS, with constants: 1 x 512 x 512 1.06, 1 x 1024 x 1024 1.02, 8 x 512 x 512 0.91, 4 x 768 x 768 0.87",
)


def needs_byte_offset(op: Op, form: TileForm, depth: Dim, constant: bool, target: Target) -> bool:
    """Return True if a matmul of ``depth`` terms should add 128 to its left operand in a separate op."""
    by_instruction = target.triple.startswith("x86_64") and form.dot_product_dtype in target.units - target.matrices
    if form != I8_QUADS or op.operands[0].type.dtype != "i8" or not by_instruction:
        return False
    *lead, n = op.result.type.shape
    rows = lead[-1] if op.name == "matmul" else product(lead)
    little = SIGNED_TERMS.holds(depth) or SIGNED_FLOPS.holds(product((*lead, n, depth)) * 2)
    return not little and (constant or not SIGNED_ROWS.holds(rows))


def add_byte_offset(op: Op, b: Builder) -> Op:
    """Return the matmul with 128 added to its left operand, as u8; append the addition, but not the matmul."""
    lhs, rhs = op.operands
    flipped = b.make("xor", (lhs, b.constant(-SHIFT, lhs.type)))
    unsigned = b.make("bitcast", (flipped,), {}, TensorType("u8", lhs.type.shape))
    return b.op(op.name, (unsigned, rhs), op.attrs, (op.result.type,))


def subtract_byte_offset(out: Value, rhs: Value, dims: Sequence[int], b: Builder) -> Value:
    """Return the result ``out`` corrected for the added 128; the terms of sums are along ``dims`` of ``rhs``."""
    constant, axes = constant_of(rhs, b.definitions), tuple(dims)
    if constant is not None:
        sums = np.broadcast_to(constant, [static(d) for d in rhs.type.shape]).sum(axes, np.int32)
        row = b.constant(sums * np.int32(SHIFT), TensorType("i32", sums.shape))
    else:
        wide = b.convert(rhs, "i32")
        total = b.reduce(wide, b.constant(0, TensorType("i32")), axes, b.combiner("add", "i32"))
        row = b.make("mul", (total, b.constant(SHIFT, total.type)))
    places = (*range(row.type.rank - 1), out.type.rank - 1)
    return b.make("sub", (out, b.broadcast(b.convert(row, out.type.dtype), places, out.type.shape)))
