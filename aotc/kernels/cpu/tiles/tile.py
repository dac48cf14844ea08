"""Emit the loop-IR statement ``Tile`` on a CPU: a call of the micro-kernel of its shape.

Each distinct shape becomes one function ``(a, b, out, non-constant strides and extents...)``, which
:mod:`aotc.kernels.cpu.tiles.micro_kernel` writes.

Layouts of the right operand ``b``. A *step* is an iteration of the innermost level; its ``cols`` groups are contiguous:

======== ============ ===================================================== =========
form     k in a step  one step of ``b``                                     ``out``
======== ============ ===================================================== =========
f32      1            ``cols`` f32                                          f32
f32_bf16 1            ``cols`` bf16                                         f32
f32_f16  1            ``cols`` f16                                          f32
f32_s8   1            ``cols`` i8                                           f32
f32_i8   1            ``cols`` bytes, after the scales of its group         f32
f32_i4   2            ``cols`` bytes: even k in the low 4 bits, odd high    f32
bf16_i8  2            ``cols`` bytes of even k, then as many of odd k       f32
bf16_i4  2            as ``f32_i4``                                         f32
f64      1            ``cols`` f64                                          f64
i32      1            ``cols`` i32                                          i32
i64      1            ``cols`` i64                                          i64
bf16     2            ``cols`` words: even k in the low 16 bits, odd high   f32
i8       4            ``cols`` words: k in the order of the bytes           i32
i8_o8    4            i8, used as u8 with an offset of 128; unpacked        i32
======== ============ ===================================================== =========

The dtype of ``a`` is f32 for the forms ``f32_...``, and bf16 for ``bf16_i8`` and ``bf16_i4``, which need an instruction
for pairs. For ``bf16`` it is bf16 or f32; without the instruction f32 is faster, so widen ``a`` while packing. For
``i8`` it is i8 or u8. Element ``t`` of a group is ``t * a_inner`` after its first; for ``i8`` ``a_inner`` is 1. If K is
not a multiple of the group, ``b`` is padded with 0, and ``a`` must be readable there, and for ``bf16`` finite: pack
``a``.

Accumulation: f32 FMAs in the order of k, or exact int32, for any vector width. A processor without FMA multiplies and
adds. With AVX512-BF16, ``vdpbf16ps`` multiplies and adds pairs of bf16: it rounds to nearest and flushes subnormal
operands, products and sums to 0. So do the tiles of AMX (:mod:`aotc.kernels.cpu.tiles.amx`), which also multiply quads
of ``i8``. AArch64's ``bfdot`` rounds to odd and flushes subnormals, too. Two or more rows are multiplied by two columns
at a time there (:mod:`aotc.kernels.cpu.tiles.aarch64_squares`).

``b`` may be unpacked, as the model stores it. If its columns are not contiguous (``b_column``), the tile computes dot
products and does not prefetch ``b``. If the terms of a pair are not contiguous (``b_inner``), they are interleaved in
registers (:mod:`aotc.kernels.cpu.tiles.unpacked`). For bytes, and for pairs with as many columns as a vector has lanes,
x86 transposes or interleaves words in registers (:mod:`aotc.kernels.cpu.tiles.x86_words`).

``lowering.analysis.tiling.best_tile`` chooses ``rows`` and ``cols``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Protocol

from llvmlite import ir

from aotc.diagnostics import InternalError
from aotc.ir.dims.algebra import Dim, Expr
from aotc.ir.loop.forms.tile_forms import F32, F32_F16, F64, FORMS, I8_OFFSET, I8_QUADS
from aotc.ir.loop.ir import Buffer, Tile
from aotc.kernels.cpu.tiles import amx as matrix_unit
from aotc.kernels.cpu.tiles.aarch64_squares import SquareTileWriter, uses_2x2_matrix_instructions
from aotc.kernels.cpu.tiles.micro_kernel import TileWriter, add_tile_function, tile_function_type
from aotc.kernels.cpu.tiles.scaled_weights import ScaledTileWriter
from aotc.kernels.cpu.tiles.shape import PREFIX, Shape
from aotc.kernels.cpu.tiles.unpacked import DotTileWriter, ZippedTileWriter
from aotc.kernels.cpu.tiles.x86_words import RowQuadsTileWriter, TransposedTileWriter, transposes_column_words
from aotc.kernels.llvm_types import PTR, KernelModule, break_reference_cycles
from aotc.kernels.symbol_table import symbol_texts
from aotc.targets import Target
from aotc.vmfb.dtypes import size_of


class TileContext(Protocol):
    """Interface of the kernel's emitter that tiles use."""

    builder: ir.IRBuilder
    target: Target

    def address(self, buffer: Buffer, flat: Dim) -> ir.Value:
        """Return the pointer to element ``flat`` (a flat index) of ``buffer``."""

    def index(self, dim: Dim) -> ir.Value:
        """Return the value of ``dim`` as an i64."""


