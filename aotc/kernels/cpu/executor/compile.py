"""The executor as a native object: what :mod:`aotc.kernels.cpu.executor.main` exports, and the machine's atomics."""

from __future__ import annotations

import llvmlite.binding as llvm

from aotc.diagnostics import InternalError
from aotc.kernels import back_end
from aotc.kernels.cpu.executor.arch_ir import MACHINES
from aotc.kernels.cpu.executor.prebuilt_ir import exports_of, kept_module, made_module
from aotc.targets import Target


def compile_executor(target: Target) -> bytes:
    """Return the object of the executor; it needs only the C library.

    Raises
    ------
    InternalError
        If the architecture of ``target`` is not in ``machines.MACHINES``.
    """
    machine = MACHINES.get(target.triple.partition("-")[0])
    if machine is None:
        raise InternalError(f"no executor for {target.triple}")
    whole = llvm.parse_assembly(machine)
    back_end.retarget(whole, target)
    module = kept_module()
    if module is None:
        module = made_module()
    exports = exports_of(module)
    back_end.retarget(module, target)
    whole.link_in(module)
    back_end.internalize(whole, exports)
    whole.verify()
    back_end.optimize(whole, target, loops=False)  # a load hashes it, so it is to be small
    return back_end.emit_object(whole, target)
