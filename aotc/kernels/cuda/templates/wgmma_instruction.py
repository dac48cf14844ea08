"""Inline assembly of wgmma, the matmul instruction of a warpgroup: 64 rows, up to 256 columns, 32 bytes a row.

PTX ISA, wgmma.mma_async. The right operand is always in shared memory, given by a descriptor. The left one is in shared
memory too, or a fragment in registers. The accumulators are inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llvmlite import ir

from aotc.kernels.cuda.templates.fragments import FRAGMENT_REGISTERS
from aotc.kernels.cuda.templates.threads import PIECE_BYTES
from aotc.kernels.llvm_types import F32, I32, I64, i32, i64

# Units of addresses in a descriptor, and the positions of its fields. PTX ISA, matrix descriptor format.
DESCRIPTOR_UNIT = PIECE_BYTES
LEADING_FIELD, STRIDE_FIELD, SWIZZLE_FIELD = 16, 32, 62
# The leading byte offset of a swizzled operand with one column of 128-byte lines: ignored, by convention one unit.
NO_LEADING = DESCRIPTOR_UNIT
# Bytes from eight lines of a tile to the next eight, and the code of the 128-byte swizzle.
STRIDE_BYTES, SWIZZLE_128 = 1024, 1


@dataclass(frozen=True, slots=True)
class WgmmaInstruction:
    """A wgmma instruction.

    Attributes
    ----------
    shape : str
        Shape and types, as in ``m64n128k16.f32.bf16.bf16``.
    count : int
        Accumulators of a thread.
    flags : str
        Operands after the predicate: signs of both matrices, and whether they are contiguous along rows.
    kind : llvmlite.ir.Type
        Type of an accumulator.
    from_registers : bool
        True if the left operand is a fragment in four registers, rather than a descriptor.
    added : bool or None
        True if products are added to the accumulators, False if they overwrite them; None if an operand of the
        instruction decides.
    """

    shape: str
    count: int
    flags: str
    kind: ir.Type = F32
    from_registers: bool = False
    added: bool | None = None

    def emit(self, b: ir.IRBuilder, sums: Sequence[ir.Value], operands: Sequence[ir.Value]) -> list[ir.Value]:
        """Emit the instruction and return the accumulators.

        ``operands`` are the left operand, the right operand, and the condition to add if ``added`` is None. Without
        accumulators (``sums`` is empty) the instruction overwrites them.
        """
        letter = "f" if self.kind == F32 else "r"
        tied = [str(n) for n in range(len(sums))]
        left = ["r"] * FRAGMENT_REGISTERS if self.from_registers else ["l"]
        letters = [*left, "l", *(["r"] if self.added is None else [])]
        numbers = [f"${self.count + len(tied) + n}" for n in range(len(letters))]
        first = f"{{{', '.join(numbers[: len(left)])}}}" if self.from_registers else numbers[0]
        added = numbers[-1] if self.added is None else int(self.added)
        text = (
            f"{{\n.reg .pred p;\nsetp.ne.b32 p, {added}, 0;\nwgmma.mma_async.sync.aligned.{self.shape} "
            f"{{{', '.join(f'${n}' for n in range(self.count))}}}, {first}, {numbers[len(left)]}, p{self.flags};\n}}"
        )
        kinds = [self.kind] * len(tied) + [I64 if x == "l" else I32 for x in letters]
        form = ir.FunctionType(ir.LiteralStructType([self.kind] * self.count), kinds)
        constraints = ",".join([f"={letter}"] * self.count + tied + letters)
        found = b.asm(form, text, constraints, [*sums, *operands], side_effect=True)
        return [b.extract_value(found, n) for n in range(self.count)]


def wgmma_descriptor(builder: ir.IRBuilder, place: ir.Value, leading: int) -> ir.Value:
    """Emit the descriptor of a tile at ``place``, an address in units of 16 bytes.

    Groups of 8 lines are 1024 bytes apart, with the 128-byte swizzle. ``leading`` is the leading byte offset.
    """
    low = builder.or_(place, i32(leading // DESCRIPTOR_UNIT << LEADING_FIELD))
    fixed = (SWIZZLE_128 << SWIZZLE_FIELD) | (STRIDE_BYTES // DESCRIPTOR_UNIT << STRIDE_FIELD)
    return builder.or_(builder.zext(low, I64), i64(fixed))


def emit_tied_assembly(builder: ir.IRBuilder, text: str, values: list[ir.Value]) -> list[ir.Value]:
    """Emit an instruction that has all of ``values`` as inputs and outputs.

    LLVM then cannot move uses of the returned values before the instruction, nor definitions of the inputs after it.
    """
    letters = ["f" if v.type == F32 else "r" for v in values]
    constraints = ",".join([f"={c}" for c in letters] + [str(n) for n in range(len(values))] + ["~{memory}"])
    kinds = [v.type for v in values]
    kind = ir.FunctionType(ir.LiteralStructType(kinds), kinds)
    found = builder.asm(kind, text, constraints, values, side_effect=True)
    return [builder.extract_value(found, n) for n in range(len(values))]
