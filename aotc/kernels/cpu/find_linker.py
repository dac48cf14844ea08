"""Find a linker: a program of the system, or the Python package ``ziglang``.

No code generator is imported here: the pipeline looks for the linker before it compiles anything.
"""

from __future__ import annotations

import os
import shutil
from functools import cache
from importlib.util import find_spec

from aotc.diagnostics import UNKNOWN, CompileError
from aotc.targets import Target, host_target
from aotc.vmfb.host.install import install_command


@cache
def _host_architecture() -> str:
    return host_target().triple.split("-")[0]


def linker_of_target(target: Target) -> tuple[str, ...]:
    """Return the command line of a linker for a CPU target.

    Raises
    ------
    CompileError
        If no linker is installed.
    """
    return linker_command(target.triple.split("-")[0] == _host_architecture())


@cache
def linker_command(native: bool) -> tuple[str, ...]:
    """Return the command line of a linker, with the options for a shared library.

    Parameters
    ----------
    native : bool
        True to link for this machine's architecture; otherwise the linker must support all architectures.

    Raises
    ------
    CompileError
        If no linker is installed; the message names a package.
    """
    for name in ("ld.lld", "ld") if native else ("ld.lld",):
        path = shutil.which(name)
        if path:
            return (path, "-shared", "--build-id=none")
    zig = _zig_program()
    if zig:
        return (zig, "ld.lld", "-shared", "--build-id=none")
    compiler = shutil.which("cc") or shutil.which("gcc") if native else None
    if compiler:
        return (compiler, "-shared", "-nostdlib", "-Wl,--build-id=none")
    tried = "ld.lld, ld or cc" if native else "ld.lld, which links for all machines"
    raise CompileError.at(UNKNOWN, f"found no linker on the PATH, expected {tried}", hint=install_command("linker"))


def _zig_program() -> str | None:
    """Return the path of the ``zig`` program of the package ``ziglang``, or None if it is not installed."""
    found = find_spec("ziglang")
    folders = (found.submodule_search_locations if found else None) or ()
    return next((zig for f in folders if os.access(zig := os.path.join(f, "zig"), os.X_OK)), None)
