"""Interface to libNVVM, which compiles LLVM IR to LTO-IR (for nvJitLink) or to PTX."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from pathlib import Path

from aotc.diagnostics import UNKNOWN, CompileError, InternalError
from aotc.vmfb.host.install import install_command

_VERSION = re.compile(rb"^\.version (\d+)\.(\d+)", re.MULTILINE)
_AHEAD = 4  # CUDA's major version minus PTX's: CUDA 13.0 has PTX 9.0
_DEVICE_LIBRARY = "__nv_"
"""Its functions' names begin with this."""
_OPTIONS = ("-opt=3", "-fma=0")
"""Multiplications and additions are fused only where the IR allows it (``contract``)."""


def check_cuda_packages(target: str) -> None:
    """Check that the packages that compile for CUDA are installed.

    Numba alone does not suffice: its older ``numba.cuda`` lacks functions that this package needs.

    Raises
    ------
    CompileError
        If a package is missing.
    """
    try:
        from cuda.bindings import nvjitlink, nvvm

        nvvm.version()
        nvjitlink.version()
        metadata.version("numba-cuda")
    except Exception as error:
        message = f"target {target} needs numba-cuda, libNVVM and nvJitLink: {error}"
        raise CompileError.at(UNKNOWN, message, hint=install_command("cuda-compile")) from error


def nvvm_ltoir(texts: Sequence[str], arch: str) -> bytes:
    """Compile LLVM modules, linked together, to LTO-IR for an architecture such as ``sm_90a``."""
    return _compile_by_libnvvm(texts, [f"-arch={arch.replace('sm_', 'compute_')}", *_OPTIONS, "-gen-lto"])


def nvvm_ptx(texts: Sequence[str], arch: str) -> str:
    """Compile LLVM modules, linked together, to PTX for an architecture such as ``compute_80``."""
    return _compile_by_libnvvm(texts, [f"-arch={arch.replace('sm_', 'compute_')}", *_OPTIONS]).decode().rstrip("\0")


def oldest_cuda_driver(text: bytes) -> tuple[int, int]:
    """Return the oldest CUDA version (major, minor) whose driver compiles this PTX.

    It is the version of the libNVVM that generated the PTX.
    """
    found = _VERSION.search(text)
    if found is None:
        raise InternalError("the PTX of libNVVM has no version")
    return int(found[1]) + _AHEAD, int(found[2])


@cache
def _libdevice_bitcode() -> bytes:
    """Read NVIDIA's library of math functions, which Numba calls, as LLVM bitcode."""
    from cuda.pathfinder import find_bitcode_lib

    return Path(find_bitcode_lib("device")).read_bytes()


def _compile_by_libnvvm(texts: Sequence[str], options: list[str]) -> bytes:
    """Compile LLVM modules and libdevice by libNVVM with the given options."""
    from cuda.bindings import nvvm

    program = nvvm.create_program()
    try:
        for text in texts:
            data = text.encode()
            nvvm.add_module_to_program(program, data, len(data), "kernel")
        if any(_DEVICE_LIBRARY in text for text in texts):
            library = _libdevice_bitcode()
            nvvm.lazy_add_module_to_program(program, library, len(library), "libdevice")
        nvvm.compile_program(program, len(options), options)
        found = bytearray(nvvm.get_compiled_result_size(program))
        nvvm.get_compiled_result(program, found)
    except nvvm.nvvmError as error:
        log = bytearray(nvvm.get_program_log_size(program))
        nvvm.get_program_log(program, log)
        raise InternalError(f"libNVVM cannot compile a kernel: {error}\n{log.decode(errors='replace')}") from error
    finally:
        nvvm.destroy_program(program)
    return bytes(found)
