"""SVE vectors of known length: LLVM IR of fixed vectors, in functions with a known vector length.

With ``vscale_range(n, n)``, n times 128 bits, LLVM's back end for AArch64 keeps fixed vectors of that length in ``z``
registers. Some instructions (products of quads and pairs) have no form for fixed vectors. For each of them, a function
of fixed vectors wraps the intrinsic of scalable ones: :func:`sve_instruction_function` returns its name,
:func:`with_vector_length` defines it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from aotc.targets import Target


class _Instruction(NamedTuple):
    """The LLVM intrinsic of an SVE instruction, with its operand type; a 32-bit lane has ``group`` operand elements."""

    intrinsic: str
    sums: str
    operands: str
    group: int


_QUADS, _PAIRS = ("i32", "i8", 4), ("float", "bfloat", 2)
_INSTRUCTIONS = {
    **{name: _Instruction(f"{name}.nxv4i32", *_QUADS) for name in ("sdot", "usdot", "smmla", "usmmla")},
    **{name: _Instruction(name, *_PAIRS) for name in ("bfdot", "bfmmla")},
}
_NAMES = {"i32": "i32", "i64": "i64", "float": "f32"}
_REPEAT = "repeat"
_CALLED = re.compile(r'^declare .*@"aotc\.sve\.(\w+)\.v(\d+)"\(.*\)$', re.MULTILINE)
_DEFINED = re.compile(r"^(define .*[^\s{])(\s*)\{$", re.MULTILINE)


def sve_instruction_function(name: str, lanes: int) -> str:
    """Return the name of the function that wraps an SVE instruction, for ``lanes`` 32-bit accumulators."""
    return f"aotc.sve.{name}.v{lanes}"


def sve_repeat_function(lanes: int) -> str:
    """Return the name of the SVE function that repeats 128 bits over ``lanes`` lanes."""
    return sve_instruction_function(_REPEAT, lanes)


def with_vector_length(text: str, target: Target) -> str:
    """Add to LLVM assembly the vector length of ``target``, and the definitions of the SVE functions that it calls."""
    if not target.sve_length:
        return text
    called = [(found[1], int(found[2])) for found in _CALLED.finditer(text)]
    functions = [
        _sve_repeat_lines(lanes) if name == _REPEAT else _sve_instruction_lines(name, lanes) for name, lanes in called
    ]
    declared = dict.fromkeys(line for function in functions for line in function if line.startswith("declare"))
    defined = ["\n".join(x for x in function if not x.startswith("declare")) for function in functions]
    text = "\n".join([_CALLED.sub("", text), *declared, *defined, ""])
    return _DEFINED.sub(rf"\1 vscale_range({target.sve_length},{target.sve_length})\2{{", text)


def _insert_fixed_vector_intrinsic(kind: str, lanes: int, count: int) -> str:
    """Return the intrinsic that converts a fixed vector to a scalable vector, with ``count`` lanes per 128 bits."""
    return f"@llvm.vector.insert.nxv{count}{_NAMES[kind]}.v{lanes}{_NAMES[kind]}"


def _sve_instruction_lines(name: str, lanes: int) -> list[str]:
    """Return the lines of the function that wraps an SVE instruction, with declarations of its callees."""
    row = _INSTRUCTIONS[name]
    fixed, wide = f"<{lanes} x {row.sums}>", f"<vscale x 4 x {row.sums}>"
    fixed_words, words = f"<{lanes} x i32>", "<vscale x 4 x i32>"
    operand = f"<vscale x {4 * row.group} x {row.operands}>"
    put, put_words = _insert_fixed_vector_intrinsic(row.sums, lanes, 4), _insert_fixed_vector_intrinsic("i32", lanes, 4)
    take = f"@llvm.vector.extract.v{lanes}{_NAMES[row.sums]}.nxv4{_NAMES[row.sums]}"
    intrinsic = f"@llvm.aarch64.sve.{row.intrinsic}"
    return [
        f"declare {wide} {put}({wide}, {fixed}, i64)",
        f"declare {words} {put_words}({words}, {fixed_words}, i64)",
        f"declare {wide} {intrinsic}({wide}, {operand}, {operand})",
        f"declare {fixed} {take}({wide}, i64)",
        f'define internal {fixed} @"{sve_instruction_function(name, lanes)}"'
        f"({fixed} %s, {fixed_words} %x, {fixed_words} %y) alwaysinline nounwind {{",
        f"  %a = call {wide} {put}({wide} poison, {fixed} %s, i64 0)",
        f"  %b = call {words} {put_words}({words} poison, {fixed_words} %x, i64 0)",
        f"  %c = call {words} {put_words}({words} poison, {fixed_words} %y, i64 0)",
        f"  %left = bitcast {words} %b to {operand}",
        f"  %right = bitcast {words} %c to {operand}",
        f"  %d = call {wide} {intrinsic}({wide} %a, {operand} %left, {operand} %right)",
        f"  %e = call {fixed} {take}({wide} %d, i64 0)",
        f"  ret {fixed} %e",
        "}",
    ]


def _sve_repeat_lines(lanes: int) -> list[str]:
    """Return the lines of the function that repeats 128 bits, with declarations of its callees."""
    fixed, wide, put = f"<{lanes} x i64>", "<vscale x 2 x i64>", _insert_fixed_vector_intrinsic("i64", 2, 2)
    take, twice = f"@llvm.vector.extract.v{lanes}i64.nxv2i64", "@llvm.aarch64.sve.dupq.lane.nxv2i64"
    return [
        f"declare {wide} {put}({wide}, <2 x i64>, i64)",
        f"declare {wide} {twice}({wide}, i64)",
        f"declare {fixed} {take}({wide}, i64)",
        f'define internal {fixed} @"{sve_repeat_function(lanes)}"(<2 x i64> %x) alwaysinline nounwind {{',
        f"  %a = call {wide} {put}({wide} poison, <2 x i64> %x, i64 0)",
        f"  %b = call {wide} {twice}({wide} %a, i64 0)",
        f"  %c = call {fixed} {take}({wide} %b, i64 0)",
        f"  ret {fixed} %c",
        "}",
    ]
