"""Compile a printed kernel to a native object by Numba's front end.

The kernel's C function creates arrays from its pointers and calls the Python function. All of it runs in a compiler
process (:mod:`aotc.kernels.worker`), as Numba's context for ahead-of-time compilation replaces that of ``numba.njit``.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import numba
from numba.core import errors, types
from numba.core.dispatcher import Dispatcher

from aotc.ir.loop.ir import Buffer, Kernel
from aotc.ir.loop.scratch import scratch_bytes
from aotc.kernels import back_end, runtime
from aotc.kernels import numba_aot as aot
from aotc.kernels.cpu.custom import MATH_SYMBOLS, numba_error_reason
from aotc.kernels.numba_front.scalars import numba_storage_dtype
from aotc.kernels.numba_front.source import numba_source
from aotc.targets import Target
from aotc.vmfb.abi import IMPORT_PREFIX

_HEAP = frozenset({"malloc", "free"})
_POINTER = types.CPointer(types.uint8)
_SIGNATURE = (
    types.CPointer(_POINTER), types.CPointer(types.int64), types.int64, types.int64, _POINTER,
    types.CPointer(types.int64),
)  # fmt: skip


class KernelRefused(Exception):
    """Numba cannot compile a kernel's function; the text of the exception is the reason."""


def function_from_text(text: str, name: str) -> Callable[..., Any]:
    """Return the function ``name`` that the module ``text`` defines.

    Raises
    ------
    KernelRefused
        If the text is not valid Python, or does not define the function.
    """
    scope: dict[str, Any] = {"__name__": "kernels"}
    path = f"<kernel {name}>"
    linecache.cache[path] = len(text), None, text.splitlines(keepends=True), path  # for the places in Numba's errors
    try:
        exec(compile(text, path, "exec"), scope)
    except Exception as error:
        raise KernelRefused(f"{type(error).__name__}: {error}") from error
    if name not in scope:
        defined = ", ".join(n for n, value in scope.items() if hasattr(value, "__code__")) or "no function"
        raise KernelRefused(f"it does not define {name}; found {defined}")
    function = scope[name]
    return getattr(function, "py_func", function)


def shell_text(kernel: Kernel) -> str:
    """Return the text of the function with the kernel's C signature, which calls ``function`` with arrays."""
    buffers = (*kernel.inputs, *kernel.outputs)
    lines = [f"    {name} = dims[{n}]" for n, name in enumerate(kernel.dims)]
    lines += buffer_arrays(kernel)
    lines.append(f"    memory = array_at(scratch, u8, ({max(scratch_bytes(kernel), 1)},))")
    arguments = [f"x{n}" for n in range(len(buffers))] + [*kernel.dims, "memory", "begin", "end"]
    lines.append(f"    function({', '.join(arguments)})")
    return "\n".join(["def shell(buffers, dims, begin, end, scratch, monitor):", *lines]) + "\n"


def buffer_arrays(kernel: Kernel) -> list[str]:
    """Return the lines that create arrays ``x0``, ``x1``... from pointers to the kernel's buffers."""
    rows = enumerate((*kernel.inputs, *kernel.outputs))
    return [
        f"    x{n} = array_at(buffers[{n}], {numba_storage_dtype(b.dtype)}, {_buffer_shape_text(b)})" for n, b in rows
    ]


def _buffer_shape_text(buffer: Buffer) -> str:
    return f"({', '.join(map(str, buffer.shape or (1,)))},)"


@cache
def _forget_jitted_helpers() -> None:
    """Drop the code that ``numba.njit`` compiled for helpers in this process: ahead of time the context is another."""
    helpers = [m for name, m in list(sys.modules.items()) if name.startswith(runtime.__name__)]
    for helper in (x for module in helpers for x in list(vars(module).values()) if isinstance(x, Dispatcher)):
        helper._reset_overloads()


def kernel_library(kernel: Kernel, target: Target, source: str = "", name: str = "") -> back_end.Library:
    """Return the unoptimized library that defines ``kernel.name`` with the ABI of ``vmfb.abi``.

    ``source`` is the text of a module with the function ``name``, by default the printed kernel.

    Raises
    ------
    KernelRefused
        If Numba cannot compile it without Python.
    """
    _forget_jitted_helpers()
    function = (
        function_from_text(source, name) if source else function_from_text(numba_source(kernel).module, kernel.name)
    )
    scope: dict[str, Any] = {**vars(runtime), "function": numba.njit(error_model="numpy")(function)}
    exec(compile(shell_text(kernel), "<kernel shell>", "exec"), scope)
    try:
        return aot.compile_by_numba_front_end(kernel.name, aot.Export(scope["shell"], types.void, _SIGNATURE), target)
    except (errors.NumbaError, RuntimeError, NotImplementedError) as error:
        raise KernelRefused(numba_error_reason(error)) from error


def compile_kernel(kernel: Kernel, target: Target, source: str = "", name: str = "") -> bytes:
    """Return the relocatable object that defines ``kernel.name``, compiled by Numba's front end.

    ``source`` and ``name`` are as for :func:`kernel_library`.

    Raises
    ------
    KernelRefused
        As :func:`kernel_library`, or if the code calls a function that only a process with Numba has.
    """
    library = kernel_library(kernel, target, source, name)
    library.optimize()
    foreign = sorted(library.imports() - back_end.LIBC_ALLOWED - MATH_SYMBOLS - _HEAP)
    if foreign:
        raise KernelRefused(f"it calls {', '.join(foreign)}, which exists only in a process with Numba")
    variables = {v.name for v in library.module.global_variables if v.is_declaration}
    if unknown := sorted(v for v in variables if not v.startswith(IMPORT_PREFIX)):
        raise KernelRefused(f"it uses {', '.join(unknown)}, which exists only in a process with Numba")
    return library.emit_native_object()
