"""Positions of large constants in MLIR's bytecode: https://mlir.llvm.org/docs/BytecodeFormat/.

The source in a bundle omits constants that the bundle stores anyway (:mod:`aotc.source.embed`). This module only finds
their positions; the removed bytes are restored exactly. If it cannot parse a piece of bytecode, that constant is not
removed.
"""

from __future__ import annotations

from collections.abc import Iterator

MAGIC = b"ML\xefR"
_ATTRIBUTES, _ATTRIBUTE_SIZES, _RESOURCES, _RESOURCE_SIZES = 2, 3, 5, 6
_ALIGNED, _SECTION = 0x80, 0x7F
_PADDING = 0xCB


def is_bytecode(data: bytes | str) -> bool:
    """Return True if ``data`` is a module in MLIR's bytecode."""
    return isinstance(data, bytes) and data.startswith(MAGIC)


def is_portable(data: bytes | str) -> bool:
    """Return True if ``data`` is a portable artifact, which later versions of StableHLO can read."""
    return isinstance(data, bytes) and is_bytecode(data) and data[5:].startswith(b"StableHLO_v")


def large_elements(code: bytes, least: int) -> list[tuple[int, int]]:
    """Return begin and end offsets of the elements of each constant of at least ``least`` bytes, in order."""
    try:
        sections = _bytecode_sections(code)
        entries = [*_bytecode_attributes(code, sections), *_bytecode_resources(code, sections)]
        found = [_elements_of_attribute(code, *entry) for entry in entries if entry[1] - entry[0] >= least]
    except (IndexError, ValueError):  # the format has changed, or the bytes are not bytecode
        return []
    return sorted({(a, b) for a, b in found if b - a >= least})


def _decode_varint(code: bytes, at: int) -> tuple[int, int]:
    """Decode the varint at offset ``at``; return the number and the offset after it."""
    first = code[at]
    if first & 1:
        return first >> 1, at + 1
    more = 8 if first == 0 else (first & -first).bit_length() - 1
    if first == 0:
        return int.from_bytes(code[at + 1 : at + 9], "little"), at + 9
    return int.from_bytes(code[at : at + 1 + more], "little") >> (more + 1), at + 1 + more


def _bytecode_sections(code: bytes) -> dict[int, tuple[int, int]]:
    """Return begin and end offset of each bytecode section, by section number."""
    _, at = _decode_varint(code, len(MAGIC))
    at = code.index(b"\0", at) + 1  # the name of the producer
    found: dict[int, tuple[int, int]] = {}
    while at < len(code):
        kind = code[at]
        size, at = _decode_varint(code, at + 1)
        if kind & _ALIGNED:
            alignment, at = _decode_varint(code, at)
            at += -at % alignment
        found[kind & _SECTION] = at, at + size
        at += size
    return found


def _bytecode_attributes(code: bytes, sections: dict[int, tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield begin and end offset of each attribute in the bytecode."""
    at, end = sections[_ATTRIBUTE_SIZES]
    place, _ = sections[_ATTRIBUTES]
    left, at = _decode_varint(code, at)
    _, at = _decode_varint(code, at)  # types, which come after the attributes
    while left > 0 and at < end:
        _, at = _decode_varint(code, at)  # the dialect
        count, at = _decode_varint(code, at)
        for _ in range(min(count, left)):
            size, at = _decode_varint(code, at)
            yield place, place + (size >> 1)  # the lowest bit is the encoding
            place += size >> 1
        left -= count


def _bytecode_resources(code: bytes, sections: dict[int, tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield begin and end offset of each resource in the bytecode."""
    if _RESOURCE_SIZES not in sections or _RESOURCES not in sections:
        return
    at, end = sections[_RESOURCE_SIZES]
    place, _ = sections[_RESOURCES]
    _, at = _decode_varint(code, at)  # groups of others, which come first
    while at < end:
        _, at = _decode_varint(code, at)
        count, at = _decode_varint(code, at)
        for _ in range(count):
            _, at = _decode_varint(code, at)
            size, at = _decode_varint(code, at)
            at += 1  # the kind
            yield place, place + size
            place += size


# Numbers in front of the elements of an attribute in MLIR's bytecode: kind, type, size, and one more for a later
# version. MLIR's BuiltinDialectBytecode and StableHLO's VhloBytecode.
MOST_HEADS = 4


def _elements_of_attribute(code: bytes, begin: int, end: int) -> tuple[int, int]:
    """Return begin and end offset of the elements in an attribute: its last bytes, after their size."""
    at = begin
    for _ in range(MOST_HEADS):
        size, at = _decode_varint(code, at)
        gap = end - size - at
        if 0 <= gap < size and code.count(_PADDING, at, at + gap) == gap:
            return end - size, end
    return end, end
