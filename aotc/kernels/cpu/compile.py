"""One loop-IR kernel to one native object.

The kernel function is Python compiled by Numba: the loop over a range of the
grid around a call of the *body*. That shell is the same for all kernels, so Numba
compiles it once per process; the body is emitted from the loop IR and linked to
a copy of it, and LLVM inlines one into the other.
"""

from __future__ import annotations

from functools import cache

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from aotc.diagnostics import InternalError
from aotc.ir.loop_ir import Kernel
from aotc.kernels import numba_aot as aot
from aotc.kernels.cpu.tile import emit_tile
from aotc.kernels.emit.body import emit_body
from aotc.kernels.emit.metadata import assembly_text
from aotc.kernels.emit.poll import annotate_polls
from aotc.kernels.emit.rare_calls import annotate_rare_calls, define
from aotc.kernels.llvm_types import I64, PTR, VOID, KernelModule
from aotc.targets import Target

_SHELL, _BODY = "aotc_shell", "aotc_body"


@intrinsic
def _body(typing_context, buffers, dims, item, scratch, monitor):
    """Call the body of the kernel for one item of the grid."""

    def generate(context, builder, signature, arguments):
        function = builder.module.globals.get(_BODY)
        if function is None:
            function = ir.Function(builder.module, ir.FunctionType(VOID, [PTR, PTR, I64, PTR, PTR]), _BODY)
        builder.call(function, [builder.bitcast(a, PTR) if a.type != I64 else a for a in arguments])
        return context.get_dummy_value()

    return types.void(buffers, dims, item, scratch, monitor), generate


def _shell(buffers, dims, begin, end, scratch, monitor):
    for item in range(begin, end):
        _body(buffers, dims, item, scratch, monitor)


@cache
def _shell_bitcode(target: Target) -> bytes:
    words = types.CPointer(types.int64)
    arguments = (types.CPointer(types.voidptr), words, types.int64, types.int64, types.voidptr, words)
    module = aot.front_end(_SHELL, aot.Export(_shell, types.void, arguments), target)
    aot.optimize(module, target)
    return module.as_bitcode()


def kernel_module(kernel: Kernel, target: Target) -> llvm.ModuleRef:
    """Return the unoptimised LLVM module that defines ``kernel.name`` with the ABI of ``vmfb.abi``."""
    body = KernelModule(kernel.name, target)
    body.data_layout = str(aot.target_machine(target).target_data)
    emit_body(body, _BODY, kernel, target, emit_tile)
    module = llvm.parse_assembly(annotate_rare_calls(annotate_polls(assembly_text(body))))
    module.link_in(llvm.parse_bitcode(_shell_bitcode(target)))
    module.get_function(_SHELL).name = kernel.name
    aot.internalize(module, {kernel.name})
    return module


def optimized_module(kernel: Kernel, target: Target) -> llvm.ModuleRef:
    """Return the module of ``kernel`` after LLVM's O3.

    Raises
    ------
    InternalError
        If LLVM finds the IR invalid, or if the code calls a function that a
        bundle does not have.
    """
    module = kernel_module(kernel, target)
    try:
        module.verify()
    except RuntimeError as error:
        raise InternalError(f"kernel {kernel.name}: {error}") from error
    aot.optimize(module, target)
    if define(module, target):
        aot.inline_late(module, target)
    return module


def compile_kernel(kernel: Kernel, target: Target) -> bytes:
    """Return the relocatable object that defines ``kernel.name``."""
    return aot.emit_object(optimized_module(kernel, target), target)


def assembly(kernel: Kernel, target: Target) -> str:
    """Return the assembly text of ``kernel``."""
    return aot.target_machine(target).emit_assembly(optimized_module(kernel, target))
