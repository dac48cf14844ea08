"""Numba's front end for CUDA: Python functions to LLVM IR in libNVVM's dialect, without a GPU and without its back end.

``cuda.compile`` would continue to PTX or LTO-IR. But it lets libNVVM contract every multiplication and addition, and
loads NVRTC to look up the name of an architecture.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
from llvmlite import ir
from llvmlite.ir.instructions import InsertValue

from aotc.vmfb.abi import MAP_ALIGNMENT, MAP_BYTES

if not hasattr(np, "row_stack"):  # NumPy 2.5 removed a name that numba-cuda registers
    np.row_stack = np.vstack

from numba.cuda import dispatcher, types
from numba.cuda.compiler import compile_cuda, kernel_fixup
from numba.cuda.core.compiler_lock import global_compiler_lock
from numba.cuda.cudadrv.nvvm import set_launch_bounds

ENTRY = "aotc_kernel"
"""Name of a kernel in its IR, which is replaced by its name in the cubin."""
_FRONT = (8, 0)  # the compute capability that Numba types for; kernels use nothing that depends on it
_BY_VALUE = re.compile(r"byval\([^)]*\)")  # in LLVM 7 the pointer's type has the operand
_ENVIRONMENT = re.compile(r'^@"?_ZN08NumbaEnv.*\n', re.MULTILINE)


@contextmanager
def _numba_without_cuda_driver() -> Iterator[None]:
    """Let Numba compile device functions without a GPU, although Numba asks the driver for the compute capability."""
    with global_compiler_lock:
        asked = dispatcher.get_current_device
        dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=_FRONT)
        try:
            yield
        finally:
            dispatcher.get_current_device = asked


def compile_to_llvm_ir(
    function: Callable[..., None], arguments: Sequence[Any], threads: int, maps: int = 0
) -> list[str]:
    """Compile a kernel, named :data:`ENTRY`, and the functions that it calls to LLVM modules.

    Parameters
    ----------
    function : callable
        Python function for numba.cuda.
    arguments : sequence of numba.cuda.types.Type
        Types of its parameters; a tuple stands for as many parameters as it has elements.
    threads : int
        Maximum number of threads of a block.
    maps : int
        Number of tensor maps, which are the first parameters and are passed by value.
    """
    with _numba_without_cuda_driver():
        compiled = compile_cuda(function, types.void, tuple(arguments), cc=_FRONT)
    name = compiled.fndesc.llvm_func_name
    kernel = compiled.library.get_function(name)
    _pass_tensor_maps_by_value(kernel, maps)
    kernel_fixup(kernel, debug=False)
    set_launch_bounds(kernel, threads)
    _read_tensor_maps_in_place(kernel, maps)
    texts = [_ENVIRONMENT.sub("", text) for text in compiled.library.llvm_strs]
    return [_BY_VALUE.sub("byval", text).replace(name, ENTRY) for text in texts]


def _pass_tensor_maps_by_value(kernel: ir.Function, maps: int) -> None:
    """Change the first pointer parameters to tensor maps that are passed by value, after Numba's result pointer."""
    entry = kernel.entry_basic_block
    builder = ir.IRBuilder(entry)
    builder.position_at_start(entry)
    result, *given = kernel.args
    for number, argument in enumerate(given[:maps]):
        given[number] = whole = ir.Argument(kernel, ir.ArrayType(ir.IntType(8), MAP_BYTES).as_pointer(), argument.name)
        whole.attributes.add("byval")
        whole.attributes.align = MAP_ALIGNMENT
        cast = builder.bitcast(whole, argument.type)
        for use in entry.instructions:  # Numba builds their tuple in the entry block
            if isinstance(use, InsertValue) and use.value is argument:
                use.value = cast
    kernel.args = (result, *given)
    kernel.ftype = ir.FunctionType(kernel.ftype.return_type, [a.type for a in kernel.args])
    kernel.type = kernel.ftype.as_pointer()


def _read_tensor_maps_in_place(kernel: ir.Function, maps: int) -> None:
    """Let the kernel read its tensor maps in constant memory, without a copy in each thread's memory."""
    if maps:
        numbers = [ir.Constant(ir.IntType(32), n + 1) for n in range(maps)]
        constant = kernel.module.add_metadata([kernel, "grid_constant", kernel.module.add_metadata(numbers)])
        kernel.module.add_named_metadata("nvvm.annotations", constant)
