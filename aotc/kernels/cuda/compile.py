"""One loop-IR kernel to one cubin: Numba's shell, our body, LLVM's PTX, nvJitLink's machine code.

As on the CPU, the shell is Python compiled by Numba and the body is emitted from
the loop IR; LLVM inlines one into the other. libNVVM is not used: for these
machines it reads only the LLVM 7 dialect with typed pointers. No GPU is needed.
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
from aotc.kernels.cuda.emit import CudaEmitter, block_threads
from aotc.kernels.cuda.tile import emit_tile
from aotc.kernels.emit.body import emit_body
from aotc.kernels.emit.metadata import assembly_text
from aotc.kernels.emit.rare_calls import define
from aotc.kernels.llvm_types import I32, I64, PTR, VOID, KernelModule
from aotc.targets import Target

TRIPLE = "nvptx64-nvidia-cuda"
PTX_FEATURES = {"sm_80": "+ptx70", "sm_90": "+ptx80"}
_SHELL, _BODY, _ENTRY = "aotc_shell", "aotc_body", "aotc_kernel"


def _register(name: str):
    """Return an intrinsic that reads a special register of the GPU."""

    @intrinsic
    def read(typing_context):
        def generate(context, builder, signature, arguments):
            full = f"llvm.nvvm.read.ptx.sreg.{name}"
            function = builder.module.globals.get(full) or ir.Function(builder.module, ir.FunctionType(I32, []), full)
            return builder.call(function, [])

        return types.int32(), generate

    return read


_thread, _block, _width = _register("tid.x"), _register("ctaid.x"), _register("ntid.x")


@intrinsic
def _body(typing_context, buffers, dims, item):
    """Call the body of the kernel for one item of the grid."""

    def generate(context, builder, signature, arguments):
        function = builder.module.globals.get(_BODY)
        if function is None:
            function = ir.Function(builder.module, ir.FunctionType(VOID, [PTR, PTR, I64, PTR, PTR]), _BODY)
        pointers = [builder.bitcast(a, PTR) for a in arguments[:2]]
        builder.call(function, [*pointers, arguments[2], pointers[0], pointers[0]])
        return context.get_dummy_value()

    return types.void(buffers, dims, item), generate


def _flat(buffers, dims, items):
    item = types.int64(_block()) * _width() + _thread()
    if item < items:
        _body(buffers, dims, item)


def _blocks(buffers, dims, items):
    _body(buffers, dims, types.int64(_block()))


@cache
def _shell_bitcode(block: bool) -> bytes:
    arguments = (types.CPointer(types.voidptr), types.CPointer(types.int64), types.int64)
    host = Target("front", "cpu", "x86-64")
    module = aot.front_end(_SHELL, aot.Export(_blocks if block else _flat, types.void, arguments), host)
    return module.as_bitcode()


@cache
def target_machine(target: Target) -> llvm.TargetMachine:
    """Return LLVM's machine for ``target``."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    features = PTX_FEATURES.get(target.cpu, "+ptx80")
    return llvm.Target.from_triple(TRIPLE).create_target_machine(cpu=target.cpu, features=features, opt=3)


def _add_entry(module: ir.Module, kernel: Kernel) -> None:
    """Add the kernel the driver launches: its parameters are the pointers, the dims and the grid size."""
    pointers, dims = len(kernel.inputs) + len(kernel.outputs), len(kernel.dims)
    function = ir.Function(module, ir.FunctionType(VOID, [PTR] * pointers + [I64] * (dims + 1)), _ENTRY)
    function.calling_convention = "ptx_kernel"
    shell = ir.Function(module, ir.FunctionType(VOID, [PTR, PTR, I64]), _SHELL)
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    tables = []
    for kind, arguments in ((PTR, function.args[:pointers]), (I64, function.args[pointers:-1])):
        table = builder.alloca(kind, size=ir.Constant(I64, max(len(arguments), 1)))
        table.type = PTR
        tables.append(table)
        for number, argument in enumerate(arguments):
            builder.store(argument, builder.gep(table, [ir.Constant(I64, number)], source_etype=kind))
    builder.call(shell, [*tables, function.args[-1]])
    builder.ret_void()


def optimized_module(kernel: Kernel, target: Target) -> llvm.ModuleRef:
    """Return the LLVM module of ``kernel`` after O3.

    Raises
    ------
    InternalError
        If LLVM finds the IR invalid.
    """
    machine = target_machine(target)
    source = KernelModule(kernel.name, target)
    source.triple, source.data_layout = TRIPLE, str(machine.target_data)
    emit_body(source, _BODY, kernel, target, emit_tile, CudaEmitter)
    _add_entry(source, kernel)
    module = llvm.parse_assembly(assembly_text(source))
    shell = llvm.parse_bitcode(_shell_bitcode(block_threads(kernel) > 0))
    shell.triple, shell.data_layout = TRIPLE, str(machine.target_data)
    module.link_in(shell)
    define(module, target)
    aot.internalize(module, {_ENTRY})
    try:
        module.verify()
    except RuntimeError as error:
        raise InternalError(f"kernel {kernel.name}: {error}") from error
    tuning = llvm.create_pipeline_tuning_options(speed_level=3)
    tuning.loop_vectorization = tuning.slp_vectorization = False
    tuning.loop_unrolling = True
    builder = llvm.create_pass_builder(machine, tuning)
    builder.getModulePassManager().run(module, builder)
    return module


def ptx(kernel: Kernel, target: Target) -> str:
    """Return the PTX of ``kernel``; the entry has the kernel's name."""
    text = target_machine(target).emit_assembly(optimized_module(kernel, target))
    return text.replace(_ENTRY, kernel.name)


def compile_kernel(kernel: Kernel, target: Target) -> bytes:
    """Return the cubin that holds ``kernel``.

    Raises
    ------
    InternalError
        If nvJitLink refuses the PTX; its log is in the message.
    """
    from cuda.bindings import nvjitlink

    data = ptx(kernel, target).encode() + b"\0"
    handle = nvjitlink.create(1, [f"-arch={target.cpu}"])
    try:
        nvjitlink.add_data(handle, nvjitlink.InputType.PTX, data, len(data), kernel.name)
        nvjitlink.complete(handle)
        cubin = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, cubin)
    except nvjitlink.nvJitLinkError as error:
        log = bytearray(nvjitlink.get_error_log_size(handle))
        nvjitlink.get_error_log(handle, log)
        raise InternalError(f"kernel {kernel.name}: {error}\n{log.decode(errors='replace')}") from error
    finally:
        nvjitlink.destroy(handle)
    return bytes(cubin)
