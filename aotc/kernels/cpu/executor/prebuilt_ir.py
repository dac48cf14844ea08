"""The executor as LLVM IR that is independent of the machine, written by Numba's front end to a file of this folder.

Numba takes five seconds to compile the executor. ``make executor``, or ``python -m
aotc.kernels.cpu.executor.prebuilt_ir``, writes the file. Its first line is a digest of the sources. If the sources have
changed, or if LLVM is too old to read the file, Numba compiles the executor again.
"""

from __future__ import annotations

import hashlib
import lzma
import re
from pathlib import Path

from aotc.kernels import back_end, limits
from aotc.kernels import numba_aot as aot
from aotc.kernels.back_end import Library
from aotc.kernels.cpu.executor.scheduler import EXPORTS
from aotc.targets import Target
from aotc.vmfb import abi

KEPT = Path(__file__).with_name("executor.ll.xz")
_FRONT = Target("front", "cpu", "x86-64")
_NOT_COMPILED = ("__init__.py", "compile.py")
_LIMITS = re.compile(rb"\nfrom aotc\.kernels\.limits import (\([^)]*\)|[^\n]*)")


def digest_of_sources() -> str:
    """Return a digest of the executor's sources, and of the constants that they import from other modules."""
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


def read_prebuilt() -> Library | None:
    """Read the prebuilt executor; return None if the file is out of date, or if this LLVM cannot read it."""
    try:
        first, _, text = lzma.decompress(KEPT.read_bytes()).decode().partition("\n")
    except (OSError, lzma.LZMAError):
        return None
    if first != f"; {digest_of_sources()}":
        return None
    try:
        return back_end.parse_assembly_for_target(text, _FRONT, "prebuilt executor")
    except RuntimeError:
        return None


def compile_executor_by_numba() -> Library:
    """Compile the executor by Numba's front end, without unused functions and with reproducible names."""
    library = back_end.parse_assembly_for_target("", _FRONT, "executor")
    library.retarget(_FRONT)
    for name, row in EXPORTS.items():
        library.link(aot.compile_by_numba_front_end(name, aot.Export(*row), _FRONT))
    library.internalize(EXPORTS)
    library.shrink_numba_module()
    own = [f for f in library.module.functions if not f.is_declaration and f.name not in EXPORTS]
    for number, function in enumerate(own):
        function.name = f"aotc_part_{number}"
    return library


def write_prebuilt() -> None:
    """Write the prebuilt LLVM IR of the executor to its file."""
    text = f"; {digest_of_sources()}\n{compile_executor_by_numba().module}"
    KEPT.write_bytes(lzma.compress(text.encode(), preset=9))


if __name__ == "__main__":
    write_prebuilt()
