"""Emit calls of functions in other libraries, such as LAPACK, and heap allocations of sizes known only at run time."""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from aotc.ir.loop.forms.fft import Transform
from aotc.kernels.emit.vector.fft import FftFunction
from aotc.kernels.llvm_types import I64, PTR, VOID, i64
from aotc.kernels.symbol_table import declare_function
from aotc.vmfb.abi import IMPORT_PREFIX


def call_fortran_function(
    builder: ir.IRBuilder, function: str | Transform, addresses: Sequence[ir.Value], characters: int
) -> None:
    """Emit a call with Fortran's convention: addresses, then the length of each character argument.

    A function of LAPACK is called through an import pointer. A Fourier transform is called directly: its function is
    linked after LLVM's passes.
    """
    module = builder.module
    if isinstance(function, Transform):
        transform = FftFunction(function, module.vector_bytes, module.permutes)
        if transform.name not in module.finished.symbols:
            module.finished.add(transform.symbols())
        builder.call(declare_function(module, transform.name, ir.FunctionType(VOID, [PTR] * len(addresses))), addresses)
        return
    symbol = IMPORT_PREFIX + function
    pointer = module.globals.get(symbol)
    if pointer is None:
        pointer = ir.GlobalVariable(module, I64, symbol)
    arguments = [*addresses, *[i64(1)] * characters]
    kind = ir.FunctionType(VOID, [PTR] * len(addresses) + [I64] * characters)
    builder.call(builder.inttoptr(builder.load(pointer), kind.as_pointer()), arguments)


def emit_malloc(builder: ir.IRBuilder, size: ir.Value) -> ir.Value:
    """Emit the allocation of ``size`` bytes by the C library."""
    function = declare_function(builder.module, "malloc", ir.FunctionType(PTR, [I64]))
    return builder.call(function, [size])


def emit_free(builder: ir.IRBuilder, memory: ir.Value) -> None:
    """Emit the release of memory that :func:`emit_malloc` allocated."""
    builder.call(declare_function(builder.module, "free", ir.FunctionType(VOID, [PTR])), [memory])
