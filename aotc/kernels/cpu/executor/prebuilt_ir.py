"""The executor as LLVM IR for any machine: what Numba makes of its Python, kept in a file beside it.

To make it again takes Numba five seconds. ``make executor``, or ``python -m aotc.kernels.cpu.executor.prebuilt_ir``,
writes the
file; its first line is a digest of what it was made of. Where that does not hold any more, and where LLVM is too old to
read the file, the executor is made of its Python.
"""

from __future__ import annotations

import hashlib
import lzma
import re
from pathlib import Path

import llvmlite.binding as llvm

from aotc.kernels import back_end, limits
from aotc.targets import Target
from aotc.vmfb import abi

KEPT = Path(__file__).with_name("executor.ll.xz")
_FRONT = Target("front", "cpu", "x86-64")
_NOT_COMPILED = ("__init__.py", "arch_ir.py", "compile.py")
_LIMITS = re.compile(rb"\nfrom aotc\.kernels\.limits import (\([^)]*\)|[^\n]*)")


def digest_of_sources() -> str:
    """Return a digest of the executor's Python, and of the numbers that it takes from tables of others."""
    digest = hashlib.sha256()
    folder = Path(__file__).parent
    paths = [path for path in folder.glob("*.py") if path.name not in _NOT_COMPILED]
    paths.append(folder.parents[1] / "numba_aot.py")
    names: set[str] = set()
    for path in sorted(paths):
        source = path.read_bytes()
        digest.update(f"{path.name} {len(source)}\n".encode() + source)
        for imported in _LIMITS.findall(source):
            names.update(re.findall(r"\w+", imported.decode()))
    table = {name: getattr(limits, name) for name in names}
    words = {name: value for name, value in vars(abi).items() if isinstance(value, int) and name.isupper()}
    digest.update(repr((sorted(table.items()), sorted(words.items()))).encode())
    return digest.hexdigest()


def kept_module() -> llvm.ModuleRef | None:
    """Return the module of the file, or None if it is not of these sources or this LLVM cannot read it."""
    try:
        first, _, text = lzma.decompress(KEPT.read_bytes()).decode().partition("\n")
    except (OSError, lzma.LZMAError):
        return None
    if first != f"; {digest_of_sources()}":
        return None
    try:
        return llvm.parse_assembly(text)
    except RuntimeError:
        return None


def made_module() -> llvm.ModuleRef:
    """Return the module that Numba makes: without what nobody calls, by names that are always the same."""
    from aotc.kernels import numba_aot as aot
    from aotc.kernels.cpu.executor.main import EXPORTS

    module = llvm.parse_assembly("")
    back_end.retarget(module, _FRONT)
    for name, row in EXPORTS.items():
        module.link_in(aot.front_end(name, aot.Export(*row), _FRONT))
    back_end.internalize(module, EXPORTS)
    back_end.tidy(module, _FRONT)
    own = [f for f in module.functions if not f.is_declaration and f.name not in EXPORTS]
    for number, function in enumerate(own):
        function.name = f"aotc_part_{number}"
    return module


def exports_of(module: llvm.ModuleRef) -> set[str]:
    """Return the functions that others may call."""
    return {f.name for f in module.functions if not f.is_declaration and f.linkage == llvm.Linkage.external}


def write() -> None:
    """Write the file."""
    text = f"; {digest_of_sources()}\n{made_module()}"
    KEPT.write_bytes(lzma.compress(text.encode(), preset=9))


if __name__ == "__main__":
    write()
