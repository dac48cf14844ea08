"""Annotate each matmul with the number of matmuls that a GPU computes at the same time, sharing its multiprocessors.

Before, a matmul with a result of ``1024 x 768`` for each of queries, keys and values::

    %q = dispatch %x, %wq {callee = "k0"}    %k = dispatch %x, %wk {callee = "k1"}    %v = dispatch %x, %wv {...}
    func @k0(...) attributes {kind = "contract", root = "1"}
After, the same with an attribute: tiles will be chosen for all three together, which need not fill the GPU each::

    func @k0(...) attributes {kind = "contract", root = "1", concurrent = 3}

Matmuls are concurrent if they have the same loops and the same number of dispatches on the longest path before them:
then they cannot depend on each other.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace

from aotc.ir.opset import CONTRACT
from aotc.ir.tensor.ir import Module, Op, Region, Value, values_captured_by_op
from aotc.lowering.placement.op_targets import op_targets
from aotc.options import Options
from aotc.targets import Target


def mark_concurrent(module: Module, options: Options) -> Module:
    """Annotate each matmul with the number of matmuls that a GPU computes at the same time."""
    home, kinds = op_targets(module, options)
    if "cuda" not in kinds:
        return module
    marked = dict(module.functions)
    for function in module.functions.values():
        for group in _concurrent_matmul_groups(function.body, module, home):
            for name in group:
                marked[name] = replace(marked[name], attrs={**marked[name].attrs, "concurrent": len(group)})
    return Module(marked, module.name)


def _concurrent_matmul_groups(region: Region, module: Module, home: Callable[[Op], Target]) -> Iterator[list[str]]:
    """Yield the names of two or more concurrent matmuls, group by group, for a region and its nested regions."""
    depths: dict[Value, int] = {}
    groups: dict[Hashable, list[str]] = {}
    for op in region.ops:
        for inner in op.regions:
            yield from _concurrent_matmul_groups(inner, module, home)
        before = max((depths.get(v, 0) for v in (*op.operands, *values_captured_by_op(op))), default=0)
        waits = op.name == "dispatch" or bool(op.regions)
        depths.update(dict.fromkeys(op.results, before + waits))
        if op.name == "dispatch" and home(op).kind == "cuda":
            kind = _matmul_loop_key(op.attrs["callee"], module)
            if kind is not None:
                groups.setdefault((before, home(op).name, *kind), []).append(op.attrs["callee"])
    yield from (group for group in groups.values() if len(group) > 1)


def _matmul_loop_key(callee: str, module: Module) -> tuple[Hashable, ...] | None:
    """Return a key that matmuls with the same loops share, or None if the function is not a matmul."""
    function = module.functions[callee]
    if function.attrs["kind"] != "contract":
        return None
    (op,) = (op for op in function.body.ops if op.name in CONTRACT)
    return op.name, *(v.type for v in (*op.operands, op.result)), *(repr(x) for x in sorted(op.attrs.items()))
