"""LLVM's calls without the lock that llvmlite takes for each: threads make machine code side by side.

LLVM lets threads work at the same time that share no context and no machine; so each has its own of both. A call that
takes long (``_LONG``) leaves Python to other threads. One that is short (``_short``) keeps Python's lock: who gives it
up for a microsecond has to wait for it where another thread is busy, and a kernel takes some forty such calls. An
llvmlite that has no such functions as these expect is called as it wants to be.
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
    """Return a function of LLVM's, of which ``library`` says whether it keeps Python's lock."""
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
    """Give room for what LLVM says is wrong."""
    said = ctypes.c_char_p(None)
    try:
        yield said
    finally:
        if said:
            _short("DisposeString")(said)


def _text(said: ctypes.c_char_p) -> str:
    return (said.value or b"").decode(errors="replace")


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
    with _message() as said:
        module = llvm.ModuleRef(_PARSE(own, ctypes.c_char_p(text.encode()), ctypes.byref(said)), own)
        if said:
            module.close()
            raise RuntimeError(f"LLVM IR parsing error\n{_text(said)}")
    return module


def parse_bitcode(data: bytes) -> llvm.ModuleRef:
    """Return the module whose bitcode ``data`` is, in the calling thread's context."""
    return llvm.parse_bitcode(data, context())


def verify(module: llvm.ModuleRef) -> None:
    """Let LLVM check a module.

    Raises
    ------
    RuntimeError
        If LLVM finds it invalid.
    """
    with _message() as said:
        if _short("VerifyModule")(module, ctypes.byref(said)):
            raise RuntimeError(_text(said))


def link_hidden(module: llvm.ModuleRef, other: llvm.ModuleRef, names: Sequence[str]) -> None:
    """Put ``other``, which is not to be used again, into ``module``, and hide its functions ``names`` there.

    Raises
    ------
    RuntimeError
        If LLVM cannot link them.
    """
    with _message() as said:
        failed = _short("LinkModules")(module, other, ctypes.byref(said))
        other.detach()  # LLVM has disposed of it
        if failed:
            raise RuntimeError(_text(said))
    for name in names:
        function = _short("GetNamedFunction")(module, name.encode())
        if function:  # LLVM leaves out what nobody calls
            _short("SetLinkage")(function, llvm.Linkage.internal)


def run_passes(
    module: llvm.ModuleRef, machine: llvm.TargetMachine, passes: Sequence[str], pipeline: tuple[int, bool] | None = None
) -> None:
    """Run ``passes``, by their names in llvmlite's functions, on a module.

    ``pipeline`` is LLVM's own before them: of what level, and whether loops are made vectors and unrolled.
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
        _short("DisposeNewModulePassManger")(manager)  # so it is spelled
        _short("DisposePassBuilder")(builder)
        _short("DisposePipelineTuningOptions")(tuning)


def emit_object(machine: llvm.TargetMachine, module: llvm.ModuleRef) -> bytes:
    """Return the relocatable object of a module.

    Raises
    ------
    RuntimeError
        If LLVM cannot make one.
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
    """Let go of a module, which is not to be used again."""
    _short("DisposeModule")(module)
    module.detach()
