"""What differs between processors for the executor, as LLVM IR for each architecture, which it is linked with."""

from __future__ import annotations

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
