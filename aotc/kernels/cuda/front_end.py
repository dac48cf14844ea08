"""Numba's front end for CUDA: Python functions to LLVM IR in libNVVM's dialect, without a GPU and without its back end.

``cuda.compile`` would go on to PTX or LTO-IR, but lets libNVVM fuse every product with every sum, and loads NVRTC to
look up the name of an architecture.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

if not hasattr(np, "row_stack"):  # NumPy 2.5 has dropped a name that numba-cuda registers
    np.row_stack = np.vstack

from numba.cuda import types
from numba.cuda.compiler import compile_cuda, kernel_fixup
from numba.cuda.cudadrv.nvvm import set_launch_bounds

ENTRY = "aotc_kernel"
"""What a kernel is called in its IR, until it gets the name that it has in the cubin."""
_FRONT = (8, 0)  # the compute capability that Numba types for: nothing that kernels use differs for another
_ENVIRONMENT = re.compile(r'^@"?_ZN08NumbaEnv.*\n', re.MULTILINE)


def kernel_ir(function: Callable[..., None], arguments: Sequence[Any], threads: int) -> list[str]:
    """Return the modules of a kernel, named :data:`ENTRY`, and of the functions that it calls.

    Parameters
    ----------
    function : callable
        Python as numba.cuda compiles it.
    arguments : sequence of numba.cuda.types.Type
        Of its parameters; a tuple is as many parameters as it has elements.
    threads : int
        The most that a block has.
    """
    compiled = compile_cuda(function, types.void, tuple(arguments), cc=_FRONT)
    name = compiled.fndesc.llvm_func_name
    kernel = compiled.library.get_function(name)
    kernel_fixup(kernel, debug=False)
    set_launch_bounds(kernel, threads)
    return [_ENVIRONMENT.sub("", text).replace(name, ENTRY) for text in compiled.library.llvm_strs]
