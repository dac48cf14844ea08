"""Find operands that an op updates in place: its first results overwrite them.

Such an operand and its result share memory, which holds the values of the operand when the kernel starts
(``bufferize`` ensures this). So the kernel has no separate input for the operand.
"""

from __future__ import annotations

from aotc.ir.opset import OPS
from aotc.ir.tensor.ir import Function, Op


def updated_operands(op: Op) -> tuple[int, ...]:
    """Return the positions of the operands that the results 0, 1... of ``op`` overwrite, in this order."""
    return OPS[op.name].in_place(op.attrs)


def overwritten(function: Function) -> int:
    """Return the number of leading parameters of an outlined region that share memory with its results."""
    if function.attrs["kind"] not in ("single", "update") or not function.body.results:
        return 0
    op = next(op for op in function.body.ops if function.body.results[0] in op.results)
    return len(updated_operands(op))


def donations(function: Function) -> list[tuple[int, int]]:
    """Return pairs of a donated argument and the result that may reuse its memory; both have the same type.

    JAX names the result for most donated arguments. The others get the first free result of their type.
    """
    body, found = function.body, list[tuple[int, int]]()
    free = list(range(len(body.results)))
    wishes = function.attrs.get("donated_into", {})
    for a in sorted(function.attrs.get("donated", ()), key=lambda a: str(a) not in wishes):
        fit = [n for n in free if body.results[n].type == body.params[a].type]
        named = wishes.get(str(a), -1)
        n = named if named in fit else next(iter(fit), -1)
        if n >= 0:
            found.append((a, n))
            free.remove(n)
    return found
