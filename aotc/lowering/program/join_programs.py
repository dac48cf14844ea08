"""One program of a general function and its copies for given sizes: the sizes of a call decide which code runs."""

from __future__ import annotations

from aotc.ir.tensor_ir import Function
from aotc.lowering.analysis.fixed_dims import fixed_dims
from aotc.lowering.program.emit_program import Program


def join_programs(general: tuple[Function, Program], copies: list[tuple[Function, Program]]) -> Program:
    """Return a program that compares the arguments' sizes and goes on with the code that was made for them."""
    joined = Program()
    entries = []
    for function, _ in copies:
        conditions = []
        for n, axis, size in fixed_dims(general[0], function):
            found = joined.register()
            joined.op("dim", found, n, axis)
            conditions.append(joined.binary("eq", found, joined.value(size)))
        holds = conditions[0]
        for c in conditions[1:]:
            holds = joined.binary("and", holds, c)
        entries.append(len(joined.code))
        joined.op("branch_if", holds, 0)
    joined.code += general[1].code
    for at, (_, program) in zip(entries, copies, strict=True):
        joined.code[at][-1] = len(joined.code)
        joined.code += program.code
    joined.registers = max(joined.registers, *(p.registers for _, p in [general, *copies]))
    return joined
