"""LLVM types of the dtypes, in memory and in registers.

The two differ for three families. ``i1`` is a byte in memory and an ``i1`` register. ``f16`` and ``bf16`` have 16 bits
in memory and a ``float`` register that always has a value of the narrow type, so that arithmetic is done in f32 and
rounded after every op. A complex number is a pair of registers. A float of 8 bits or less is its code in a byte, in
memory and in a register; integers of less than 8 bits are a byte, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import takewhile
from typing import TypeAlias

from llvmlite import ir

from aotc.kernels.llvm_text import UniqueNameScope, module_text
from aotc.kernels.symbol_table import TextModule
from aotc.targets import Target
from aotc.vmfb.dtypes import DTYPES, real_of

I1, I8, I16, I32, I64, I128 = (ir.IntType(n) for n in (1, 8, 16, 32, 64, 128))
F32, F64, HALF = ir.FloatType(), ir.DoubleType(), ir.HalfType()


class _BFloat(ir.Type):
    """LLVM's ``bfloat``, which llvmlite lacks, for operands of intrinsics; elsewhere bf16 is as described above."""

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
Emit: TypeAlias = Callable[..., ir.Value]  # from a builder and the operands


@lru_cache(maxsize=4096, typed=True)
def i32(value: int) -> ir.Constant:
    """Return a constant of 32 bits."""
    return ir.Constant(I32, value)


@lru_cache(maxsize=4096, typed=True)
def i64(value: int) -> ir.Constant:
    """Return a 64-bit constant, cached: most are offsets that occur many times."""
    return ir.Constant(I64, value)


class _Word(ir.Constant):
    """A vector constant with a short text (zeroinitializer, undef), because llvmlite would write every lane."""

    def __init__(self, kind: ir.VectorType, lane: object, word: str) -> None:
        super().__init__(kind, lane)
        self._word = word

    def _get_reference(self) -> str:
        return self._word


def zero_vector(kind: ir.VectorType) -> ir.Constant:
    """Return a vector constant of zeros."""
    return _Word(kind, None, "zeroinitializer")


def undefined_vector(kind: ir.VectorType) -> ir.Constant:
    """Return an undefined vector."""
    return _Word(kind, ir.Undefined, "undef")


def constant_splat(kind: ir.VectorType, one: ir.Constant) -> ir.Constant:
    """Return a vector constant whose elements all equal ``one``."""
    return _Word(kind, one, f"splat ({one.type} {one.get_reference()})")


@lru_cache(maxsize=256)
def _splat_operands(kind: ir.Type, lanes: int) -> tuple[ir.Constant, ir.Constant]:
    """Return the insertelement and shufflevector operands of a broadcast."""
    return undefined_vector(ir.VectorType(kind, lanes)), zero_vector(ir.VectorType(I32, lanes))


def broadcast_register(builder: ir.IRBuilder, one: ir.Value, lanes: int) -> ir.Value:
    """Emit a broadcast: a vector whose elements all equal the register ``one``."""
    anything, same = _splat_operands(one.type, lanes)
    return builder.shuffle_vector(builder.insert_element(anything, one, i32(0)), anything, same)


class KernelModule(ir.Module):
    """An LLVM module that records properties of its target machine, such as missing instructions."""

    def __init__(self, name: str, target: Target) -> None:
        super().__init__(name=name)
        self.triple = target.triple
        self.lacks = target.lacks
        self.vector_bytes = target.vector_bytes
        self.permutes = "avx512f" in target.features
        self.has_bf16 = self.has_nan_extremes = target.has_ampere
        self.has_reciprocals = target.kind == "cuda"
        self.saturates = target.kind == "cuda" or not target.triple.startswith("x86_64")
        self.finished: TextModule | None = None  # functions of vector code that bypass LLVM's passes

    def add_global(self, value: ir.NamedValue) -> None:
        """Add a function or a global variable."""
        super().add_global(value)
        if isinstance(value, ir.Function):
            value.scope = UniqueNameScope(value.scope)

    def __repr__(self) -> str:
        return module_text(self)


def internalize_definitions(module: ir.Module) -> None:
    """Make all definitions of ``module`` internal, so that LLVM may inline and remove them."""
    for value in module.global_values:
        if isinstance(value, ir.Function) and value.blocks:
            value.linkage = "internal"
            value.attributes.add("nounwind")
            if "noinline" not in value.attributes:
                value.attributes.add("alwaysinline")
        elif isinstance(value, ir.GlobalVariable) and value.initializer is not None:
            value.linkage = "internal"


def break_reference_cycles(module: ir.Module) -> None:
    """Break the reference cycles of a module that has been written, so that its memory is freed at once."""
    for function in module.functions:
        for block in function.blocks:
            for phi in takewhile(lambda i: isinstance(i, ir.PhiInstr), block.instructions):
                phi.incomings.clear()
            vars(block).clear()
        vars(function).clear()
    vars(module).clear()


def lacks_instruction(builder: ir.IRBuilder, instruction: str) -> bool:
    """Return True if the target of ``builder``'s module lacks an instruction, see :attr:`aotc.targets.Target.lacks`."""
    return instruction in builder.module.lacks


def has_bf16(builder: ir.IRBuilder) -> bool:
    """Return True if the target of ``builder``'s module has an instruction that rounds an f32 to bf16."""
    return builder.module.has_bf16


def has_nan_extremes(builder: ir.IRBuilder) -> bool:
    """Return True if the target of ``builder``'s module has NaN-propagating maximum and minimum of f32."""
    return builder.module.has_nan_extremes


def has_reciprocals(builder: ir.IRBuilder) -> bool:
    """Return True if the target of ``builder``'s module has an approximate reciprocal of f32, within a unit."""
    return builder.module.has_reciprocals


def has_saturating_conversions(builder: ir.IRBuilder) -> bool:
    """Return True if float-to-integer conversions of ``builder``'s module clamp, with 0 for NaN."""
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


def arithmetic_dtype(name: str) -> str:
    """Return the float dtype, ``f32`` or ``f64``, in which dtype ``name`` is computed."""
    return "f64" if DTYPES[name].bits == 64 else "f32"