def emit_tile(context: TileContext, stmt: Tile) -> None:
    """Emit the statement ``stmt`` as a call of the function of its tile shape.

    Raises
    ------
    InternalError
        If the form does not support the tile (unknown form, ``cols`` not a multiple of the vector, ``a_inner`` of
        ``i8`` not 1), or if the target has no instruction for f16.
    """
    shape, arguments = _tile_shape_of(stmt, context.target)
    builder = context.builder
    of_unit = matrix_unit.fits_matrix_unit(shape) and shape.is_packed and not shape.adds
    function = builder.module.globals.get(shape.name)
    if function is None and builder.module.finished and stmt.form in _FINISHED and not shape.is_one_dot:
        function = ir.Function(builder.module, tile_function_type(len(arguments)), shape.name)
        builder.module.finished.add(_tile_function_assembly(shape, len(arguments), context.target))
    elif function is None:
        writer = matrix_unit.MatrixTileWriter if of_unit else _tile_writer_of(shape)
        function = add_tile_function(builder.module, shape, len(arguments), writer)
    if of_unit:
        matrix_unit.configure_amx_tiles(builder, shape)
    bases = ((stmt.a, stmt.a_base), (stmt.b, stmt.b_base), (stmt.out, stmt.out_base))
    pointers = [builder.bitcast(context.address(buffer, base), PTR) for buffer, base in bases]
    builder.call(function, pointers + [context.index(dim) for dim in arguments])


@lru_cache(maxsize=256)
def _tile_function_assembly(shape: Shape, arguments: int, target: Target) -> Mapping[str, str]:
    """Return the assembly of a shape's function and of its callees, by symbol.

    The results are cached, because many kernels share shapes.
    """
    module = KernelModule(shape.name, target)
    add_tile_function(module, shape, arguments, _tile_writer_of(shape))
    found = symbol_texts(module)
    break_reference_cycles(module)
    return found


def annotate_tiles(text: str) -> str:
    """Add attributes to the declarations of tile functions: they access only the memory of their operands."""
    return _DECLARED.sub(lambda found: f"{found[1]}{_POINTERS}{found[2]} {_EFFECTS}", text)


def _tile_writer_of(shape: Shape) -> type[TileWriter]:
    """Return the writer class of a tile that does not use a matrix unit (AMX)."""
    if not shape.is_packed:
        if shape.of_dots:
            return TransposedTileWriter if transposes_column_words(shape) else DotTileWriter
        return RowQuadsTileWriter if shape.form == I8_OFFSET else ZippedTileWriter
    return (
        SquareTileWriter
        if uses_2x2_matrix_instructions(shape) and not shape.adds
        else _WRITERS.get(shape.form, TileWriter)
    )


def _tile_shape_of(stmt: Tile, target: Target) -> tuple[Shape, list[Dim]]:
    """Return the tile shape of ``stmt``, and the values that its function takes as arguments at run time."""
    form = stmt.form
    if form not in FORMS.values() or (form.offset and stmt.b_column == 0 and stmt.b_inner == 0):
        raise InternalError(f"tile: unknown form {form!r}")
    lanes = target.vector_bytes // size_of(form.out)
    if "f16" in target.lacks and form == F32_F16:
        raise InternalError(f"tile: {target.name} cannot widen f16")
    dots = stmt.b_column != 0
    if (stmt.cols % lanes and not dots) or stmt.out.dtype != form.out or (form == I8_QUADS and stmt.a_inner != 1):
        found = f"{stmt.rows}x{stmt.cols} {form.name} -> {stmt.out.dtype}"
        raise InternalError(f"tile: cannot emit {found} for {target.name}")
    if stmt.adds and (dots or form.scaled):
        raise InternalError(f"tile: {form.name} cannot add to a result")
    arguments: list[Dim] = []

    def known(dim: Dim, unit: int = 1) -> int | None:
        if isinstance(dim, Expr):
            arguments.append(dim * unit)
            return None
        return dim * unit

    a, b, out = (size_of(x.dtype) for x in (stmt.a, stmt.b, stmt.out))
    shape = Shape(
        form=form,
        rows=stmt.rows,
        vectors=stmt.cols if dots else stmt.cols // lanes,
        lanes=lanes,
        a_dtype=stmt.a.dtype,
        a_row=known(stmt.a_row, a),
        a_inner=known(stmt.a_inner, a),
        out_row=known(stmt.out_row, out),
        levels=tuple((known(n), known(x, a), known(y, b)) for n, x, y in stmt.levels),
        prefetch=0,
        isa=_tile_instruction_sets(target),
        b_column=known(stmt.b_column, b),
        b_inner=known(stmt.b_inner, b),
        adds=stmt.adds,
    )
    return replace(shape, prefetch=_prefetch_distance(stmt, shape, b)), arguments


