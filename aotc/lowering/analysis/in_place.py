"""Which operands an op updates in place: its first results are written over them.

The kernel of such an op does not read these operands: their memory is that of the
results, which holds the operands' values when the kernel starts (``bufferize``
sees to that).
"""

from __future__ import annotations

from aotc.ir.opset import OPS
from aotc.ir.tensor.ir import Function, Op


def updated_operands(op: Op) -> tuple[int, ...]:
    """Return the positions of the operands that results 0, 1... of ``op`` overwrite."""
    return OPS[op.name].in_place(op.attrs)


def overwritten(function: Function) -> int:
    """Return how many leading parameters of an outlined region share memory with its results."""
    if function.attrs["kind"] not in ("single", "update") or not function.body.results:
        return 0
    op = next(op for op in function.body.ops if function.body.results[0] in op.results)
    return len(updated_operands(op))


def donations(function: Function) -> list[tuple[int, int]]:
    """Return donated arguments with the result that may take the memory of each, of the same type.

    JAX names the result of most; the others take the first that is left.
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
