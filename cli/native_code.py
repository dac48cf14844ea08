"""What a shared object holds: sizes of its functions, and their disassembly by the system's objdump."""

from __future__ import annotations

import re
import struct
from typing import Any

_SYMTAB, _DYNSYM, _FUNCTION = 2, 11, 2


def function_sizes(data: Any) -> dict[str, int]:
    """Return the bytes of machine code of every named function of a 64-bit little-endian ELF file."""
    view = memoryview(data)
    if bytes(view[:6]) != b"\x7fELF\x02\x01":
        return {}
    (sections,) = struct.unpack_from("<Q", view, 40)
    size, count = struct.unpack_from("<HH", view, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", view, sections + i * size) for i in range(count)]
    found: dict[str, int] = {}
    for header in headers:
        if header[1] not in (_SYMTAB, _DYNSYM):
            continue
        names = headers[header[6]]
        for at in range(header[4], header[4] + header[5], 24):
            name, info, _, _, _, length = struct.unpack_from("<IBBHQQ", view, at)
            if info & 15 == _FUNCTION and length:
                start = names[4] + name
                text = bytes(view[start : start + 512]).split(b"\0", 1)[0]
                found[text.decode(errors="replace")] = length
    return found


def kernel_sizes(data: Any, kernels: list[str]) -> dict[str, int]:
    """Return the bytes of code of each kernel whose symbol is, or ends in, its name."""
    sizes = function_sizes(data)
    found = {}
    for kernel in kernels:
        pattern = re.compile(rf"(?:.*[^A-Za-z0-9_])?_*{re.escape(kernel)}")
        hits = [size for name, size in sizes.items() if pattern.fullmatch(name)]
        if hits:
            found[kernel] = max(hits)
    return found


def disassemble(data: Any, kernel: str = "") -> str:
    """Return assembly text of a shared object, or of one function.

    Raises
    ------
    BundleError
        If there is no objdump.
    """
    import shutil
    import subprocess
    import tempfile

    from aotc.vmfb.errors import BundleError

    tool = shutil.which("objdump") or shutil.which("llvm-objdump")
    if tool is None:
        raise BundleError("", "--asm needs objdump, which is not installed", hint="install binutils")
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(data)
        file.flush()
        only = [f"--disassemble={kernel}"] if kernel else ["-d"]
        return subprocess.run([tool, *only, "-C", file.name], capture_output=True, text=True, check=False).stdout
