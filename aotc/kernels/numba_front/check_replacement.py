"""Check a user's function against the kernel that it replaces, in a compiler process.

Both are compiled for this machine, whatever the target, and called on random arguments.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace

from aotc.ir.loop.ir import Kernel
from aotc.kernels.cpu.custom import MATH_SYMBOLS
from aotc.kernels.cpu.link import link_shared_library
from aotc.kernels.numba_front.compile import compile_kernel
from aotc.kernels.numba_front.trial import NoTrial, call_native, output_difference, random_arguments
from aotc.targets import host_target
from aotc.vmfb.host.files import temporary_folder

# Random arguments on which a function must agree with the kernel that it replaces.
TRIALS = 3
_PRINTED, _OWN = "printed", "own"


def replacement_difference(kernel: Kernel, source: str, name: str) -> str:
    """Describe the difference between the user's function ``name`` and ``kernel``; an empty string if they agree.

    Raises
    ------
    KernelRefused
        If Numba cannot compile the function.
    """
    target = host_target()
    objects = [
        compile_kernel(replace(kernel, name=_PRINTED), target),
        compile_kernel(replace(kernel, name=_OWN), target, source, name),
    ]
    try:
        with temporary_folder() as folder:
            path = folder / "trial.so"
            path.write_bytes(link_shared_library(objects, target, MATH_SYMBOLS))
            return _replacement_output_difference(kernel, ctypes.CDLL(str(path)))
    except NoTrial as reason:
        return f"it cannot be checked alone: {reason}"


def _replacement_output_difference(kernel: Kernel, library: ctypes.CDLL) -> str:
    printed, own = (ctypes.cast(library[name], ctypes.c_void_p).value or 0 for name in (_PRINTED, _OWN))
    for seed in range(TRIALS):
        arguments = random_arguments(kernel, seed)
        expected, found = arguments.copied(), arguments.copied()
        call_native(printed, kernel, expected)
        call_native(own, kernel, found)
        if said := output_difference(kernel, expected, found):
            return f"on random arguments, {said}"
    return ""
