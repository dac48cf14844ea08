"""Shells: the kernels that the driver launches, in Python for numba.cuda.

A shell calls the *body*, the function of one item of the grid, which is emitted from the loop IR. A kernel of the loop
IR has one of two shapes. :func:`_flat_shell`: each thread runs one item of the grid. :func:`_block_shell`: a block of
threads runs one item together.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from llvmlite import ir
from numba import cuda
from numba.cuda import types
from numba.cuda.extending import intrinsic

from aotc.kernels.cuda.front_end import ENTRY, compile_to_llvm_ir
from aotc.kernels.symbol_table import declare_function

BODY = "aotc_body"
"""The function of an item; its parameters are a pointer to each buffer, each dim, and the item's number."""


def emit_device_function_call(
    builder: ir.IRBuilder, name: str, result: ir.Type, tables: Sequence[ir.Value], *own: ir.Value
):
    """Emit the call of a device function with the elements of ``tables`` (pointers and dims), then ``own``."""
    values = [*(builder.extract_value(table, n) for table in tables for n in range(table.type.count)), *own]
    function = declare_function(builder.module, name, ir.FunctionType(result, [v.type for v in values]))
    return builder.call(function, values)


@intrinsic
def _call_kernel_body(typing_context, pointers, dims, item):
    """Call :data:`BODY`, the function of one item, from a shell."""

    def codegen(context, builder, signature, arguments):
        emit_device_function_call(builder, BODY, ir.VoidType(), arguments[:2], arguments[2])
        return context.get_dummy_value()

    return types.void(pointers, dims, item), codegen


def _flat_shell(pointers, dims, items):
    item = types.int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x
    if item < items:
        _call_kernel_body(pointers, dims, item)


def _block_shell(pointers, dims, items):
    _call_kernel_body(pointers, dims, types.int64(cuda.blockIdx.x))


@cache
def _shell_function(blocks: bool, pointers: int, dims: int, threads: int) -> str:
    arguments = (types.UniTuple(types.CPointer(types.uint8), pointers), types.UniTuple(types.int64, dims), types.int64)
    (text,) = compile_to_llvm_ir(_block_shell if blocks else _flat_shell, arguments, threads)
    return text


def shell_text(symbol: str, blocks: bool, pointers: int, dims: int, threads: int) -> str:
    """Compile a shell, whose parameters are pointers, dims and the size of the grid, to LLVM IR.

    Parameters
    ----------
    symbol : str
        Name of the kernel.
    blocks : bool
        True if a block runs an item together; False if each thread runs its own item.
    pointers, dims : int
        Numbers of pointers and of dims.
    threads : int
        Threads of a block.
    """
    return _shell_function(blocks, pointers, dims, threads).replace(ENTRY, symbol)
