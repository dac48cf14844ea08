"""Turn a select between updates of one array into conditional updates of that array.

Before::

    y = scatter(x, place, u)
    z = select(p, y, x)             // reads all of x and y
After::

    z = scatter(x, select(p, place, -1), u)     // an index outside of x: nothing is written

and ``select(p, dynamic_update_slice(x, u, at), x)`` becomes ``dynamic_update_slice(x, select(q, u, v), at)``, where
``q`` and ``v`` are the slices of ``p`` and ``x`` at ``at``. So ``where``, and a branch that ``vmap`` turned into a
select, update in place.

If both sides are updates of ``x``, those of one side are done where ``p`` holds, and then those of the other where it
does not. At each element one of the two sequences writes nothing, so their order is free. Two updates of the same form
under a scalar ``p`` become one, whose place and values are selected::

    z = select(p, scatter(x, i, u), scatter(x, j, v))
    z = scatter(x, select(p, i, j), select(p, u, v))
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import zip_longest

from aotc.ir.dims.algebra import Dim
from aotc.ir.opset import SCALARS
from aotc.ir.tensor.ir import Module, Op, TensorType, Value, use_counts, walk
from aotc.lowering.analysis.constant_values import splat_of
from aotc.lowering.analysis.parallel_scatters import is_overwriting_scatter
from aotc.lowering.analysis.prefix_scans import combiner_op_name
from aotc.lowering.passes.rewrite import Builder
from aotc.vmfb.dtypes import kind_of


def updates_read_once(module: Module) -> set[Value]:
    """Return the results of scatters and slice updates that exactly one op reads.

    The set is empty if the module has no ``select``, because nothing can then be rewritten.
    """
    if not (module.has("select") and module.has(*_CONDITIONAL)):
        return set()
    read_once: set[Value] = set()
    for function in module.functions.values():
        updated = [op.results[0] for op in walk(function.body) if op.name in _CONDITIONAL and len(op.results) == 1]
        if updated:
            counts = use_counts(function.body)
            read_once |= {v for v in updated if counts.get(v) == 1}
    return read_once


def conditional_update(op: Op, b: Builder, once: Collection[Value]) -> Sequence[Value] | None:
    """Return the value that replaces the result of the ``select`` ``op``, or None.

    ``once`` are the updated arrays with one reader.
    """
    p, one, other = op.operands
    value, chosen = _update_chain(one, b, once)
    same, otherwise = _update_chain(other, b, once)
    if value is not same:
        return None
    scalar = _varying_dims_of_predicate(p, b) == ()
    steps: list[tuple[Op | None, Op | None]] = []  # pairs of updates that become one, or one update of a side
    for x, y in zip_longest(chosen, otherwise):
        steps += [(x, y)] if scalar and x and y and _are_similar_updates(x, y) else [(x, None), (None, y)]
    for x, y in steps:
        update = x or y
        if update and not (x and y) and update.name == "scatter" and _batch_dims_of_predicate(update, p, b) is None:
            return None
    for x, y in steps:
        if x and y:
            value = _selected_update(x, y, value, p, b)
        elif update := x or y:
            value = _CONDITIONAL[update.name](update, value, p, x is not None, b)
    return (value,)


def _update_chain(updated: Value, b: Builder, once: Collection[Value]) -> tuple[Value, list[Op]]:
    """Return the array behind a chain of updates with one reader each that ends in ``updated``, and the chain."""
    chain: list[Op] = []
    while updated in once:
        chain.append(b.definitions[updated])
        updated = chain[-1].operands[0]
    return updated, chain[::-1]


def _are_similar_updates(one: Op, other: Op) -> bool:
    """Return True if two updates differ only in positions and values."""
    types = [[v.type for v in op.operands] for op in (one, other)]
    if one.name != other.name or types[0] != types[1] or one.attrs != other.attrs:
        return False
    if one.name != "scatter" or (is_overwriting_scatter(one) and is_overwriting_scatter(other)):
        return True
    name = combiner_op_name(one)
    return (
        name is not None
        and name == combiner_op_name(other)
        and _combiner_has_element_first(one) == _combiner_has_element_first(other)
    )


def _combiner_has_element_first(op: Op) -> bool:
    """Return True if a scatter's combiner has the element as first and the update as second operand."""
    region = op.regions[0]
    return tuple(region.ops[0].operands) == tuple(region.params)


