"""LLVM calls without llvmlite's global lock, so that threads generate machine code in parallel.

LLVM allows this for threads that share neither a context nor a target machine, so each thread has its own of both. Long
calls (``_LONG``) release the GIL. Short ones (``_short``) keep it: a thread that releases it for a microsecond must
wait if another thread is busy, and a kernel makes about forty such calls. If llvmlite's library lacks an expected
function, the locked one is called.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import llvmlite.binding as llvm
from llvmlite.binding import ffi

_OWN = threading.local()
_TUNINGS = ("LoopVectorization", "SLPVectorization", "LoopInterleaving", "LoopUnrolling")


def _function(library: type[ctypes.CDLL], name: str) -> Callable[..., Any]:
    """Return an LLVM function; it releases the GIL if ``library`` is CDLL, and keeps it if PyDLL."""
    locked = getattr(ffi.lib, name)
    try:
        function = getattr(library(ffi.lib._name), name)
        function.argtypes, function.restype = locked.argtypes, locked.restype
    except (AttributeError, OSError):
        return locked  # type: ignore[no-any-return]
    return function  # type: ignore[no-any-return]


@cache
def _short(name: str) -> Callable[..., Any]:
    return _function(ctypes.PyDLL, f"LLVMPY_{name}")


_PARSE, _RUN, _EMIT = _LONG = tuple(
    _function(ctypes.CDLL, f"LLVMPY_{name}")
    for name in ("ParseAssembly", "RunNewModulePassManager", "TargetMachineEmitToMemory")
)


@contextmanager
def _message() -> Iterator[ctypes.c_char_p]:
    """Yield a variable for LLVM's error message; free the message afterwards."""
    said = ctypes.c_char_p(None)
    try:
        yield said
    finally:
        if said:
            _short("DisposeString")(said)


def _text(said: ctypes.c_char_p) -> str:
    return (said.value or b"").decode(errors="replace")


def context() -> llvm.ContextRef:
    """Return the LLVM context of the calling thread."""
    if not hasattr(_OWN, "context"):
        _OWN.context = llvm.create_context()
    return _OWN.context


def parse_assembly(text: str) -> llvm.ModuleRef:
    """Return the module of the LLVM assembly ``text``, in the calling thread's context.

    Raises
    ------
    RuntimeError
        If the text is not valid LLVM IR.
    """
    own = context()
    with _message() as said:
        module = llvm.ModuleRef(_PARSE(own, ctypes.c_char_p(text.encode()), ctypes.byref(said)), own)
        if said:
            module.close()
            raise RuntimeError(f"LLVM IR parsing error\n{_text(said)}")
    return module


def parse_bitcode(data: bytes) -> llvm.ModuleRef:
    """Return the module of the bitcode ``data``, in the calling thread's context."""
    return llvm.parse_bitcode(data, context())


def verify(module: llvm.ModuleRef) -> None:
    """Run LLVM's verifier on a module.

    Raises
    ------
    RuntimeError
        If LLVM finds the module invalid.
    """
    with _message() as said:
        if _short("VerifyModule")(module, ctypes.byref(said)):
            raise RuntimeError(_text(said))


def link(module: llvm.ModuleRef, other: llvm.ModuleRef) -> None:
    """Link ``other``, which must not be used again, into ``module``.

    Raises
    ------
    RuntimeError
        If LLVM cannot link them, or if their contexts differ.
    """
    if module._context is not other._context:
        raise RuntimeError("modules of two LLVM contexts cannot be linked")
    with _message() as said:
        failed = _short("LinkModules")(module, other, ctypes.byref(said))
        other.detach()  # LLVM has freed it
        if failed:
            raise RuntimeError(_text(said))


def hide(module: llvm.ModuleRef, names: Sequence[str]) -> None:
    """Make the functions ``names`` of a module internal."""
    for name in names:
        function = _short("GetNamedFunction")(module, name.encode())
        if function:  # LLVM drops unused functions
            _short("SetLinkage")(function, llvm.Linkage.internal)


def run_passes(
    module: llvm.ModuleRef, machine: llvm.TargetMachine, passes: Sequence[str], pipeline: tuple[int, bool] | None = None
) -> None:
    """Run ``passes``, by their names in llvmlite's functions, on a module.

    ``pipeline`` is LLVM's own pipeline before them: its level, and whether loops are vectorized and unrolled.
    """
    tuning = _short("CreatePipelineTuningOptions")()
    if pipeline:
        for name in _TUNINGS:
            _short(f"PTOSet{name}")(tuning, pipeline[1])
    builder = _short("CreatePassBuilder")(machine, tuning)
    if pipeline:
        manager = _short("buildPerModuleDefaultPipeline")(builder, pipeline[0])
    else:
        manager = _short("CreateNewModulePassManager")()
    try:
        for name in passes:
            _short(f"module_Add{name}Pass")(manager)
        _RUN(manager, module, builder)
    finally:
        _short("DisposeNewModulePassManger")(manager)  # sic
        _short("DisposePassBuilder")(builder)
        _short("DisposePipelineTuningOptions")(tuning)


def emit_object(machine: llvm.TargetMachine, module: llvm.ModuleRef) -> bytes:
    """Return the relocatable object of a module.

    Raises
    ------
    RuntimeError
        If LLVM cannot generate it.
    """
    with _message() as said:
        buffer = _EMIT(machine, module, 1, ctypes.byref(said))
        if not buffer:
            raise RuntimeError(_text(said))
    try:
        return ctypes.string_at(_short("GetBufferStart")(buffer), _short("GetBufferSize")(buffer))
    finally:
        _short("DisposeMemoryBuffer")(buffer)


def dispose(module: llvm.ModuleRef) -> None:
    """Free a module, which must not be used again."""
    _short("DisposeModule")(module)
    module.detach()
