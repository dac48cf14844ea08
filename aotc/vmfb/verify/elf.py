"""Check that a shared object is complete before the dynamic loader maps it.

The loader maps the segments of the program headers without comparing them with the file's length. For a truncated
library it accesses pages past the end, which ends the process with SIGBUS.
"""

from __future__ import annotations

import struct

_IDENT = b"\x7fELF\x02\x01\x01"  # 64 bits, little-endian, version 1
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_PROGRAM = struct.Struct("<IIQQQQQQ")


def elf_problem(data: memoryview) -> str:
    """Return the reason why ``data`` is not a complete 64-bit shared object; an empty string if it is one."""
    if data.nbytes < _HEADER.size or bytes(data[: len(_IDENT)]) != _IDENT:
        return "it is not a shared object of 64 bits"
    _, _, _, _, _, start, _, _, _, size, count, *_ = _HEADER.unpack_from(data)
    if size != _PROGRAM.size or not count or start + size * count > data.nbytes:
        return f"its {count} program headers end at byte {start + size * count:,} of {data.nbytes:,}"
    for row in range(count):
        _, _, offset, _, _, length, _, _ = _PROGRAM.unpack_from(data, start + row * size)
        if offset + length > data.nbytes:
            return f"a segment ends at byte {offset + length:,} of {data.nbytes:,}"
    return ""
