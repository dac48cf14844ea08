"""The executor as a native object: what :mod:`aotc.kernels.cpu.executor` exports, and the machine's atomics."""

from __future__ import annotations

import llvmlite.binding as llvm

from aotc.diagnostics import InternalError
from aotc.kernels import back_end
from aotc.kernels import numba_aot as aot
from aotc.kernels.cpu.atomics import MACHINES
from aotc.kernels.cpu.executor import EXPORTS
from aotc.targets import Target


def compile_executor(target: Target) -> bytes:
    """Return the object of the executor; it needs only the C library.

    Raises
    ------
    InternalError
        If the architecture of ``target`` is not in ``atomics.MACHINES``.
    """
    machine = MACHINES.get(target.triple.partition("-")[0])
    if machine is None:
        raise InternalError(f"no executor for {target.triple}")
    whole = llvm.parse_assembly(machine)
    back_end.retarget(whole, target)
    for name, row in EXPORTS.items():
        whole.link_in(aot.front_end(name, aot.Export(*row), target))
    back_end.internalize(whole, EXPORTS)
    whole.verify()
    back_end.optimize(whole, target, loops=False)  # a load hashes it, so it is to be small
    return back_end.emit_object(whole, target)
