"""LLVM's calls that take long, without the lock that llvmlite takes for each: threads make machine code side by side.

LLVM lets threads work at the same time that share no context and no machine; so each has its own of both. llvmlite's
other calls are short, and keep its lock. An llvmlite that has no such functions as these expect is called with it.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
from llvmlite.binding import ffi

_OWN = threading.local()


def _unlocked(name: str) -> Callable[..., Any]:
    locked = getattr(ffi.lib, name)
    try:
        function = getattr(ctypes.CDLL(ffi.lib._name), name)
        function.argtypes, function.restype = locked.argtypes, locked.restype
    except (AttributeError, OSError):
        return locked  # type: ignore[no-any-return]
    return function  # type: ignore[no-any-return]


_PARSE = _unlocked("LLVMPY_ParseAssembly")
_RUN = _unlocked("LLVMPY_RunNewModulePassManager")
_EMIT = _unlocked("LLVMPY_TargetMachineEmitToMemory")


def context() -> llvm.ContextRef:
    """Return the calling thread's context."""
    if not hasattr(_OWN, "context"):
        _OWN.context = llvm.create_context()
    return _OWN.context


def parse_assembly(text: str) -> llvm.ModuleRef:
    """Return the module that ``text`` describes, in the calling thread's context.

    Raises
    ------
    RuntimeError
        If it is no LLVM IR.
    """
    own = context()
    with ffi.OutputString() as error:
        module = llvm.ModuleRef(_PARSE(own, ctypes.c_char_p(text.encode()), error), own)
        if error:
            module.close()
            raise RuntimeError(f"LLVM IR parsing error\n{error}")
    return module


def parse_bitcode(data: bytes) -> llvm.ModuleRef:
    """Return the module whose bitcode ``data`` is, in the calling thread's context."""
    return llvm.parse_bitcode(data, context())


def run_passes(passes: llvm.ModulePassManager, module: llvm.ModuleRef, builder: llvm.PassBuilder) -> None:
    """Run passes on a module."""
    _RUN(passes, module, builder)


def emit_object(machine: llvm.TargetMachine, module: llvm.ModuleRef) -> bytes:
    """Return the relocatable object of a module.

    Raises
    ------
    RuntimeError
        If LLVM cannot make one.
    """
    with ffi.OutputString() as error:
        buffer = _EMIT(machine, module, 1, error)
        if not buffer:
            raise RuntimeError(str(error))
    try:
        return ctypes.string_at(ffi.lib.LLVMPY_GetBufferStart(buffer), ffi.lib.LLVMPY_GetBufferSize(buffer))
    finally:
        ffi.lib.LLVMPY_DisposeMemoryBuffer(buffer)
