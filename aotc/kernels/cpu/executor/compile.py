"""Compile the executor to a native object: its prebuilt LLVM IR, and the functions that differ between architectures.
"""

from __future__ import annotations

from aotc.diagnostics import InternalError
from aotc.kernels import back_end
from aotc.kernels.cpu.executor.prebuilt_ir import compile_executor_by_numba, read_prebuilt
from aotc.targets import Target


def compile_executor(target: Target) -> bytes:
    """Compile the executor for ``target`` to an object that needs only the C library.

    Raises
    ------
    InternalError
        If the architecture of ``target`` is not in :data:`MACHINES`.
    """
    machine = MACHINES.get(target.triple.partition("-")[0])
    if machine is None:
        raise InternalError(f"the executor does not support {target.triple}")
    whole = back_end.parse_assembly_for_target(machine, target, "executor")
    whole.retarget(target)
    library = read_prebuilt() or compile_executor_by_numba()
    exports = library.exports()
    library.retarget(target)
    whole.link(library)
    whole.internalize(exports)
    whole.verify()
    whole.optimize(loops=False)  # a load hashes it, so it is to be small
    return whole.emit_native_object()


_MACHINE = """
declare void @{declared}
define void @aotc_pause() alwaysinline {{
  call void @{hint}
  ret void
}}
define i64 @aotc_futex_number() alwaysinline {{
  ret i64 {futex}
}}
declare i64 @{counter}
define i64 @aotc_ticks() alwaysinline {{
  %now = call i64 @{ticks}
  ret i64 %now
}}
!0 = !{{!"CNTVCT_EL0"}}
"""
MACHINES = {
    "x86_64": _MACHINE.format(
        declared="llvm.x86.sse2.pause()",
        hint="llvm.x86.sse2.pause()",
        futex=202,
        counter="llvm.readcyclecounter()",
        ticks="llvm.readcyclecounter()",
    ),
    "aarch64": _MACHINE.format(  # its cycle counter is the system's alone
        declared="llvm.aarch64.hint(i32)",
        hint="llvm.aarch64.hint(i32 1)",
        futex=98,
        counter="llvm.read_volatile_register.i64(metadata)",
        ticks="llvm.read_volatile_register.i64(metadata !0)",
    ),
}
