"""Matmuls of bf16, f16, i8, relative to the peak.

One thread, in processor time. Each size is compiled for the target: bf16, f16, i8, u8 by i8 and f32, with the right
operand as a constant and as an argument, and bf16 for ``cpu:x86-64-v4-vnni``, which widens it. The last column is the
fraction of the unit's peak: the rate of a loop of its instruction on registers, measured in each round too (f16 has
none, its fraction is of f32's). ``--convolution`` measures 3 x 3 convolutions instead, as IMAGE x CHANNELS x RESULTS.
``--target cpu:x86-64-amx`` measures a matrix unit; the results of floats have their own dtype, those of i8 are i32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from time import thread_time
from typing import Annotated

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import typer

import aotc
from aotc.targets import TARGETS
from aotc.vmfb.host.machine import request_amx_tiles
from benchmarks import options, report, timing
from benchmarks.engines import load_module
from benchmarks.timing import Call

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
FORMS = ("bf16", "widened", "f16", "i8", "u8", "f32")
UNIT_OF = {"widened": "f32", "f16": "f32", "u8": "i8"}
MATRICES = {"bf16": ("tdpbf16ps", 2 * 16 * 16 * 32), "i8": ("tdpbssd", 2 * 16 * 16 * 64)}
KEEP: list[object] = []


def peak(name: str) -> tuple[Call, float]:
    """Return a loop of the unit's instruction on registers, and its number of operations."""
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
    """Return a loop of a matrix unit's instruction on registers, and its number of operations."""
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
    """Compile LLVM IR, given as ``lines`` without the end of the function; return its call on ``memory``."""
    engine = load_module("\n".join([*lines, "ret void", "}"]), TARGETS[target])
    KEEP.extend((engine, memory))
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(engine.get_function_address("run"))
    return lambda: call(memory.ctypes.data, memory.ctypes.data + 64)


def compiled_call(function: Callable[..., jax.Array], arrays: list[np.ndarray], constant: bool, target: str) -> Call:
    """Compile a function and return its call; the second argument may be a constant."""
    given = arrays[:1] if constant else arrays
    run = (lambda x: function(x, arrays[1])) if constant else function
    module = aotc.load(aotc.compile(jax.jit(run), *given, target=target), threads=1)
    return lambda: module.invoke("main", *given)


def calls_by_dtype(
    function: Callable[..., jax.Array], shapes: list[tuple[int, ...]], target: str, only: list[str]
) -> dict[str, Call]:
    """Return the calls to compare, by dtype and kind of the right operand."""
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
        f"{name} {how}": compiled_call(function, given[name], how == "constant", targets[name])
        for how in ("constant", "argument")
        for name in only
        if name in targets
    }


def product(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return a matmul; sums of integers have a wider dtype."""
    return jnp.matmul(*_widened(x, y))


def convolution(x: jax.Array, w: jax.Array) -> jax.Array:
    """Return a 3 x 3 convolution."""
    return jax.lax.conv_general_dilated(
        *_widened(x, w), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _widened(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    return (x.astype("i4"), y.astype("i4")) if y.dtype == "int8" else (x, y)


def units_of(target: str) -> dict[str, tuple[Call, float]]:
    """Return the loops of the units' instructions, with their numbers of operations."""
    units = {"f32": peak("f32")}
    if target == PAIRS:
        return units | {name: peak(name) for name in ("bf16", "i8")}
    if not request_amx_tiles():
        raise SystemExit("the system refuses tile registers")
    return units | {name: matrix_peak(name) for name in MATRICES}


def run(
    sizes: Annotated[str, typer.Option(help="Sizes, separated by commas.")] = "512,1024,2048,128x768x3072,1x4096x4096",
    convolution_: Annotated[bool, typer.Option("--convolution", help="Layers of an image instead.")] = False,
    target: options.Target = PAIRS,
    only: options.Only = "",
    rounds: options.Rounds = 11,
) -> None:
    """Print a row for each size and form, after a row for each unit."""
    units = units_of(target)
    columns = [report.us("aotc"), report.Column("GFLOP/s", 1e-9), report.ratio("of the unit")]
    table = report.Table("size and form", *columns)
    for size in ("64",) if timing.SMOKE else sizes.split(","):
        m, k, n = (int(part) for part in (size.split("x") * 3)[:3])
        function, shapes, work = product, [(m, k), (k, n)], 2.0 * m * k * n
        if convolution_:
            function, shapes, work = convolution, [(1, m, m, k), (3, 3, k, n)], 18.0 * m * m * k * n
        calls = calls_by_dtype(function, shapes, target, options.select(FORMS, only))
        loops = {f"unit {name}": call for name, (call, _) in units.items()}
        times = timing.interleaved({**loops, **calls}, rounds=rounds, seconds=0.02, clock=thread_time)
        for name, (_, operations) in units.items():
            took = times.median(f"unit {name}")
            table.add(f"{size}: unit {name}", took, operations / took, None)
        for name in calls:
            form = name.split()[0]
            unit = UNIT_OF.get(form, form)
            pairs = zip(times.rounds[f"unit {unit}"], times.rounds[name], strict=True)
            share = timing.spread([work / a * b / units[unit][1] for b, a in pairs])
            took = times.median(name)
            table.add(f"{size}: {name}", took, work / took, share)
