"""Find pairs of reductions that can be computed in one pass over a row: the online form of softmax and of variance.

The second reduction of a row needs the result of the first: a sum of ``exp(x - max)``, or of ``(x - mean) ** 2``. In
the online form, each part of the row computes both with its own maximum or mean. The difference from the maximum or
mean of the whole row is corrected when the parts are combined::

    sum  = sum over parts of  own * exp(centre of the part - centre of the row)
    sum  = sum over parts of  own + elements of a part * (mean of the part - centre of the row) ** 2

So a row that is too long for the fast memory of a worker is read only once, and the parts can run on several workers.

Sources: M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax", 2018; T. Chan, G. Golub, R. LeVeque,
"Updating formulae and a pairwise algorithm for computing sample variances", 1979.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from aotc.ir.dims.algebra import Dim, product
from aotc.ir.opset import ELEMENTWISE
from aotc.ir.tensor.ir import Op, Region, Value, use_counts
from aotc.lowering.analysis.constant_values import splat_of
from aotc.lowering.analysis.prefix_scans import combiner_op_name
from aotc.vmfb.dtypes import kind_of, size_of


@dataclass(frozen=True, slots=True)
class LongRow:
    """Two dependent reductions of the same rows, over their last dims; the second needs the first one's result.

    Attributes
    ----------
    first, second : Op
        The reductions; the second needs the result of the first.
    difference : Op
        The subtraction of ``centre`` from each element of a row.
    centre : Value
        One scalar per row, computed from the result of the first reduction alone: its maximum or mean.
    steps : tuple of Op
        The ops from the difference to the operand of the second reduction, in order.
    read_again : bool
        Does any of the steps have another reader?
    """

    first: Op
    second: Op
    difference: Op
    centre: Value
    steps: tuple[Op, ...]
    read_again: bool

    @property
    def is_softmax(self) -> bool:
        """Return True if the second reduction sums ``exp`` (softmax), False if it sums squares (variance)."""
        return any(op.name == "exp" for op in self.steps)

    @property
    def kept_dims(self) -> tuple[Dim, ...]:
        """Return the sizes of the dims that are not reduced."""
        return self.first.operands[0].type.shape[: -len(self.first.attrs["dims"])]

    @property
    def elements(self) -> Dim:
        """Return the elements of a row."""
        return product(self.first.operands[0].type.shape[len(self.kept_dims) :])

    @property
    def row_bytes(self) -> Dim:
        """Return the bytes of one row of the difference from the centre, the result of the first step."""
        return self.elements * size_of(self.steps[0].result.type.dtype)


def dependent_reduction_pairs(region: Region) -> Iterator[LongRow]:
    """Yield the pairs of dependent reductions of ``region``, however long their rows are."""
    makers = {v: op for op in region.ops for v in op.results}
    readers = use_counts(region)
    for op in region.ops:
        if row := _long_row(op, makers, readers):
            yield row


# --- matching of the two reductions ---------------------------------------------


def _long_row(second: Op, makers: Mapping[Value, Op], readers: Mapping[Value, int]) -> LongRow | None:
    """Return the pair of dependent reductions whose second one is ``second``, or None."""
    if not _is_last_dims_reduction(second, "add"):
        return None
    steps: list[Op] = []
    op = makers.get(second.operands[0])
    while op is not None and op.name in ELEMENTWISE and len(set(op.operands)) == 1:
        steps.insert(0, op)
        op = makers.get(op.operands[0])
    if op is None or op.name != "sub" or kind_of(op.result.type.dtype) != "f":
        return None
    before, centre = _required_first_combiner(steps), row_scalar_of_broadcast(op.operands[1], second, makers)
    first = _only_reduction_behind(centre, makers) if before and centre else None
    if (
        centre is None
        or first is None
        or not _is_last_dims_reduction(first, before)
        or first.attrs["dims"] != second.attrs["dims"]
    ):
        return None
    if value_before_conversions(first.operands[0], makers) is not value_before_conversions(op.operands[0], makers):
        return None
    return LongRow(first, second, op, centre, tuple(steps), any(readers[step.result] > 1 for step in steps))


def shared_sum(op: Op, makers: Mapping[Value, Op]) -> Value | None:
    """Return the per-row sums by which the softmax division ``op`` normalizes, or None.

    ``op`` must divide ``exp(x - max)`` by its own sum along the row.
    """
    exponentials, divisor = op.operands
    maker = makers.get(divisor)
    while maker is not None and (is_reshape_like(maker) or maker.name == "broadcast"):
        maker = makers.get(maker.operands[0])
    row = _long_row(maker, makers, Counter()) if maker is not None else None
    if row is None or not row.is_softmax or row.second.operands[0] is not exponentials:
        return None
    return row_scalar_of_broadcast(divisor, row.second, makers)


def _required_first_combiner(steps: Sequence[Op]) -> str:
    """Return the combiner that the first reduction must have for ``steps`` of the second, or an empty string."""
    match [step for step in steps if step.name != "convert"]:
        case [Op(name="exp")]:
            return "max"
        case [Op(name="mul") as square] if size_of(square.operands[0].type.dtype) >= size_of("f32"):
            return "add"  # with narrower dtypes, the rounding error of the mean of a part does not cancel
    return ""


def _is_last_dims_reduction(op: Op, name: str) -> bool:
    """Return True if ``op`` is a reduction of floats over the last dims with the combiner ``name``."""
    if op.name != "reduce" or len(op.operands) != 2 or combiner_op_name(op) != name:
        return False
    rank, dims = op.operands[0].type.rank, sorted(op.attrs["dims"])
    return kind_of(op.result.type.dtype) == "f" and bool(dims) and dims == [*range(rank - len(dims), rank)]


def value_before_conversions(value: Value, makers: Mapping[Value, Op]) -> Value:
    """Return ``value`` before any conversions of its dtype."""
    while (op := makers.get(value)) is not None and op.name == "convert":
        value = op.operands[0]
    return value


def row_scalar_of_broadcast(value: Value, reduction: Op, makers: Mapping[Value, Op]) -> Value | None:
    """Return the scalars (one per row) that ``value`` broadcasts along the reduced dims, or None for other values."""
    op = makers.get(value)
    return op.operands[0] if op is not None and broadcasts_row_scalar(op, reduction) else None


def broadcasts_row_scalar(op: Op, reduction: Op) -> bool:
    """Return True if ``op`` broadcasts one scalar per row along the dims that ``reduction`` reduces."""
    if op.name != "broadcast":
        return False
    row_dims = [(d, n) for d, n in enumerate(op.result.type.shape) if d not in reduction.attrs["dims"] and n != 1]
    return row_dims == [(d, n) for d, n in zip(op.attrs["dims"], op.operands[0].type.shape, strict=True) if n != 1]


def _only_reduction_behind(centre: Value, makers: Mapping[Value, Op]) -> Op | None:
    """Return the single reduction on which ``centre`` depends besides constants; or None."""
    reductions: set[Op] = set()
    stack, seen = [centre], set()
    while stack:
        value = stack.pop()
        if value in seen or splat_of(value, makers) is not None:
            continue
        seen.add(value)
        op = makers.get(value)
        if op is None:
            return None
        if op.name == "reduce":
            reductions.add(op)
        elif op.name in ELEMENTWISE or is_reshape_like(op):
            stack += op.operands
        else:
            return None
    return reductions.pop() if len(reductions) == 1 else None


def is_reshape_like(op: Op) -> bool:
    """Return True if ``op`` only changes the shape of a value: a reshape, or a broadcast that adds dims of size 1."""
    if op.name == "broadcast":
        dims = list(op.attrs["dims"])
        return dims == sorted(dims) and product(op.operands[0].type.shape) == product(op.result.type.shape)
    return op.name == "reshape"
