"""Values that are made where a result will be: the op that makes the result writes it over them.

Before::

    l = product(a, b)        // in the arena
    o = product(c, d) + l    // a result

After: ``l`` is made in the memory of ``o``, whose kernel reads each element of ``l`` only where it then writes ``o``.
So is what an update in place takes that makes the result: it would be copied there first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from aotc.ir.loop_ir import Kernel
from aotc.ir.program_ir import Storage
from aotc.ir.tensor_ir import Function, Op, Value
from aotc.lowering.analysis.in_place import overwritten


def made_early(
    ops: Sequence[Op], wanted: Mapping[Value, Storage], counts: Mapping[Value, int],
    functions: Mapping[str, Function], kernels: Mapping[str, Kernel], space: Callable[[Value], int],
) -> dict[Value, Storage]:  # fmt: skip
    """Return values of ``ops`` that nobody but the maker of a result reads, with the memory of that result.

    Values that are in another ``space`` than the result are none of them.
    """
    makers = {v: op for op in ops if op.name == "dispatch" for v in op.results}
    found: dict[Value, Storage] = {}
    for result, storage in wanted.items():
        v: Value | None = result
        while v is not None and storage.kind == "result" and storage.size != 0:
            v = _written_over(v, makers, counts, functions, kernels)
            if v is None or v in wanted or v in found or space(v) != storage.space:
                break
            found[v] = storage
    return found


def _written_over(
    result: Value, makers: Mapping[Value, Op], counts: Mapping[Value, int], functions: Mapping[str, Function],
    kernels: Mapping[str, Kernel],
) -> Value | None:  # fmt: skip
    """Return the operand that the maker of ``result`` alone reads and may write it over, if there is one."""
    op = makers.get(result)
    if op is None:
        return None
    number = op.results.index(result)
    callee = op.attrs["callee"]
    numbers = [n for out, n in kernels[callee].aliases if out == number]
    if number < overwritten(functions[callee]):
        numbers = [number]
    operands = (op.operands[n] for n in numbers)
    return next((v for v in operands if v in makers and counts.get(v) == 1), None)
