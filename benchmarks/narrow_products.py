"""Products of bf16 beside f32: ``python benchmarks/narrow_products.py --sizes 512 1024x1024x1024 1x4096x4096``.

One thread; its processor time counts, for a busy machine's sake. Each size is compiled for the target and asked in
turn, round by round: bf16 and f32, with the right operand as a constant and as an argument, and bf16 for
``cpu:x86-64-v4-vnni``, which widens it. Printed are medians of GFLOP/s, and the share of what the unit does without
memory: a loop of ``vdpbf16ps`` on registers, which runs in each round too. ``--convolution`` takes layers of an image
instead: IMAGE x CHANNELS x RESULTS, of 3 x 3.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import llvmlite.binding as llvm
import ml_dtypes
import numpy as np

import aotc
from aotc.kernels.numba_aot import target_machine
from aotc.targets import TARGETS

PAIRS, WIDENED = "cpu:x86-64-v4-bf16", "cpu:x86-64-v4-vnni"
SUMS, TURNS = 24, 100_000
UNITS = {  # the instruction, and its operations
    "f32": ("llvm.fma.v16f32", "<16 x float> %a, <16 x float> %b, <16 x float> {}", "<16 x float>", 32),
    "bf16": (
        "llvm.x86.avx512bf16.dpbf16ps.512", "<16 x float> {}, <32 x bfloat> %a, <32 x bfloat> %b", "<32 x bfloat>", 64,
    ),
}  # fmt: skip
Call = Callable[[], object]
KEEP: list[object] = []


def peak(name: str) -> tuple[Call, float]:
    """Return a loop of the unit's instruction on registers, and its operations."""
    function, operands, kind, each = UNITS[name]
    types = operands.replace("%a", "").replace("%b", "").replace("{}", "")
    lines = [f"declare <16 x float> @{function}({types})", "define void @run(ptr %p, ptr %o) {", "entry:"]
    lines += [f"%a = load {kind}, ptr %p, align 4", f"%b = load {kind}, ptr %p, align 4", "br label %loop", "loop:"]
    lines += ["%n = phi i64 [0, %entry], [%m, %loop]"]
    lines += [f"%x{i} = phi <16 x float> [zeroinitializer, %entry], [%y{i}, %loop]" for i in range(SUMS)]
    lines += [f"%y{i} = call <16 x float> @{function}({operands.format(f'%x{i}')})" for i in range(SUMS)]
    lines += ["%m = add i64 %n, 1", f"%c = icmp slt i64 %m, {TURNS}", "br i1 %c, label %loop, label %end", "end:"]
    for i in range(SUMS):
        lines += [f"%o{i} = getelementptr i8, ptr %o, i64 {64 * i}", f"store <16 x float> %y{i}, ptr %o{i}, align 4"]
    module = llvm.parse_assembly("\n".join([*lines, "ret void", "}"]))
    engine = llvm.create_mcjit_compiler(module, target_machine(TARGETS[PAIRS]))
    engine.finalize_object()
    memory = np.zeros(64 * (SUMS + 1), "u1")
    KEEP.extend((engine, memory))
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(engine.get_function_address("run"))
    return (lambda: call(memory.ctypes.data, memory.ctypes.data + 64)), each * SUMS * TURNS


def compiled(function: Callable[..., jax.Array], arrays: list[np.ndarray], constant: bool, target: str) -> Call:
    """Return a call of the compiled function; its second argument may be a constant."""
    given = arrays[:1] if constant else arrays
    run = (lambda x: function(x, arrays[1])) if constant else function
    module = aotc.load(aotc.compile(jax.jit(run), *given, target=target), threads=1)
    return lambda: module.invoke("main", *given)


def forms(function: Callable[..., jax.Array], shapes: list[tuple[int, ...]]) -> dict[str, Call]:
    """Return the calls that are compared."""
    random = np.random.default_rng(0)
    arrays = [random.standard_normal(shape).astype("f4") for shape in shapes]
    short = [a.astype(ml_dtypes.bfloat16) for a in arrays]
    found = {}
    for how in ("constant", "argument"):
        constant = how == "constant"
        found[f"bf16 {how}"] = compiled(function, short, constant, PAIRS)
        found[f"widened {how}"] = compiled(function, short, constant, WIDENED)
        found[f"f32 {how}"] = compiled(function, arrays, constant, PAIRS)
    return found


def convolution(x: jax.Array, w: jax.Array) -> jax.Array:
    """A convolution of 3 x 3."""
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def seconds(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """Return the median of each call's processor time."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    repeats = {}
    for name, call in calls.items():
        call()
        begin = time.thread_time()
        call()
        repeats[name] = max(int(0.02 / max(time.thread_time() - begin, 1e-6)), 1)
    for _ in range(rounds):
        for name, call in calls.items():
            begin = time.thread_time()
            for _ in range(repeats[name]):
                call()
            times[name].append((time.thread_time() - begin) / repeats[name])
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> None:
    """Read the command line; measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["512", "1024", "2048", "128x768x3072", "1x4096x4096"])
    parser.add_argument("--convolution", action="store_true")
    parser.add_argument("--rounds", type=int, default=11)
    args = parser.parse_args()
    units = {f"unit {name}": peak(name) for name in UNITS}
    for size in args.sizes:
        m, k, n = (int(part) for part in (size.split("x") * 3)[:3])
        if args.convolution:
            calls, work = forms(convolution, [(1, m, m, k), (3, 3, k, n)]), 18.0 * m * m * k * n
        else:
            calls, work = forms(jnp.matmul, [(m, k), (k, n)]), 2.0 * m * k * n
        found = seconds({**{name: call for name, (call, _) in units.items()}, **calls}, args.rounds)
        most = {name.split()[1]: work / found[name] for name, (_, work) in units.items()}
        print(f"{size}: unit {most['f32'] / 1e9:.0f} f32, {most['bf16'] / 1e9:.0f} bf16 GFLOP/s")
        for name in calls:
            rate = work / found[name]
            share = rate / most["bf16" if name.startswith("bf16") else "f32"]
            print(f"  {name:18} {1e6 * found[name]:9.1f} us {rate / 1e9:6.0f} GFLOP/s {100 * share:4.0f} % of the unit")


if __name__ == "__main__":
    main()
