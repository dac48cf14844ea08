"""Compile a loop-IR kernel to an image (cubin or PTX). No GPU is needed.

The *shell*, Python compiled by numba.cuda, calls the *body*, which is emitted from the loop IR. libNVVM compiles both
to LTO-IR, which nvJitLink compiles as one program. For a portable target libNVVM generates PTX, which the driver
compiles.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from aotc.diagnostics import InternalError
from aotc.ir.loop.ir import Kernel
from aotc.kernels.cuda import nvvm
from aotc.kernels.cuda.device_function import device_functions_text
from aotc.kernels.cuda.dialect import convert_to_nvvm_dialect
from aotc.kernels.cuda.emit import CudaEmitter, block_threads
from aotc.kernels.cuda.flat import block_threads_of_flat_kernel
from aotc.kernels.cuda.image import Image
from aotc.kernels.cuda.shell import BODY, shell_text
from aotc.kernels.cuda.templates.launches import template_texts
from aotc.kernels.cuda.tile import emit_tile
from aotc.kernels.emit.body import emit_body
from aotc.kernels.emit.rare_calls import define_scalar_rare_functions
from aotc.kernels.llvm_types import KernelModule
from aotc.targets import Target


def kernel_body_text(kernel: Kernel, target: Target) -> str:
    """Emit the body of a kernel, the function that runs one item of the grid, as LLVM IR."""
    module = KernelModule(kernel.name, target)
    function = emit_body(module, BODY, kernel, target, emit_tile, CudaEmitter, CudaEmitter.parameters(kernel))
    function.linkage = "linkonce_odr"
    define_scalar_rare_functions(module)
    return convert_to_nvvm_dialect(module)


def kernel_texts(kernel: Kernel, target: Target) -> list[str]:
    """Emit a kernel as text of LLVM modules; the entry point has the kernel's name."""
    if kernel.tiling is not None:
        texts, functions = template_texts(kernel, target)
        return [*texts, device_functions_text(functions, kernel, target)]
    threads = block_threads(kernel)
    pointers = len(kernel.inputs) + len(kernel.outputs)
    shell = shell_text(
        kernel.name, threads > 0, pointers, len(kernel.dims), threads or block_threads_of_flat_kernel(kernel)
    )
    return [shell, kernel_body_text(kernel, target)]


def kernel_ptx(kernel: Kernel, target: Target) -> str:
    """Compile a kernel to PTX."""
    return nvvm.nvvm_ptx(kernel_texts(kernel, target), target.cpu)


def compile_kernel(kernel: Kernel, target: Target) -> Image:
    """Compile a kernel to an image (cubin or PTX), which the driver loads."""
    return image_of_modules(kernel_texts(kernel, target), kernel.name, target)


def image_of_modules(texts: Sequence[str], symbol: str, target: Target) -> Image:
    """Compile LLVM modules to the image of one program with the kernel ``symbol``."""
    if target.portable:
        return Image(nvvm.nvvm_ptx(texts, target.cpu).encode() + b"\0")
    return link_cubin(nvvm.nvvm_ltoir(texts, target.cpu), target.cpu, symbol)


# Options of nvJitLink, and the resources that its log reports.
_OPTIONS = ("-lto", "-fma=0", "-verbose", "-no-cache")  # a result of its own cache has no log
_RESOURCES = {
    "registers": re.compile(r"Used (\d+) registers"),
    "shared": re.compile(r"(\d+) bytes smem"),
    "stack": re.compile(r"(\d+) bytes stack frame"),
    "spills": re.compile(r"(\d+) bytes spill stores"),
}


def link_cubin(ltoir: bytes, arch: str, symbol: str) -> Image:
    """Link LTO-IR to the cubin of the kernel ``symbol`` for an architecture such as ``sm_90a``.

    Raises
    ------
    InternalError
        If nvJitLink refuses the LTO-IR; its log is in the message.
    """
    from cuda.bindings import nvjitlink

    options = [f"-arch={arch}", *_OPTIONS]
    handle = nvjitlink.create(len(options), options)
    try:
        nvjitlink.add_data(handle, nvjitlink.InputType.LTOIR, ltoir, len(ltoir), symbol)
        nvjitlink.complete(handle)
        cubin = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, cubin)
        log = bytearray(nvjitlink.get_info_log_size(handle))
        nvjitlink.get_info_log(handle, log)
    except nvjitlink.nvJitLinkError as error:
        log = bytearray(nvjitlink.get_error_log_size(handle))
        nvjitlink.get_error_log(handle, log)
        raise InternalError(f"kernel {symbol}: {error}\n{log.decode(errors='replace')}") from error
    finally:
        nvjitlink.destroy(handle)
    return Image(bytes(cubin), resources_in_linker_log(log.decode(errors="replace")))


def resources_in_linker_log(log: str) -> dict[str, int]:
    """Read the kernel's resources from nvJitLink's log; resources that the log does not mention are 0."""
    found = {name: pattern.search(log) for name, pattern in _RESOURCES.items()}
    return {name: int(match[1]) if match else 0 for name, match in found.items()}
