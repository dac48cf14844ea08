"""Emulation of AArch64's dot-product instructions in portable LLVM IR: kernels for AArch64 run on any processor.

Each instruction becomes a function; sums of ``bfdot`` are rounded to nearest here, but to odd by the processor.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence

import numpy as np

from aotc.ir.loop.ir import Kernel
from aotc.ir.loop.scratch import scratch_layout
from aotc.kernels import back_end
from aotc.kernels.cpu.compile import unoptimized_kernel_module
from aotc.targets import TARGETS, Target
from benchmarks.engines import load_module

HERE = TARGETS["cpu:x86-64-v3"]
"""What the code around the instructions is compiled for."""
_QUADS = """
define <4 x i32> @"{name}"(<4 x i32> %s, <16 x i8> %x, <16 x i8> %y) {{
  %a = {left} <16 x i8> %x to <16 x i32>
  %b = sext <16 x i8> %y to <16 x i32>
  %p = mul <16 x i32> %a, %b
{parts}
  ret <4 x i32> %t3
}}
"""
_PAIRS = """
define <4 x float> @"{name}"(<4 x float> %s, <8 x bfloat> %x, <8 x bfloat> %y) {{
  %a = fpext <8 x bfloat> %x to <8 x float>
  %b = fpext <8 x bfloat> %y to <8 x float>
  %p = fmul <8 x float> %a, %b
  %even = shufflevector <8 x float> %p, <8 x float> poison, <4 x i32> <i32 0, i32 2, i32 4, i32 6>
  %odd = shufflevector <8 x float> %p, <8 x float> poison, <4 x i32> <i32 1, i32 3, i32 5, i32 7>
  %both = fadd <4 x float> %even, %odd
  %t = fadd <4 x float> %s, %both
  ret <4 x float> %t
}}
"""


def _parts() -> str:
    lines = []
    for n in range(4):
        lanes = ", ".join(f"i32 {n + 4 * i}" for i in range(4))
        lines.append(f"  %q{n} = shufflevector <16 x i32> %p, <16 x i32> poison, <4 x i32> <{lanes}>")
        lines.append(f"  %t{n} = add <4 x i32> {f'%t{n - 1}' if n else '%s'}, %q{n}")
    return "\n".join(lines)


def _square(name: str, kind: str, terms: int, widen: str) -> str:
    """Return a function for the product of two rows by two columns of ``terms`` elements each."""
    wide, add, mul = ("float", "fadd", "fmul") if kind == "bfloat" else ("i32", "add", "mul")
    left, right = (widen.split() * 2)[:2]
    lines = [f'define <4 x {wide}> @"{name}"(<4 x {wide}> %s, <{2 * terms} x {kind}> %x, <{2 * terms} x {kind}> %y) {{']
    lines.append(f"  %a = {left} <{2 * terms} x {kind}> %x to <{2 * terms} x {wide}>")
    lines.append(f"  %b = {right} <{2 * terms} x {kind}> %y to <{2 * terms} x {wide}>")
    lines.append(f"  %t = bitcast <4 x {wide}> %s to <4 x {wide}>")
    for lane in range(4):
        row, column = divmod(lane, 2)
        lines.append(f"  %z{lane}.0 = extractelement <4 x {wide}> %s, i32 {lane}")
        for k in range(terms):
            at = f"{lane}.{k + 1}"
            lines.append(f"  %x{at} = extractelement <{2 * terms} x {wide}> %a, i32 {row * terms + k}")
            lines.append(f"  %y{at} = extractelement <{2 * terms} x {wide}> %b, i32 {column * terms + k}")
            lines.append(f"  %p{at} = {mul} {wide} %x{at}, %y{at}")
            lines.append(f"  %z{at} = {add} {wide} %z{lane}.{k}, %p{at}")
        before = "%t" if lane == 0 else f"%o{lane - 1}"
        lines.append(f"  %o{lane} = insertelement <4 x {wide}> {before}, {wide} %z{lane}.{terms}, i32 {lane}")
    return "\n".join([*lines, f"  ret <4 x {wide}> %o3", "}", ""])


_MEANINGS = {
    "llvm.aarch64.neon.sdot.v4i32.v16i8": _QUADS.format(name="played_sdot", left="sext", parts=_parts()),
    "llvm.aarch64.neon.usdot.v4i32.v16i8": _QUADS.format(name="played_usdot", left="zext", parts=_parts()),
    "llvm.aarch64.neon.bfdot.v4f32.v8bf16": _PAIRS.format(name="played_bfdot"),
    "llvm.aarch64.neon.smmla.v4i32.v16i8": _square("played_smmla", "i8", 8, "sext"),
    "llvm.aarch64.neon.usmmla.v4i32.v16i8": _square("played_usmmla", "i8", 8, "zext sext"),
    "llvm.aarch64.neon.bfmmla": _square("played_bfmmla", "bfloat", 4, "fpext"),
}


_SCALABLE = re.compile(r"aotc\.sve\.(\w+)\.v(\d+)")
_BODY = re.compile(r"^define [^\n]*@\"?aotc\.sve\.[^\n]*\{\n.*?^\}\n", re.MULTILINE | re.DOTALL)


def _of_fixed_vectors(text: str) -> str:
    """Replace scalable vectors in LLVM IR by fixed ones: the same for each 128 bits."""
    called = sorted({(name, int(lanes)) for name, lanes in _SCALABLE.findall(text)})
    text = re.sub(r"^declare .*(vscale|nxv).*\n", "", _BODY.sub("", text), flags=re.MULTILINE)
    parts = [_repeated(lanes) if name == "repeat" else _each_part(name, lanes) for name, lanes in called]
    return re.sub(r"vscale_range\(\d+,\d+\)", "", text) + "".join(parts)


def _repeated(lanes: int) -> str:
    numbers = ", ".join(f"i32 {n % 2}" for n in range(lanes))
    return f"""
