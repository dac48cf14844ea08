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


def _llvm_c_function(library: type[ctypes.CDLL], name: str) -> Callable[..., Any]:
    """Return an LLVM function; it releases the GIL if ``library`` is CDLL, and keeps it if PyDLL."""
    locked = getattr(ffi.lib, name)
    try:
        function = getattr(library(ffi.lib._name), name)
        function.argtypes, function.restype = locked.argtypes, locked.restype
    except (AttributeError, OSError):
        return locked  # type: ignore[no-any-return]
    return function  # type: ignore[no-any-return]


@cache
def _short_llvm_name(name: str) -> Callable[..., Any]:
    return _llvm_c_function(ctypes.PyDLL, f"LLVMPY_{name}")


_PARSE, _RUN, _EMIT = _LONG = tuple(
    _llvm_c_function(ctypes.CDLL, f"LLVMPY_{name}")
    for name in ("ParseAssembly", "RunNewModulePassManager", "TargetMachineEmitToMemory")
)


@contextmanager
def _llvm_error_message() -> Iterator[ctypes.c_char_p]:
    """Yield a variable for LLVM's error message; free the message afterwards."""
    said = ctypes.c_char_p(None)
    try:
        yield said
    finally:
        if said:
            _short_llvm_name("DisposeString")(said)


def _message_text(said: ctypes.c_char_p) -> str:
    return (said.value or b"").decode(errors="replace")


def llvm_context_of_thread() -> llvm.ContextRef:
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
    own = llvm_context_of_thread()
    with _llvm_error_message() as said:
        module = llvm.ModuleRef(_PARSE(own, ctypes.c_char_p(text.encode()), ctypes.byref(said)), own)
        if said:
            module.close()
            raise RuntimeError(f"LLVM IR parsing error\n{_message_text(said)}")
    return module


def parse_bitcode(data: bytes) -> llvm.ModuleRef:
    """Return the module of the bitcode ``data``, in the calling thread's context."""
    return llvm.parse_bitcode(data, llvm_context_of_thread())


def verify_llvm_module(module: llvm.ModuleRef) -> None:
    """Run LLVM's verifier on a module.

    Raises
    ------
    RuntimeError
        If LLVM finds the module invalid.
    """
    with _llvm_error_message() as said:
        if _short_llvm_name("VerifyModule")(module, ctypes.byref(said)):
            raise RuntimeError(_message_text(said))


def link_llvm_modules(module: llvm.ModuleRef, other: llvm.ModuleRef) -> None:
    """Link ``other``, which must not be used again, into ``module``.

    Raises
    ------
    RuntimeError
        If LLVM cannot link them, or if their contexts differ.
    """
    if module._context is not other._context:
        raise RuntimeError("modules of two LLVM contexts cannot be linked")
    with _llvm_error_message() as said:
        failed = _short_llvm_name("LinkModules")(module, other, ctypes.byref(said))
        other.detach()  # LLVM has freed it
        if failed:
            raise RuntimeError(_message_text(said))


def make_functions_internal(module: llvm.ModuleRef, names: Sequence[str]) -> None:
    """Make the functions ``names`` of a module internal."""
    for name in names:
        function = _short_llvm_name("GetNamedFunction")(module, name.encode())
        if function:  # LLVM drops unused functions
            _short_llvm_name("SetLinkage")(function, llvm.Linkage.internal)


def run_passes(
    module: llvm.ModuleRef, machine: llvm.TargetMachine, passes: Sequence[str], pipeline: tuple[int, bool] | None = None
) -> None:
    """Run ``passes``, by their names in llvmlite's functions, on a module.

    ``pipeline`` is LLVM's own pipeline before them: its level, and whether loops are vectorized and unrolled.
    """
    tuning = _short_llvm_name("CreatePipelineTuningOptions")()
    if pipeline:
        for name in _TUNINGS:
            _short_llvm_name(f"PTOSet{name}")(tuning, pipeline[1])
    builder = _short_llvm_name("CreatePassBuilder")(machine, tuning)
    if pipeline:
        manager = _short_llvm_name("buildPerModuleDefaultPipeline")(builder, pipeline[0])
    else:
        manager = _short_llvm_name("CreateNewModulePassManager")()
    try:
        for name in passes:
            _short_llvm_name(f"module_Add{name}Pass")(manager)
        _RUN(manager, module, builder)
    finally:
        _short_llvm_name("DisposeNewModulePassManger")(manager)  # sic
        _short_llvm_name("DisposePassBuilder")(builder)
        _short_llvm_name("DisposePipelineTuningOptions")(tuning)


def emit_object(machine: llvm.TargetMachine, module: llvm.ModuleRef) -> bytes:
    """Return the relocatable object of a module.

    Raises
    ------
    RuntimeError
        If LLVM cannot generate it.
    """
    with _llvm_error_message() as said:
        buffer = _EMIT(machine, module, 1, ctypes.byref(said))
        if not buffer:
            raise RuntimeError(_message_text(said))
    try:
        return ctypes.string_at(_short_llvm_name("GetBufferStart")(buffer), _short_llvm_name("GetBufferSize")(buffer))
    finally:
        _short_llvm_name("DisposeMemoryBuffer")(buffer)


def dispose_llvm_module(module: llvm.ModuleRef) -> None:
    """Free a module, which must not be used again."""
    _short_llvm_name("DisposeModule")(module)
    module.detach()
