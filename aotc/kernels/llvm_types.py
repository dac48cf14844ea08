"""How an element type lies in memory and in a register, as LLVM types.

The two differ for three families. ``i1`` is a byte of memory and an ``i1``
register. ``f16`` and ``bf16`` are 16 bits of memory and a ``float`` register that
always holds a value of the narrow type, so that arithmetic is done in f32 and
rounded after every op. A complex number is a pair of registers. A float of 8 bits
or less is its code in a byte, in memory and register; integers of less than 8
bits take a byte too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import takewhile
from typing import TypeAlias

from llvmlite import ir

from aotc.kernels.llvm_text import GivenNames, module_text
from aotc.kernels.symbol_table import TextModule
from aotc.targets import Target
from aotc.vmfb.dtypes import DTYPES, real_of

I1, I8, I16, I32, I64, I128 = (ir.IntType(n) for n in (1, 8, 16, 32, 64, 128))
F32, F64, HALF = ir.FloatType(), ir.DoubleType(), ir.HalfType()


class _BFloat(ir.Type):
    """LLVM's ``bfloat``, which llvmlite lacks: for operands of intrinsics; kernels keep bf16 as said above."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


BFLOAT = _BFloat()
PTR = ir.PointerType()
VOID = ir.VoidType()

Scalar: TypeAlias = ir.Value
Pair: TypeAlias = tuple[ir.Value, ir.Value]
Register: TypeAlias = Scalar | Pair
Emit: TypeAlias = Callable[..., ir.Value]  # of a builder and the operands


@lru_cache(maxsize=4096, typed=True)
def i32(value: int) -> ir.Constant:
    """Return a constant of 32 bits."""
    return ir.Constant(I32, value)


@lru_cache(maxsize=4096, typed=True)
def i64(value: int) -> ir.Constant:
    """Return a constant of 64 bits: offsets, most of which are said again and again."""
    return ir.Constant(I64, value)


class _Word(ir.Constant):
    """A vector constant whose text is a word; llvmlite would write each lane, and LLVM read it."""

    def __init__(self, kind: ir.VectorType, lane: object, word: str) -> None:
        super().__init__(kind, lane)
        self._word = word

    def _get_reference(self) -> str:
        return self._word


def zeros(kind: ir.VectorType) -> ir.Constant:
    """Return a vector of zeros."""
    return _Word(kind, None, "zeroinitializer")


def undefined(kind: ir.VectorType) -> ir.Constant:
    """Return a vector of anything."""
    return _Word(kind, ir.Undefined, "undef")


def splat(kind: ir.VectorType, one: ir.Constant) -> ir.Constant:
    """Return a vector of a constant."""
    return _Word(kind, one, f"splat ({one.type} {one.get_reference()})")


@lru_cache(maxsize=256)
def _repeating(kind: ir.Type, lanes: int) -> tuple[ir.Constant, ir.Constant]:
    """Return what a vector is made in whose elements are one, and which elements it then takes."""
    return undefined(ir.VectorType(kind, lanes)), zeros(ir.VectorType(I32, lanes))


def broadcast(builder: ir.IRBuilder, one: ir.Value, lanes: int) -> ir.Value:
    """Return a vector of one value."""
    anything, same = _repeating(one.type, lanes)
    return builder.shuffle_vector(builder.insert_element(anything, one, i32(0)), anything, same)


class KernelModule(ir.Module):
    """A module that knows the machine it is for: emission asks :func:`lacks`."""

    def __init__(self, name: str, target: Target) -> None:
        super().__init__(name=name)
        self.triple = target.triple
        self.lacks = target.lacks
        self.vector_bytes = target.vector_bytes
        self.permutes = "avx512f" in target.features
        self.has_bf16 = self.has_nan_extremes = target.has_ampere
        self.has_reciprocals = target.kind == "cuda"
        self.saturates = target.kind == "cuda" or not target.triple.startswith("x86_64")
        self.finished: TextModule | None = None  # functions of vector code, which LLVM's passes need not see

    def add_global(self, value: ir.NamedValue) -> None:
        """Add a function or a variable."""
        super().add_global(value)
        if isinstance(value, ir.Function):
            value.scope = GivenNames(value.scope)

    def __repr__(self) -> str:
        return module_text(self)


def hide(module: ir.Module) -> None:
    """Hide all that ``module`` defines, so that LLVM may inline and drop it."""
    for value in module.global_values:
        if isinstance(value, ir.Function) and value.blocks:
            value.linkage = "internal"
            value.attributes.add("nounwind")
            if "noinline" not in value.attributes:
                value.attributes.add("alwaysinline")
        elif isinstance(value, ir.GlobalVariable) and value.initializer is not None:
            value.linkage = "internal"


def release(module: ir.Module) -> None:
    """Let go of what a module is made of, once it is text: its parts name each other, and would be garbage."""
    for function in module.functions:
        for block in function.blocks:
            for phi in takewhile(lambda i: isinstance(i, ir.PhiInstr), block.instructions):
                phi.incomings.clear()
            vars(block).clear()
        vars(function).clear()
    vars(module).clear()


def lacks(builder: ir.IRBuilder, instruction: str) -> bool:
    """Has the machine of ``builder``'s module no such instruction (see :attr:`aotc.targets.Target.lacks`)?"""
    return instruction in builder.module.lacks


def has_bf16(builder: ir.IRBuilder) -> bool:
    """Has the machine of ``builder``'s module an instruction that rounds an f32 to bf16?"""
    return builder.module.has_bf16


def has_nan_extremes(builder: ir.IRBuilder) -> bool:
    """Return True if the machine of ``builder``'s module has a maximum of f32 that is NaN where an operand is."""
    return builder.module.has_nan_extremes


def has_reciprocals(builder: ir.IRBuilder) -> bool:
    """Has the machine of ``builder``'s module an instruction that approximates the reciprocal of an f32 to a unit?"""
    return builder.module.has_reciprocals


def saturates(builder: ir.IRBuilder) -> bool:
    """Do conversions of floats to integers clamp on the machine of ``builder``'s module, and make NaN 0?"""
    return builder.module.saturates


def register_type(name: str) -> ir.Type:
    """Return the register type of dtype ``name`` (of one part, if complex)."""
    row = DTYPES[name]
    match row.kind:
        case "b":
            return I1
        case "i" | "u":
            return ir.IntType(row.bits) if row.bits >= 8 else I8
        case "f" if row.bits <= 8:
            return I8
        case "f":
            return F64 if row.bits == 64 else F32
    return register_type(real_of(name))


def memory_type(name: str) -> ir.Type:
    """Return the type of one stored element of dtype ``name`` (of one part, if complex)."""
    row = DTYPES[name]
    if row.kind == "c":
        return memory_type(real_of(name))
    if row.kind == "f":
        return {64: F64, 32: F32, 16: I16}.get(row.bits, I8)
    return ir.IntType(8 * row.size)


def computes_in(name: str) -> str:
    """Return the float dtype, ``f32`` or ``f64``, in which dtype ``name`` is computed."""
    return "f64" if DTYPES[name].bits == 64 else "f32"
