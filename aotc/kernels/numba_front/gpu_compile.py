"""Compile a printed kernel to an image for a GPU by numba.cuda's front end.

The kernel that the driver launches creates arrays from its pointers and calls the Python function, a device function of
numba.cuda. libNVVM and nvJitLink do the rest, as for kernels that are emitted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda
from numba.core.errors import NumbaError
from numba.cuda import types

from aotc.diagnostics import InternalError
from aotc.ir.loop.ir import Kernel, thread_count
from aotc.kernels import runtime
from aotc.kernels.cpu.custom import numba_error_reason
from aotc.kernels.cuda.compile import image_of_modules
from aotc.kernels.cuda.flat import block_threads_of_flat_kernel
from aotc.kernels.cuda.front_end import ENTRY, compile_to_llvm_ir
from aotc.kernels.cuda.image import Image
from aotc.kernels.numba_front.compile import KernelRefused, buffer_arrays, function_from_text
from aotc.kernels.numba_front.gpu_source import gpu_source
from aotc.targets import Target


def shell_text(kernel: Kernel) -> str:
    """Return the text of the kernel that the driver launches; it calls ``function`` with arrays."""
    dims = [f"dims[{n}]" for n in range(len(kernel.dims))]
    lines = [f"    {name} = {value}" for name, value in zip(kernel.dims, dims, strict=True)]
    lines += buffer_arrays(kernel)
    count = len(kernel.inputs) + len(kernel.outputs)
    lines.append(f"    function({', '.join([*(f'x{n}' for n in range(count)), *kernel.dims, 'items'])})")
    return "\n".join(["def shell(buffers, dims, items):", *lines]) + "\n"


def kernel_texts(kernel: Kernel, target: Target, function: Callable[..., Any]) -> list[str]:
    """Return the modules of a kernel for libNVVM; the entry point has the kernel's name.

    Raises
    ------
    KernelRefused
        If Numba cannot compile the function.
    """
    scope: dict[str, Any] = {**vars(runtime), "function": _device_function_of(function)}
    exec(compile(shell_text(kernel), "<kernel shell>", "exec"), scope)
    pointers = len(kernel.inputs) + len(kernel.outputs)
    arguments = (
        types.UniTuple(types.CPointer(types.uint8), pointers), types.UniTuple(types.int64, len(kernel.dims)),
        types.int64,
    )  # fmt: skip
    threads = thread_count(kernel) or block_threads_of_flat_kernel(kernel)
    try:
        texts = compile_to_llvm_ir(scope["shell"], arguments, threads)
    except (NumbaError, RuntimeError, NotImplementedError) as error:
        raise KernelRefused(numba_error_reason(error)) from error
    return [text.replace(ENTRY, kernel.name) for text in texts]


def _device_function_of(function: Callable[..., Any]) -> Any:
    return cuda.jit(device=True)(getattr(function, "py_func", function))


def compile_function(kernel: Kernel, target: Target, function: Callable[..., Any]) -> Image:
    """Return the image of a function for numba.cuda with the parameters of ``kernel``.

    Raises
    ------
    KernelRefused
        If Numba, libNVVM or nvJitLink cannot compile it.
    """
    texts = kernel_texts(kernel, target, function)
    try:
        return image_of_modules(texts, kernel.name, target)
    except InternalError as error:
        raise KernelRefused(str(error)) from error


def compile_kernel(kernel: Kernel, target: Target, source: str = "", name: str = "") -> Image:
    """Return the image of ``kernel``, compiled by numba.cuda's front end.

    ``source`` is the text of a module with the function ``name``, by default the printed kernel.

    Raises
    ------
    KernelRefused
        As :func:`compile_function`.
    """
    function = (
        function_from_text(source, name)
        if source
        else function_from_text(gpu_source(kernel, target).module, kernel.name)
    )
    return compile_function(kernel, target, function)
