"""Turn an update of a slice that is written back into an update of the whole array.

Before::

    s = dynamic_slice x, i, 0 {sizes = (1, n)}
    t = scatter (reshape s), place, u           // copies the slice
    y = dynamic_update_slice x, (reshape t), i, 0
After::

    y = scatter x, (i, place), u
    t = reshape (dynamic_slice y, i, 0 {sizes = (1, n)})

So a layer's cache is updated inside the stack of all layers' caches, and readers of the updated slice read the stack.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from aotc.ir.dims.algebra import Dim
from aotc.ir.opset.dim_attributes import dims_of
from aotc.ir.tensor.ir import Function, Op, Region, TensorType, Value, walk
from aotc.lowering.analysis.constant_values import splat_of
from aotc.lowering.passes.rewrite import Builder, rewrite_function

_INDICES = frozenset({"i32", "i64", "u32", "u64"})  # fewer bits might not hold the place of a slice


def update_slices_in_place(function: Function) -> Function:
    """Return ``function`` with updates of slices rewritten as updates of the arrays, if slices are written back."""
    if "dynamic_update_slice" not in function.body.names or "dynamic_slice" not in function.body.names:
        return function
    makers = {v: op for op in walk(function.body) for v in op.results}
    users = _users_of_values(function.body)
    links: dict[Value, tuple[int, ...]] = {}
    for op in walk(function.body):
        if op.name == "dynamic_update_slice":
            links |= _slice_update_chain(op, makers, users)
    return (
        rewrite_function(function, _SliceUpdateRewriter(links).whole_array_update_rule, _ON_WHOLE)
        if links
        else function
    )


def updates_written_back(op: Op, makers: Mapping[Value, Op]) -> tuple[list[Op], Op | None]:
    """Return the updates of a slice that ``op`` (``dynamic_update_slice``) writes back, and the slice.

    The slice is None if the written value does not come from a slice.
    """
    chain: list[Op] = []
    maker = _definition_before_reshapes(op.operands[1], makers)
    while maker is not None and maker.name in _ON_WHOLE and len(maker.results) == 1:
        chain.append(maker)
        maker = _definition_before_reshapes(maker.operands[0], makers)
    return chain[::-1], maker if maker is not None and maker.name == "dynamic_slice" else None


def same_slice_position(one: Op, other: Op, makers: Mapping[Value, Op]) -> bool:
    """Return True if a ``dynamic_slice`` and a ``dynamic_update_slice`` have the same position and size."""
    read, written = (one, other) if one.name == "dynamic_slice" else (other, one)
    shape = written.operands[1].type.shape
    if dims_of(read.attrs, "sizes") != shape or read.operands[0].type != written.operands[0].type:
        return False
    for d, (a, b) in enumerate(zip(read.operands[1:], written.operands[2:], strict=True)):
        if a is not b and shape[d] != read.operands[0].type.shape[d]:
            left, right = splat_of(a, makers), splat_of(b, makers)
            if left is None or right is None or left != right:
                return False
    return True


def _users_of_values(region: Region) -> dict[Value, list[Op]]:
    """Return the ops that read each value of ``region`` and of its nested regions."""
    users: dict[Value, list[Op]] = {}
    for op in walk(region):
        for v in op.operands:
            users.setdefault(v, []).append(op)
    return users


def _definition_before_reshapes(v: Value, makers: Mapping[Value, Op]) -> Op | None:
    """Return the op that computes ``v``, looking through reshapes; None for a parameter."""
    maker = makers.get(v)
    while maker is not None and maker.name == "reshape":
        maker = makers.get(maker.operands[0])
    return maker


def _slice_update_chain(
    op: Op, makers: Mapping[Value, Op], users: Mapping[Value, list[Op]]
) -> dict[Value, tuple[int, ...]]:
    """Return the chain of slice updates that ``op`` writes back, with the array dims that each slice retains."""
    chain, read = updates_written_back(op, makers)
    x = op.operands[0]
    if not chain or read is None or read.operands[0] is not x or not same_slice_position(read, op, makers):
        return {}
    if any(user is not op and user.name != "dynamic_slice" for user in users[x]):
        return {}  # it would have to be copied as a whole
    dims_of_links: dict[Value, tuple[int, ...]] = {}
    for link in chain:
        dims = _whole_dims_of_slice(read, link.operands[0].type.shape)
        if dims is None or (link.name == "scatter" and link.operands[1].type.dtype not in _INDICES):
            return {}
        dims_of_links[link.result] = dims
    return dims_of_links


def _whole_dims_of_slice(read: Op, shape: tuple[Dim, ...]) -> tuple[int, ...] | None:
    """Return the dims of an array that the slice ``read``, reshaped to ``shape``, covers completely.

    None if the reshape drops no leading dim, drops one longer than 1, or if another dim is not covered completely.
    """
    sizes, whole = dims_of(read.attrs, "sizes"), read.operands[0].type.shape
    dropped = len(sizes) - len(shape)
    dims = tuple(range(dropped, len(sizes)))
    is_whole = dropped >= 0 and sizes[dropped:] == shape and all(whole[d] == sizes[d] for d in dims)
    return dims if is_whole and all(n == 1 for n in sizes[:dropped]) and dropped else None


class _SliceUpdateRewriter:
    """Rewrite updates of slices as updates of the arrays from which the slices were read."""

    def __init__(self, links: Mapping[Value, tuple[int, ...]]) -> None:
        self.links = links
        self.updated: dict[Value, Value] = {}  # updated arrays, with the original array

    def whole_array_update_rule(self, op: Op, b: Builder) -> Sequence[Value] | None:
        """Return the update of the whole array that replaces the slice update ``op``, or None."""
        if op.results and op.results[0] in self.links:
            read = _definition_before_reshapes(op.operands[0], b.definitions)
            if read is None or read.name != "dynamic_slice":
                return None
            x, *starts = read.operands
            dropped = self.links[op.result][0]
            whole = _ON_WHOLE[op.name](op, x, starts[:dropped], b)
            self.updated[whole] = self.updated.get(x, x)
            part = b.make("dynamic_slice", (whole, *starts), read.attrs)
            return (b.reshape(part, op.result.type.shape),)
        if op.name == "dynamic_update_slice":
            read = _definition_before_reshapes(op.operands[1], b.definitions)
            if read is not None and read.name == "dynamic_slice" and same_slice_position(read, op, b.definitions):
                x = read.operands[0]
                if self.updated.get(x) is op.operands[0]:
                    return (x,)
        return None


def _slice_update_of_array(op: Op, x: Value, starts: Sequence[Value], b: Builder) -> Value:
    _, new, *inner = op.operands
    part = b.reshape(new, (1,) * len(starts) + new.type.shape)
    return b.make("dynamic_update_slice", (x, part, *starts, *inner))


def _scatter_into_whole_array(op: Op, x: Value, starts: Sequence[Value], b: Builder) -> Value:
    """Return the scatter ``op`` into ``x`` instead of a slice of it: ``starts`` precede each index vector."""
    _, indices, updates = op.operands
    a, more, along = op.attrs, len(starts), op.attrs["index_vector_dim"]
    if along == indices.type.rank:
        indices = b.reshape(indices, (*indices.type.shape, 1))
    shape = tuple(1 if d == along else n for d, n in enumerate(indices.type.shape))
    places = [b.broadcast(b.convert(start, indices.type.dtype), (), shape) for start in starts]
    whole = tuple(more + n if d == along else n for d, n in enumerate(indices.type.shape))
    type_ = TensorType(indices.type.dtype, whole)
    indices = b.make("concatenate", (*places, indices), {"dim": along}, type_)
    first = tuple(range(more))
    shifted = {
        name: tuple(d + more for d in a[name])
        for name in ("inserted_window_dims", "input_batching_dims", "scatter_dims_to_operand_dims")
    }
    for name in ("inserted_window_dims", "scatter_dims_to_operand_dims"):
        shifted[name] = first + shifted[name]
    return b.make("scatter", (x, indices, updates), {**a, **shifted}, x.type, regions=op.regions)


_ON_WHOLE: Mapping[str, Callable[[Op, Value, Sequence[Value], Builder], Value]] = {
    "dynamic_update_slice": _slice_update_of_array, "scatter": _scatter_into_whole_array,
}  # fmt: skip
