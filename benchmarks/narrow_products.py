"""Products of bf16, f16 and i8 beside f32: ``python benchmarks/narrow_products.py --sizes 512 1x4096x4096``.

One thread; its processor time counts, for a busy machine's sake. Each size is compiled for the target and asked in
turn, round by round: bf16, f16, i8, u8 by i8 and f32, with the right operand as a constant and as an argument, and bf16
for ``cpu:x86-64-v4-vnni``, which widens it. Printed are medians of GFLOP/s, and the share of what the unit does without
memory: a loop of its instruction on registers, which runs in each round too (f16 has none, its share is of f32's).
``--convolution`` takes layers of an image instead: IMAGE x CHANNELS x RESULTS, of 3 x 3. ``--target cpu:x86-64-amx``
measures a matrix unit; the results of floats are of their own dtype, those of i8 are i32. ``--only i8 u8`` takes these
alone. ``--ratios`` prints the median of the shares of each round instead, for a machine whose speed changes while it
measures.
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
from aotc.vmfb.host.machine import tiles_permitted

PAIRS, WIDENED, MATRIX = "cpu:x86-64-v4-bf16", "cpu:x86-64-v4-vnni", "cpu:x86-64-amx"
SUMS, TURNS = 24, 100_000
TILES, TILE_TURNS = 4, 5_000
UNITS = {  # the instruction, and its operations
    "f32": ("llvm.fma.v16f32", "<16 x float> %a, <16 x float> %b, <16 x float> {}", "<16 x float>", 32),
    "bf16": (
        "llvm.x86.avx512bf16.dpbf16ps.512", "<16 x float> {}, <32 x bfloat> %a, <32 x bfloat> %b", "<32 x bfloat>", 64,
    ),
    "i8": (
        "llvm.x86.avx512.vpdpbusd.512", "<16 x i32> {}, <16 x i32> %a, <16 x i32> %b", "<16 x i32>", 128,
    ),
}  # fmt: skip
UNIT_OF = {"widened": "f32", "f16": "f32", "u8": "i8"}
MATRICES = {"bf16": ("tdpbf16ps", 2 * 16 * 16 * 32), "i8": ("tdpbssd", 2 * 16 * 16 * 64)}
Call = Callable[[], object]
KEEP: list[object] = []


def peak(name: str) -> tuple[Call, float]:
    """Return a loop of the unit's instruction on registers, and its operations."""
    function, operands, kind, each = UNITS[name]
    types = operands.replace("%a", "").replace("%b", "").replace("{}", "")
    sums = "<16 x i32>" if name == "i8" else "<16 x float>"
    lines = [f"declare {sums} @{function}({types})", "define void @run(ptr %p, ptr %o) {", "entry:"]
    lines += [f"%a = load {kind}, ptr %p, align 4", f"%b = load {kind}, ptr %p, align 4", "br label %loop", "loop:"]
    lines += ["%n = phi i64 [0, %entry], [%m, %loop]"]
    lines += [f"%x{i} = phi {sums} [zeroinitializer, %entry], [%y{i}, %loop]" for i in range(SUMS)]
    lines += [f"%y{i} = call {sums} @{function}({operands.format(f'%x{i}')})" for i in range(SUMS)]
    lines += ["%m = add i64 %n, 1", f"%c = icmp slt i64 %m, {TURNS}", "br i1 %c, label %loop, label %end", "end:"]
    for i in range(SUMS):
        lines += [f"%o{i} = getelementptr i8, ptr %o, i64 {64 * i}", f"store {sums} %y{i}, ptr %o{i}, align 4"]
    return native(lines, PAIRS, np.zeros(64 * (SUMS + 1), "u1")), each * SUMS * TURNS


def matrix_peak(name: str) -> tuple[Call, float]:
    """Return a loop of a matrix unit's instruction on registers, and its operations."""
    instruction, each = MATRICES[name]
    said = np.zeros(128, "u1")
    said[0], said[16:32:2], said[48:56] = 1, 64, 16
    names = {"ldtilecfg": "ptr", "tilerelease": "", "tilezero": "i8", instruction: "i8, i8, i8"}
    lines = [f"declare void @llvm.x86.{x}({types})" for x, types in names.items()]
    lines += ["define void @run(ptr %p, ptr %o) {", "entry:", "call void @llvm.x86.ldtilecfg(ptr %p)"]
    lines += [f"call void @llvm.x86.tilezero(i8 {i})" for i in range(8)]
    lines += ["br label %loop", "loop:", "%n = phi i64 [0, %entry], [%m, %loop]"]
    for i in range(TILES):
        lines.append(f"call void @llvm.x86.{instruction}(i8 {i}, i8 {4 + i // 2}, i8 {6 + i % 2})")
    lines += ["%m = add i64 %n, 1", f"%c = icmp slt i64 %m, {TILE_TURNS}", "br i1 %c, label %loop, label %end", "end:"]
    return native([*lines, "call void @llvm.x86.tilerelease()"], MATRIX, said), each * TILES * TILE_TURNS