# Rows of a tile up to which it prefetches b. A tile of one row is bound by memory; with more rows the prefetch
# instructions cost time and gain nothing. Measured: with 2 or 4 rows prefetching costs an AMD core 9 to 24 %.
PREFETCH_ROWS = 1
# As PREFETCH_ROWS, for quantized weights. A step reads so few bytes that the hardware prefetcher starts too late, for
# any number of rows. A core of Zen 5, 4096 x 4096 of i8, with and without prefetching: 1 row equal, 4 rows 0.64 and 1.1
# ms, 8 rows 1.2 and 2.5 ms, 14 rows 2.3 and 3.2 ms.
SCALED_PREFETCH_ROWS = 32
# As PREFETCH_ROWS, for a b whose steps are not contiguous, as in the values of attention. A step is a part of a row in
# memory, and the hardware prefetcher does not predict the next one. A core of Zen 5, 4 queries of 16384 keys of 128 in
# bf16: 5.0 ms without prefetching, 3.4 ms with.
APART_PREFETCH_ROWS = 4
# Prefetch distance in b, in bytes: it covers the latency of memory at the rate at which a tile of one row reads.
# Measured: took an Intel core from 20 to 29 GB/s; costs an AMD core 3 to 10 %.
PREFETCH_BYTES = 8192
# Prefetch distance in b, in bytes, for the values of attention of a few queries if their terms are not contiguous; see
# FETCHED_KEYS. A core of Zen 5, 4 queries of 8 heads of 128, of the speed of reading: 0.52 if prefetched before the
# tile, 0.6 if prefetched in the tile.
ZIPPED_PREFETCH_BYTES = 16384


def _prefetch_distance(stmt: Tile, shape: Shape, size: int) -> int:
    """Return the prefetch distance in ``b`` in bytes; 0 for no prefetching.

    If steps are not contiguous, the distance covers as many steps as have ``PREFETCH_BYTES``.
    """
    form = stmt.form
    steps, _, step = shape.levels[-1] if shape.levels else (None, None, None)
    if shape.of_dots:
        return 0
    if shape.b_inner != 0:  # a tile has few steps: prefetch beyond its last one
        return 0 if steps is None or step is None else max(ZIPPED_PREFETCH_BYTES, steps * step)
    if form.scaled:
        return PREFETCH_BYTES if stmt.rows <= SCALED_PREFETCH_ROWS else 0
    dense = stmt.cols * form.group * size
    if step is None or step <= dense:
        return PREFETCH_BYTES if stmt.rows <= PREFETCH_ROWS else 0
    return PREFETCH_BYTES // dense * step if stmt.rows <= APART_PREFETCH_ROWS else 0


def _tile_instruction_sets(target: Target) -> tuple[str, ...]:
    """Return the names of the instruction sets that a tile may use, as :class:`Shape` lists them."""
    fma = () if "fma" in target.lacks else ("fma",)
    if not target.triple.startswith("x86_64"):
        dot = ("dot",) if "i8" in target.units else ()
        return (*fma, *dot, *(feature for feature in _AARCH64 if feature in target.features))
    units = (_INSTRUCTIONS[unit] for unit in sorted(target.units, reverse=True))
    return ("x86", *fma, *units, *(f"amx-{unit}" for unit in sorted(target.matrices)))


_DECLARED = re.compile(rf'(declare void @"{PREFIX}\w+"\()ptr[^,]*, ptr[^,]*, ptr[^,)]*(.*\))')
_READ, _WRITTEN = "ptr noalias readonly captures(none)", "ptr noalias captures(none)"
_POINTERS = f"{_READ}, {_READ}, {_WRITTEN}"
_EFFECTS = "nofree norecurse nosync nounwind willreturn memory(argmem: readwrite)"
_FINISHED = (F32, F64)
"""Forms whose functions are final vector code: they bypass LLVM's passes and are linked afterwards."""
_AARCH64 = ("i8mm", "bf16", "sve")
_WRITERS = {form: ScaledTileWriter for form in FORMS.values() if form.scaled}
_INSTRUCTIONS = {"i8": "vnni", "bf16": "bf16"}
