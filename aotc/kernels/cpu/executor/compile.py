"""The executor as a native object: what :mod:`aotc.kernels.cpu.executor.main` exports, and the machine's atomics."""

from __future__ import annotations

from aotc.diagnostics import InternalError
from aotc.kernels import back_end
from aotc.kernels.cpu.executor.arch_ir import MACHINES
from aotc.kernels.cpu.executor.prebuilt_ir import compile_by_numba, read_prebuilt
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
    whole = back_end.parse(machine, target, "executor")
    whole.retarget(target)
    library = read_prebuilt() or compile_by_numba()
    exports = library.exports()
    library.retarget(target)
    whole.link(library)
    whole.internalize(exports)
    whole.verify()
    whole.optimize(loops=False)  # a load hashes it, so it is to be small
    return whole.emit_native_object()