def _batch_dims_of_predicate(op: Op, p: Value, b: Builder) -> list[int] | None:
    """Return the dims of a scatter's indices along which ``p`` varies, or None if it varies within an update."""
    batches = dict(zip(op.attrs["input_batching_dims"], op.attrs["scatter_indices_batching_dims"]))
    varying = _varying_dims_of_predicate(p, b)
    if kind_of(op.operands[1].type.dtype) != "i" or not op.attrs["scatter_dims_to_operand_dims"] or varying is None:
        return None
    return [batches[d] for d in varying] if all(d in batches for d in varying) else None


# Elementwise ops followed from the predicate of a select back to the broadcast of its condition. vmap of a branch makes
# one.
NESTED_CONDITIONS = 4


def _varying_dims_of_predicate(p: Value, b: Builder, depth: int = 0) -> tuple[int, ...] | None:
    """Return the dims along which the predicate ``p`` varies, or None if it is not built from equal broadcasts."""
    maker = b.definitions.get(p)
    if p.type.rank == 0:
        return ()
    if maker is None or depth > NESTED_CONDITIONS:
        return None
    if maker.name == "broadcast":
        dims = maker.attrs["dims"]
        same = all(n == p.type.shape[d] for n, d in zip(maker.operands[0].type.shape, dims))
        return tuple(dims) if same else None
    if maker.name not in SCALARS:
        return None
    arrays = [v for v in maker.operands if splat_of(v, b.definitions) is None]
    varying = {_varying_dims_of_predicate(v, b, depth + 1) for v in arrays}
    return varying.pop() if len(varying) == 1 else None


def _predicate_before_broadcast(p: Value, shape: tuple[Dim, ...], b: Builder) -> Value:
    """Return the operand of the broadcast that computes the predicate ``p``, reshaped to ``shape``."""
    if p.type.rank == 0:
        return p
    number = splat_of(p, b.definitions)
    if number is not None:
        return b.constant(number, TensorType(p.type.dtype, shape))
    maker = b.definitions[p]
    if maker.name == "broadcast":
        return maker.operands[0]
    parts = [_predicate_before_broadcast(v, shape, b) for v in maker.operands]
    return b.make(maker.name, parts, maker.attrs, TensorType(p.type.dtype, shape))


def _selected_update(one: Op, other: Op, old: Value, p: Value, b: Builder) -> Value:
    """Append an update of ``old``: that of ``one`` if the scalar in ``p`` is true, else that of ``other``."""
    test = _predicate_before_broadcast(p, (), b)
    operands = [old]
    for x, y in zip(one.operands[1:], other.operands[1:]):
        operands.append(x if x is y else b.make("select", (b.broadcast(test, (), x.type.shape), x, y)))
    return b.make(one.name, operands, one.attrs, one.result.type, regions=one.regions)


def _conditional_scatter(op: Op, old: Value, p: Value, holds: bool, b: Builder) -> Value:
    """Append the scatter ``op`` into ``old``; its updates where the predicate ``p`` is not ``holds`` get index -1."""
    dims, varying = _batch_dims_of_predicate(op, p, b), _varying_dims_of_predicate(p, b)
    assert dims is not None
    assert varying is not None
    indices = op.operands[1]
    test = _predicate_before_broadcast(p, tuple(p.type.shape[d] for d in varying), b)
    order = sorted(range(len(dims)), key=dims.__getitem__)
    test = b.broadcast(b.transpose(test, order), [dims[n] for n in order], indices.type.shape)
    outside = b.broadcast(b.constant(-1, TensorType(indices.type.dtype)), (), indices.type.shape)
    sides = (indices, outside) if holds else (outside, indices)
    attrs = {**op.attrs, "indices_are_sorted": op.attrs["indices_are_sorted"] and not dims}
    operands = (old, b.make("select", (test, *sides)), op.operands[2])
    return b.make("scatter", operands, attrs, op.result.type, regions=op.regions)


def _conditional_slice_update(op: Op, old: Value, p: Value, holds: bool, b: Builder) -> Value:
    """Append the slice update ``op`` of ``old``, where ``p`` equals ``holds``; other elements keep their values."""
    _, new, *at = op.operands
    sizes = {"sizes": new.type.shape}
    before = b.make("dynamic_slice", (old, *at), sizes)
    test = b.make("dynamic_slice", (p, *at), sizes) if p.type.rank else b.broadcast(p, (), new.type.shape)
    sides = (new, before) if holds else (before, new)
    return b.make("dynamic_update_slice", (old, b.make("select", (test, *sides)), *at))


_CONDITIONAL: Mapping[str, Callable[[Op, Value, Value, bool, Builder], Value]] = {
    "scatter": _conditional_scatter, "dynamic_update_slice": _conditional_slice_update,
}  # fmt: skip
