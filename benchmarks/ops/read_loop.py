"""A loop that only reads memory, as a bound for operations that memory bounds."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

from aotc.targets import resolve_targets
from benchmarks.engines import load_module

LANES = "<16 x float>"


@cache
def read_loop() -> Callable[[int, int], None]:
    """Return a function that reads a number of bytes from an address, 512 in each iteration."""
    sums = [f"%x{i} = phi {LANES} [zeroinitializer, %entry], [%y{i}, %loop]" for i in range(8)]
    for i in range(8):
        sums += [f"%p{i} = getelementptr i8, ptr %now, i64 {64 * i}", f"%v{i} = load {LANES}, ptr %p{i}, align 4"]
        sums += [f"%y{i} = fadd {LANES} %x{i}, %v{i}"]
    kept = [f"%q{i} = getelementptr i8, ptr %o, i64 {64 * i}" for i in range(8)]
    kept += [f"store {LANES} %y{i}, ptr %q{i}, align 4" for i in range(8)]
    text = "\n".join([
        "define void @run(ptr %p, ptr %o, i64 %turns) {", "entry:", "br label %loop", "loop:",
        "%n = phi i64 [0, %entry], [%m, %loop]", *sums[:8], "%at = mul i64 %n, 512",
        "%now = getelementptr i8, ptr %p, i64 %at", *sums[8:], "%m = add i64 %n, 1", "%c = icmp slt i64 %m, %turns",
        "br i1 %c, label %loop, label %end", "end:", *kept, "ret void", "}",
    ])  # fmt: skip
    engine = load_module(text, resolve_targets("cpu")[0])
    run = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)(engine.get_function_address("run"))

    def read(address: int, size: int) -> None:
        room = (ctypes.c_char * 512)()
        run(address, ctypes.addressof(room), size // 512)

    read.engine = engine  # type: ignore[attr-defined]  # which holds the code
    return read
