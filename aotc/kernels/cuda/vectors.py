"""Neighbouring elements of memory in one access of up to 16 bytes, at an address that is a multiple of its size.

Elements of less than 32 bits are parts of words: a GPU has no vectors of more than four.
"""

from __future__ import annotations

from llvmlite import ir

from aotc.kernels.emit.memory import Annotate
from aotc.kernels.llvm_types import I16, I32, I64, i32


def _bits(kind: ir.Type) -> int:
    return 64 if kind == ir.DoubleType() else 32 if kind == ir.FloatType() else kind.width


def _pieces(kind: ir.Type, count: int) -> tuple[ir.Type, int, int]:
    """Return the type of what is moved, how many of it, and how many elements one of it has."""
    bits = _bits(kind)
    if bits >= 32:
        return kind, count, 1
    piece = I32 if bits * count >= 32 else I16
    return piece, bits * count // piece.width, piece.width // bits


def load_vector(
    builder: ir.IRBuilder, address: ir.Value, kind: ir.Type, count: int, annotate: Annotate
) -> list[ir.Value]:
    """Return the memory forms of ``count`` elements, a power of two."""
    piece, pieces, each = _pieces(kind, count)
    raw = builder.load(address, typ=piece if pieces == 1 else ir.VectorType(piece, pieces))
    raw.align = _bits(kind) * count // 8
    annotate(raw)
    parts = [raw] if pieces == 1 else [builder.extract_element(raw, i32(n)) for n in range(pieces)]
    return parts if each == 1 else [x for part in parts for x in _split(builder, part, kind, each)]


def _split(builder: ir.IRBuilder, part: ir.Value, kind: ir.Type, each: int) -> list[ir.Value]:
    width = _bits(kind)
    shifted = [part if n == 0 else builder.lshr(part, ir.Constant(part.type, n * width)) for n in range(each)]
    return [builder.trunc(x, kind) for x in shifted]


def store_vector(
    builder: ir.IRBuilder, values: list[ir.Value], address: ir.Value, annotate: Annotate
) -> None:
    """Store the memory forms of elements, a power of two of them."""
    kind = values[0].type
    piece, pieces, each = _pieces(kind, len(values))
    parts = values if each == 1 else [_join(builder, values[n : n + each], piece) for n in range(0, len(values), each)]
    whole = parts[0]
    if pieces > 1:
        whole = ir.Constant(ir.VectorType(piece, pieces), ir.Undefined)
        for n, part in enumerate(parts):
            whole = builder.insert_element(whole, part, i32(n))
    stored = builder.store(whole, address)
    stored.align = _bits(kind) * len(values) // 8
    annotate(stored)


def _join(builder: ir.IRBuilder, values: list[ir.Value], piece: ir.IntType) -> ir.Value:
    width = _bits(values[0].type)
    whole = builder.zext(values[0], piece)
    for n, value in enumerate(values[1:], 1):
        whole = builder.or_(whole, builder.shl(builder.zext(value, piece), ir.Constant(piece, n * width)))
    return whole


def fits(kind: ir.Type, count: int, vector: int) -> bool:
    """Do ``count`` elements make one access of at most ``vector`` bytes?"""
    return count > 1 and _bits(kind) * count <= 8 * vector and _bits(kind) <= I64.width and _bits(kind) * count >= 16
