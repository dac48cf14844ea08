"""A choice between an updated array and itself becomes an update under a condition.

Before::

    y = scatter(x, place, u)
    z = select(p, y, x)             // reads all of x and y
After::

    z = scatter(x, select(p, place, -1), u)     // a place outside of x: nothing is written

and ``select(p, dynamic_update_slice(x, u, at), x)`` becomes ``dynamic_update_slice(x, select(q, u, v), at)``, with the
parts ``q`` of ``p`` and ``v`` of ``x`` at ``at``. So ``where`` and a branch that ``vmap`` made a choice of update in
place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from aotc.ir.tensor_ir import Module, Op, TensorType, Value, uses, walk
from aotc.lowering.passes.rewrite import Builder
from aotc.vmfb.dtypes import kind_of


def updates_read_once(module: Module) -> set[Value]:
    """Return the updated arrays that one op reads, where there are choices between arrays."""
    if not (module.has("select") and module.has(*_CONDITIONAL)):
        return set()
    found: set[Value] = set()
    for function in module.functions.values():
        updated = [op.results[0] for op in walk(function.body) if op.name in _CONDITIONAL and len(op.results) == 1]
        if updated:
            counts = uses(function.body)
            found |= {v for v in updated if counts.get(v) == 1}
    return found


def conditional_update(op: Op, b: Builder, once: Collection[Value]) -> Sequence[Value] | None:
    """Return what replaces the result of the ``select`` ``op``, or None; ``once`` are updates that one op reads."""
    p, one, other = op.operands
    for updated, value, holds in ((one, other, True), (other, one, False)):
        chain = _chain(updated, value, b, once)
        if chain and all(update.name != "scatter" or _batches(update, p, b) for update in chain):
            for update in chain:
                value = _CONDITIONAL[update.name](update, value, p, holds, b)
            return (value,)
    return None


def _chain(updated: Value, old: Value, b: Builder, once: Collection[Value]) -> list[Op]:
    """Return the updates that make ``updated`` of ``old``, the first one first; none if it is made otherwise."""
    found: list[Op] = []
    while updated is not old:
        if updated not in once:
            return []
        found.append(b.definitions[updated])
        updated = found[-1].operands[0]
    return found[::-1]


def _batches(op: Op, p: Value, b: Builder) -> tuple[Value, dict[int, int]] | None:
    """Return a condition, and the dim of the indices of each of its own, if it is the same for all of an update."""
    batches = dict(zip(op.attrs["input_batching_dims"], op.attrs["scatter_indices_batching_dims"]))
    if kind_of(op.operands[1].type.dtype) != "i" or not op.attrs["scatter_dims_to_operand_dims"]:
        return None
    if p.type.rank == 0:
        return p, {}
    maker = b.definitions.get(p)
    if maker is None or maker.name != "broadcast" or any(d not in batches for d in maker.attrs["dims"]):
        return None
    source, dims = maker.operands[0], [batches[d] for d in maker.attrs["dims"]]
    same = all(source.type.shape[n] == op.operands[1].type.shape[d] for n, d in enumerate(dims))
    return (source, dict(enumerate(dims))) if same else None


def _scatter(op: Op, old: Value, p: Value, holds: bool, b: Builder) -> Value:
    found = _batches(op, p, b)
    assert found is not None
    condition, dims = found
    indices = op.operands[1]
    outside = b.broadcast(b.constant(-1, TensorType(indices.type.dtype)), (), indices.type.shape)
    order = sorted(dims, key=lambda n: dims[n])
    test = b.broadcast(b.transpose(condition, order), [dims[n] for n in order], indices.type.shape)
    sides = (indices, outside) if holds else (outside, indices)
    attrs = {**op.attrs, "indices_are_sorted": op.attrs["indices_are_sorted"] and not dims}
    operands = (old, b.make("select", (test, *sides)), op.operands[2])
    return b.make("scatter", operands, attrs, op.result.type, regions=op.regions)


def _slice(op: Op, old: Value, p: Value, holds: bool, b: Builder) -> Value:
    _, new, *at = op.operands
    sizes = {"sizes": new.type.shape}
    before = b.make("dynamic_slice", (old, *at), sizes)
    test = b.make("dynamic_slice", (p, *at), sizes) if p.type.rank else b.broadcast(p, (), new.type.shape)
    sides = (new, before) if holds else (before, new)
    return b.make("dynamic_update_slice", (old, b.make("select", (test, *sides)), *at))


_CONDITIONAL: Mapping[str, Callable[[Op, Value, Value, bool, Builder], Value]] = {
    "scatter": _scatter, "dynamic_update_slice": _slice,
}  # fmt: skip
