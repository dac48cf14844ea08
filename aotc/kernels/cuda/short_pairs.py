"""Packed bf16 arithmetic on GPUs: selection of values of two neighbouring lanes that share a register.

By default a bf16 is an f32 register whose lower half is 0. Rounding, adding or multiplying two of them takes a single
instruction if they are the halves of one register, as they are in memory::

    t = convert(f, "bf16") + b[i]      ->   cvt.rn.bf16x2.f32 t, f1, f0;  fma.rn.bf16x2 t, t, 1, b
    o[i] = t                                st t
"""

from __future__ import annotations

from collections.abc import Iterable

from llvmlite import ir

from aotc.ir.loop.ir import Apply, Load, Scalar
from aotc.kernels.llvm_types import F32, I16, I32, Emit, i32


def _packed_fma(operands: str, number: int) -> Emit:
    """Return the emitter of a packed sum or product as an ``fma``.

    One operand is a pair of the bf16 with the bits ``number``.
    """
    text = f"{{.reg .b32 c; mov.b32 c, {number << 16 | number}; fma.rn.bf16x2 $0, {operands};}}"
    kind = ir.FunctionType(I32, [I32, I32])
    return lambda b, x, y: b.asm(kind, text, "=r,r,r", [x, y], side_effect=False)


PAIRED: dict[str, Emit] = {
    "add": _packed_fma("$1, c, $2", 0x3F80),
    "mul": _packed_fma("$1, $2, c", 0x8000),
    "sub": _packed_fma("$2, c, $1", 0xBF80),
}
"""Packed instructions of two registers of two bf16; they compute the same as ``bf16_instructions.ROUNDED``."""


def values_packed_in_pairs(roots: Iterable[Scalar], stored: bool) -> list[Apply]:
    """Return the values that two lanes pack in one register, in topological order.

    They are sums and products with a packed operand, or with one that is cheap to pack, and the roundings that these
    use or that are ``stored``.
    """
    order = _scalars_in_order(roots)
    wanted = {id(node) for node in order[-1:] if stored}
    found = []
    for node in reversed(order):
        if not isinstance(node, Apply) or node.dtype != "bf16":
            continue
        if node.fn in PAIRED:
            if id(node) in wanted or any(isinstance(a, Load) or _is_rounded_to_bf16(a) for a in node.args):
                wanted |= set(map(id, node.args))
                found.append(node)
        elif _is_rounded_to_bf16(node) and id(node) in wanted:
            found.append(node)
    return found[::-1]


def _is_rounded_to_bf16(node: Scalar) -> bool:
    return isinstance(node, Apply) and node.fn == "convert" and (node.dtype, node.args[0].dtype) == ("bf16", "f32")


def _scalars_in_order(roots: Iterable[Scalar]) -> list[Scalar]:
    """Return all scalars in the expressions ``roots``, each once, operands first."""
    found: dict[int, Scalar] = {}
    stack = list(roots)[::-1]
    while stack:
        node = stack[-1]
        waiting = [a for a in node.args if id(a) not in found] if isinstance(node, Apply) else []
        if waiting:
            stack += reversed(waiting)
            continue
        found[id(stack.pop())] = node
    return list(found.values())


def round_to_bf16_pair(b: ir.IRBuilder, low: ir.Value, high: ir.Value) -> ir.Value:
    """Round two f32 registers to bf16 in one register, ``low`` in the low half."""
    kind = ir.FunctionType(I32, [F32, F32])
    return b.asm(kind, "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], side_effect=False)


def pack_bf16_pair(b: ir.IRBuilder, low: ir.Value, high: ir.Value) -> ir.Value:
    """Pack two bf16, each an f32 register whose lower half is 0, in one register."""
    below = b.lshr(b.bitcast(low, I32), i32(16))
    return b.or_(below, b.and_(b.bitcast(high, I32), i32(0xFFFF0000)))


def unpack_bf16_pair(b: ir.IRBuilder, pair: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Unpack the two bf16 of a register, each to an f32 register."""
    parts = (b.trunc(x, I16) for x in (pair, b.lshr(pair, i32(16))))
    low, high = (b.bitcast(b.shl(b.zext(x, I32), i32(16)), F32) for x in parts)
    return low, high