def native(lines: list[str], target: str, memory: np.ndarray) -> Call:
    """Return a call of a function on ``memory``, which is the text of its LLVM IR but for its end."""
    module = llvm.parse_assembly("\n".join([*lines, "ret void", "}"]))
    engine = llvm.create_mcjit_compiler(module, target_machine(TARGETS[target]))
    engine.finalize_object()
    KEEP.extend((engine, memory))
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(engine.get_function_address("run"))
    return lambda: call(memory.ctypes.data, memory.ctypes.data + 64)


def compiled(function: Callable[..., jax.Array], arrays: list[np.ndarray], constant: bool, target: str) -> Call:
    """Return a call of the compiled function; its second argument may be a constant."""
    given = arrays[:1] if constant else arrays
    run = (lambda x: function(x, arrays[1])) if constant else function
    module = aotc.load(aotc.compile(jax.jit(run), *given, target=target), threads=1)
    return lambda: module.invoke("main", *given)


def forms(
    function: Callable[..., jax.Array], shapes: list[tuple[int, ...]], target: str, only: list[str]
) -> dict[str, Call]:
    """Return the calls that are compared."""
    random = np.random.default_rng(0)
    arrays = [random.standard_normal(shape).astype("f4") for shape in shapes]
    whole = [(40 * a).astype("i1") for a in arrays]
    given = {
        "bf16": [a.astype(ml_dtypes.bfloat16) for a in arrays], "f16": [a.astype("f2") for a in arrays],
        "i8": whole, "u8": [whole[0].view("u1"), whole[1]], "f32": arrays,
    }  # fmt: skip
    targets = {name: target for name in given if name != "f16" or target == PAIRS}
    if target == PAIRS:
        given["widened"], targets["widened"] = given["bf16"], WIDENED
    return {
        f"{name} {how}": compiled(function, given[name], how == "constant", targets[name])
        for how in ("constant", "argument")
        for name in only
        if name in targets
    }


def product(x: jax.Array, y: jax.Array) -> jax.Array:
    """A product, of integers with the sums that fit."""
    return jnp.matmul(*_widened(x, y))


def convolution(x: jax.Array, w: jax.Array) -> jax.Array:
    """A convolution of 3 x 3."""
    return jax.lax.conv_general_dilated(
        *_widened(x, w), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _widened(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    return (x.astype("i4"), y.astype("i4")) if y.dtype == "int8" else (x, y)


def seconds(calls: dict[str, Call], rounds: int) -> dict[str, list[float]]:
    """Return each call's processor time in each round."""
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
    return times


def report(size: str, units: dict[str, float], work: float, found: dict[str, list[float]], ratios: bool) -> None:
    """Print what was found; ``units`` are the operations of their loops."""
    each = {name: [done / t for t in found[f"unit {name}"]] for name, done in units.items()}
    shown = ", ".join(f"{statistics.median(rates) / 1e9:.0f} {name}" for name, rates in each.items())
    print(f"{size}: unit {shown} GFLOP/s")
    for name in (name for name in found if not name.startswith("unit")):
        form = name.split()[0]
        unit = each[UNIT_OF.get(form, form)]
        rates = [work / t for t in found[name]]
        share = statistics.median(rates) / statistics.median(unit)
        if ratios:
            share = statistics.median([rate / most for rate, most in zip(rates, unit, strict=True)])
        took, rate = 1e6 * statistics.median(found[name]), statistics.median(rates) / 1e9
        print(f"  {name:18} {took:9.1f} us {rate:6.0f} GFLOP/s {100 * share:4.0f} % of the unit")


def main() -> None:
    """Read the command line; measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["512", "1024", "2048", "128x768x3072", "1x4096x4096"])
    parser.add_argument("--convolution", action="store_true")
    parser.add_argument("--target", choices=(PAIRS, MATRIX), default=PAIRS)
    parser.add_argument("--only", nargs="+", default=["bf16", "widened", "f16", "i8", "u8", "f32"])
    parser.add_argument("--ratios", action="store_true")
    parser.add_argument("--rounds", type=int, default=11)
    args = parser.parse_args()
    units = {"f32": peak("f32")}
    if args.target == PAIRS:
        units |= {name: peak(name) for name in ("bf16", "i8")}
    elif tiles_permitted():
        units |= {name: matrix_peak(name) for name in MATRICES}
    else:
        raise SystemExit("the system refuses tile registers")
    for size in args.sizes:
        m, k, n = (int(part) for part in (size.split("x") * 3)[:3])
        if args.convolution:
            calls, work = forms(convolution, [(1, m, m, k), (3, 3, k, n)], args.target, args.only), 18.0 * m * m * k * n
        else:
            calls, work = forms(product, [(m, k), (k, n)], args.target, args.only), 2.0 * m * k * n
        found = seconds({**{f"unit {name}": call for name, (call, _) in units.items()}, **calls}, args.rounds)
        report(size, {name: done for name, (_, done) in units.items()}, work, found, args.ratios)


if __name__ == "__main__":
    main()
