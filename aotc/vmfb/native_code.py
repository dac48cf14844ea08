"""Address ranges of kernels in a shared object, and disassembly: of CPU code by objdump, of cubins by nvdisasm."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from typing import Any, NamedTuple

from aotc.vmfb.abi import TABLE_SYMBOL
from aotc.vmfb.errors import BundleError
from aotc.vmfb.host.files import temporary_folder

_PROGBITS, _RELA, _DYNSYM = 1, 4, 11
_EXECUTABLE = 4
_RELATIVE = (8, 1027)  # R_X86_64_RELATIVE, R_AARCH64_RELATIVE: the addend is the address
_ABSOLUTE = (1, 257)  # R_X86_64_64, R_AARCH64_ABS64: the addend is relative to a symbol


class _Section(NamedTuple):
    """A section header of an ELF64 file, with fields in file order."""

    name: int
    type: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry: int


def kernel_ranges(data: Any, count: int) -> list[tuple[int, int]]:
    """Return the address range (end exclusive) of each kernel of a shared object, in the order of its kernel table.

    Relocations of the exported table hold the start addresses. A kernel ends at the next start, or at the end of the
    code section (padding included).

    Returns
    -------
    list of (int, int)
        Empty if the library is not an ELF64 file with such a table.
    """
    view = memoryview(data)
    if bytes(view[:6]) != b"\x7fELF\x02\x01":
        return []
    (start,) = struct.unpack_from("<Q", view, 40)
    size, number = struct.unpack_from("<HH", view, 58)
    sections = [_Section(*struct.unpack_from("<IIQQQQIIQQ", view, start + i * size)) for i in range(number)]
    table = _kernel_table_address(view, sections)
    found: dict[int, int] = {}
    for section in (s for s in sections if s.type == _RELA):
        for offset, info, addend in struct.iter_unpack("<QQq", view[section.offset : section.offset + section.size]):
            if not 0 <= offset - table < 8 * count:
                continue
            if info & 0xFFFFFFFF in _ABSOLUTE:
                symbol = sections[section.link].offset + 24 * (info >> 32)
                addend += struct.unpack_from("<Q", view, symbol + 8)[0]
            elif info & 0xFFFFFFFF not in _RELATIVE:
                continue
            found[(offset - table) // 8] = addend
    if len(found) != count:
        return []
    code = [(s.address, s.address + s.size) for s in sections if s.type == _PROGBITS and s.flags & _EXECUTABLE]
    starts = sorted(set(found.values()))
    return [(at, _end_of_function(at, starts, code)) for at in (found[i] for i in range(count))]


def _end_of_function(at: int, starts: list[int], code: list[tuple[int, int]]) -> int:
    section_end = next((end for begin, end in code if begin <= at < end), at)
    return min([start for start in starts if start > at] + [section_end])


def _kernel_table_address(view: memoryview, sections: list[_Section]) -> int:
    """Return the address of the exported kernel table, -1 without one."""
    wanted = TABLE_SYMBOL.encode() + b"\0"
    for section in (s for s in sections if s.type == _DYNSYM):
        names = sections[section.link].offset
        for at in range(section.offset, section.offset + section.size, 24):
            name, _, _, _, value, _ = struct.unpack_from("<IBBHQQ", view, at)
            if bytes(view[names + name : names + name + len(wanted)]) == wanted:
                return value
    return -1


def disassemble_cubin(image: bytes | memoryview) -> str:
    """Disassemble a GPU kernel to SASS.

    Raises
    ------
    BundleError
        If nvdisasm is neither on the path, nor in the CUDA toolkit, nor installed by pip.
    """
    places = [os.environ.get("PATH", ""), "/usr/local/cuda/bin", *(f"{p}/nvidia/cu13/bin" for p in sys.path)]
    tool = shutil.which("nvdisasm", path=os.pathsep.join(places))
    if tool is None:
        hint = "pip install nvidia-cuda-nvdisasm, or --target=cuda:compute_80 for PTX"
        raise BundleError("", "--asm of a cubin needs nvdisasm, which is not installed", hint=hint)
    with temporary_folder() as folder:
        file = folder / "kernel.cubin"
        file.write_bytes(image)
        return subprocess.run([tool, "-c", str(file)], capture_output=True, text=True, check=False).stdout


def disassemble_machine_code(data: Any, first: int, end: int) -> str:
    """Disassemble the instructions from address ``first`` to ``end`` of a shared object.

    Raises
    ------
    BundleError
        If objdump is not installed.
    """
    tool = shutil.which("objdump") or shutil.which("llvm-objdump")
    if tool is None:
        raise BundleError("", "--asm needs objdump, which is not installed", hint="install binutils")
    with temporary_folder() as folder:
        file = folder / "kernels.so"
        file.write_bytes(data)
        args = [tool, "-d", "--no-show-raw-insn", f"--start-address={first}", f"--stop-address={end}", str(file)]
        return subprocess.run(args, capture_output=True, text=True, check=False).stdout