define <{lanes} x i64> @"aotc.sve.repeat.v{lanes}"(<2 x i64> %x) {{
  %y = shufflevector <2 x i64> %x, <2 x i64> poison, <{lanes} x i32> <{numbers}>
  ret <{lanes} x i64> %y
}}
"""


def _each_part(name: str, lanes: int) -> str:
    (long,) = (x for x in _MEANINGS if x.split(".")[3] == name)
    floats = name.startswith("bf")
    wide, operand, kind = ("float", "<8 x bfloat>", "f32") if floats else ("i32", "<16 x i8>", "i32")
    put = f"llvm.vector.insert.v{lanes}{kind}.v4{kind}"
    whole, words = f"<{lanes} x {wide}>", f"<{lanes} x i32>"
    lines = [f'define {whole} @"aotc.sve.{name}.v{lanes}"({whole} %s, {words} %x, {words} %y) {{']
    done = "poison"
    for n in range(0, lanes, 4):
        mask = "<4 x i32> <" + ", ".join(f"i32 {n + i}" for i in range(4)) + ">"
        for of, part in (("s", wide), ("x", "i32"), ("y", "i32")):
            lines.append(f"  %{of}{n} = shufflevector <{lanes} x {part}> %{of}, <{lanes} x {part}> poison, {mask}")
        lines += [f"  %{of}{n}.b = bitcast <4 x i32> %{of}{n} to {operand}" for of in "xy"]
        call = f"call <4 x {wide}> @{long}(<4 x {wide}> %s{n}, {operand} %x{n}.b, {operand} %y{n}.b)"
        lines.append(f"  %t{n} = {call}")
        lines.append(f"  %r{n} = call {whole} @{put}({whole} {done}, <4 x {wide}> %t{n}, i64 {n})")
        done = f"%r{n}"
    return "\n".join(["", *lines, f"  ret {whole} {done}", "}", ""])


def run_played(kernel: Kernel, target: Target, buffers: Sequence[np.ndarray], dims: Sequence[int] = ()) -> set[str]:
    """Run a kernel of one item that is compiled for ``target`` on this machine; return its dot-product instructions."""
    text, seen = _of_fixed_vectors(str(unoptimized_kernel_module(kernel, target))), set()
    for name, meaning in _MEANINGS.items():
        if name in text:
            short = name.split(".")[3]
            seen.add(short)
            text = re.sub(rf'declare .*{re.escape(name)}.*\n', "", text).replace(name, f"played_{short}") + meaning
    library = back_end.parse_assembly_for_target(text, HERE)
    library.retarget(HERE)
    library.verify()
    engine = load_module(library.module, HERE)
    pointers = (ctypes.c_void_p * len(buffers))(*(x.ctypes.data for x in buffers))
    monitor = (ctypes.c_int64 * 64)()
    kinds = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)
    call = ctypes.CFUNCTYPE(None, *kinds)(engine.get_function_address(kernel.name))
    scratch = np.zeros(scratch_layout(kernel)[1] + 64, "u1")
    place = scratch.ctypes.data + -scratch.ctypes.data % 64
    call(pointers, (ctypes.c_int64 * len(dims))(*dims), 0, 1, place, monitor)
    return seen
