"""Kernel names for perf, py-spy and gdb (``AOTC_PERF=1``): the library is loaded from a file with named symbols.

By default a library is in anonymous memory, for which these tools show only addresses. The linker named a kernel by the
digest of its text; in the file its symbol is the kernel's name, truncated to the length of the digest.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, Protocol

from aotc.vmfb.abi import INTERFACE_SYMBOL, TABLE_SYMBOL
from aotc.vmfb.bundle import OpenedBundle
from aotc.vmfb.host.files import permanent_folder, write_atomically
from aotc.vmfb.host.machine import PERF

# ELF section types: symbols, relocations, and dynamic symbols.
_SYMBOLS, _RELOCATIONS, _DYNAMIC = 2, 4, 11
# By ELF machine number: the type of a relocation to a symbol's address, and of one relative to the load address.
_MACHINES = {62: (1, 8), 183: (257, 1027)}


class KernelLibrary(Protocol):
    """Interface of the loaded kernel library of a variant."""

    library: ctypes.CDLL


class NamedLibrary:
    """A kernel library loaded from a file that remains after the process ends, so that a profile can be read later."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.library = ctypes.CDLL(path)


def with_kernel_symbols(library: KernelLibrary, bundle: OpenedBundle, variant: Mapping[str, Any]) -> KernelLibrary:
    """Load a variant's kernel library again, with kernel names as symbols.

    Return ``library`` if no file can be written.
    """
    data = bytes(bundle.verified_segment(variant["library"]))
    names = [kernel["name"] for kernel in variant["kernels"]]
    try:
        addresses = list((ctypes.c_int64 * len(names)).in_dll(library.library, TABLE_SYMBOL))
        interface = ctypes.addressof(ctypes.c_char.in_dll(library.library, INTERFACE_SYMBOL))
        base = interface - _elf_value_of(data, INTERFACE_SYMBOL)
        named = rename_elf_symbols(data, {address - base: name for address, name in zip(addresses[::-1], names[::-1])})
        folder = permanent_folder("perf") if PERF == "1" else PERF
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, f"aotc-{sha256(named).hexdigest()[:16]}.so")
        write_atomically(path, [named], durable=False)
        return NamedLibrary(path)
    except (OSError, KeyError, StopIteration, struct.error, ValueError):
        return library


def rename_elf_symbols(data: bytes, names: Mapping[int, str]) -> bytes:
    """Return a 64-bit shared object whose symbols are renamed.

    ``names`` maps the value (address) of a symbol to its new name, which is truncated to the length of the old one.
    Relocations that refer to these symbols by name are replaced by relative ones.
    """
    out = bytearray(data)
    symbolic, relative = _MACHINES[struct.unpack_from("<H", data, 0x12)[0]]
    values: dict[int, list[int]] = {}  # symbol values by section
    sections = _elf_sections(data)
    for number, (kind, offset, length, link) in enumerate(sections):
        if kind in (_SYMBOLS, _DYNAMIC):
            values[number] = []
            for at, value, name in _elf_symbols(data, offset, length, sections[link][1]):
                values[number].append(value)
                if value in names and name:
                    out[at : at + len(name)] = (
                        names[value].encode("ascii", "replace")[: len(name)].ljust(len(name), b"\0")
                    )
    for kind, offset, length, link in sections:
        if kind == _RELOCATIONS:
            for at in range(offset, offset + length, 24):
                where, info, addend = struct.unpack_from("<QQq", data, at)
                value = values[link][info >> 32]
                if info & 0xFFFFFFFF == symbolic and value in names:
                    struct.pack_into("<QQq", out, at, where, relative, value + addend)
    return bytes(out)


def _elf_sections(data: bytes) -> list[tuple[int, int, int, int]]:
    """Return type, offset, size in bytes and linked section of each section of a shared object."""
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    rows = [struct.unpack_from("<IIQQQQII", data, table + size * n) for n in range(count)]
    return [(kind, offset, length, link) for _, kind, _, _, offset, length, link, _ in rows]


def _elf_symbols(data: bytes, offset: int, length: int, strings: int) -> list[tuple[int, int, bytes]]:
    """Return the symbols of a symbol table: position of the name in the file, value, name."""
    found = []
    for at in range(offset, offset + length, 24):
        name, _, _, _, value, _ = struct.unpack_from("<IBBHQQ", data, at)
        start = strings + name
        found.append((start, value, data[start : data.index(b"\0", start)]))
    return found


def _elf_value_of(data: bytes, name: str) -> int:
    sections = _elf_sections(data)
    rows = [_elf_symbols(data, o, n, sections[link][1]) for kind, o, n, link in sections if kind == _DYNAMIC]
    return next(value for some in rows for _, value, found in some if found == name.encode())
