"""Count the scalar operations of a region when it is fused, and when each op is a kernel of its own.

A fused region recomputes a value at every index at which it is read. An elementwise op reads its operands at its own
index, so a value with several such readers is computed once. A slice, a concatenation or a reverse reads at another
index. A value read through two of them is computed twice, through four such stages sixteen times.

:class:`EvaluationCounts` follows the reads backward as ``elemental`` does. Instead of an index it uses a symbolic name
for each *place*. Reads with equal names are at the same index, so they are counted once.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from aotc.ir.dims.algebra import Dim, product
from aotc.ir.dims.compare import is_possible_relation
from aotc.ir.opset import CONTRACT, ELEMENTWISE, FREE, MOVES
from aotc.ir.opset.dim_attributes import dims_of
from aotc.ir.tensor.ir import Op, Value
from aotc.lowering.analysis.anchors import Anchors
from aotc.lowering.analysis.index_maps import Index
from aotc.lowering.cost_model.row_stages import RowStages
from aotc.lowering.cost_model.work import estimated_dim, estimated_elements, scalar_work_of_op
from aotc.lowering.plans.resources import row_values_fit_worker
from aotc.lowering.plans.thresholds import REGION_WORK, SEGMENTS
from aotc.lowering.threshold import Estimate
from aotc.targets import Target


@dataclass(frozen=True, slots=True)
class RegionWork:
    """Scalar operations of a region: ``fused``, and in ``separate`` kernels, one for each op."""

    fused: int
    separate: int

    @property
    def percent_of_separate(self) -> int:
        """Return the fused region's work in percent of the work of separate kernels."""
        return -(-100 * self.fused // self.separate) if self.separate else 100 * (1 + self.fused)

    @property
    def fits(self) -> bool:
        """Return True if fusion repeats no more work than ``REGION_WORK`` allows."""
        return self.fused <= self.separate or REGION_WORK.holds(self.percent_of_separate)


@dataclass(frozen=True, slots=True)
class Place:
    """An index at which a region evaluates a value, represented by a symbolic name.

    Attributes
    ----------
    name : hashable
        Equal names mean equal indices.
    cut : bool
        Is the last index the variable of the innermost loop, and is this loop divided where index tests change?
        Then those tests cost nothing.
    picked : bool
        Is the last index a constant at each read, like the component of an index vector of a gather?
    """

    name: Hashable
    cut: bool = field(default=False, compare=False)
    picked: bool = field(default=False, compare=False)


class EvaluationCounts:
    """Count the scalar operations of one pass over an iteration space, with repeated evaluations.

    Parameters
    ----------
    ops : mapping of Value to Op
        The op that computes each value of the region, in order.
    anchors : Anchors or None
        The indices of the values that fusion has placed.
    cuts : bool
        Is the innermost loop divided where tests on its index change?
    """

    def __init__(self, ops: Mapping[Value, Op], anchors: Anchors | None, cuts: bool = False) -> None:
        self.ops, self.anchors, self.cuts = ops, anchors, cuts
        self._innermost = next((e for e in reversed(anchors.space) if e != 0), 0) if anchors else 0
        self._last_first = [(op, self._recomputed_operands(op)) for op in reversed(dict.fromkeys(ops.values()))]

    def _recomputed_operands(self, op: Op) -> list[tuple[int, Value]]:
        """Return the operands that are recomputed wherever ``op`` reads them, with their positions."""
        return [] if op.name in CONTRACT else [(n, v) for n, v in enumerate(op.operands) if v in self.ops]

    def place_at_index(self, index: Index) -> Place:
        """Return the evaluation place for an index of the iteration space."""
        return Place(index, self.cuts and index[-1:] == (self._innermost,))

    def place_of_anchored(self, value: Value) -> Place | None:
        """Return the place at which the region's anchors evaluate ``value``, or None."""
        index = self.anchors.index.get(value) if self.anchors else None
        return None if index is None else self.place_at_index(index)

    def anchored_places(self, values: Iterable[Value]) -> list[tuple[Value, Place]]:
        """Return the ``values`` with a fixed evaluation index, each with its place."""
        return [(v, place) for v in values if (place := self.place_of_anchored(v)) is not None]

    def count_operations(self, roots: Iterable[tuple[Value, Place]], domain: int, free: Collection[Value] = ()) -> int:
        """Return the scalar operations to compute ``roots`` at ``domain`` indices each; ``free`` values are free.

        Ops are visited from the last to the first, so all places at which a value is read are complete before its own
        op is counted. Each place of a value has the number of indices that it stands for.
        """
        places: dict[Value, dict[Place, int]] = {}
        for v, place in roots:
            if v not in free:
                places.setdefault(v, {})[place] = domain
        total = 0
        for op, reads in self._last_first:
            at = (
                places.get(op.results[0], _NOWHERE)
                if len(op.results) == 1
                else _largest_result_places(op.results, places)
            )
            for place, n in at.items():
                total += n * element_work_of_op(op, place.cut, place.picked)
                for k, v in reads:
                    read, size = (place, n) if op.name in ELEMENTWISE else self._operand_place(op, k, place, n)
                    if not (v in free and self._is_known_at(v, read)):
                        indices = places.setdefault(v, {})
                        indices[read] = max(indices.get(read, 0), size)
        return total

    def _is_known_at(self, value: Value, place: Place) -> bool:
        """Return True if the known ``value`` is available at ``place``: it is only at its own place."""
        return self.ops[value].name == "reduce" or self.place_of_anchored(value) in (place, None)

    def _operand_place(self, op: Op, number: int, place: Place, domain: int) -> tuple[Place, int]:
        """Return the place at which ``op`` reads operand ``number``, and how many indices it reads there."""
        v = op.operands[number]
        if op.name == "reduce_window":
            domain *= estimated_dim(product(dims_of(op.attrs, "window")))
        if v.type.rank == 0:
            return Place(()), domain
        if self.anchors is not None and op.name in MOVES and place == self.place_of_anchored(op.results[0]):
            source = self.anchors.source_of(op)
            if source is not None:
                return self.place_at_index(source), domain
        cut = place.cut and _reads_last_dim_contiguously(op)
        if op.name == "concatenate":
            if place.cut and _is_loop_split_test_free(op):
                domain = -(-domain * estimated_dim(v.type.shape[-1]) // max(estimated_dim(op.result.type.shape[-1]), 1))
            return Place((op, number, place.name), place.cut), domain
        if op.name in MOVES:
            moved = (op.name, tuple(sorted(op.attrs.items())), v.type.shape, op.result.type.shape)
            return Place((moved, place.name), cut), domain
        picked = op.name == "gather" and number == 1 and op.attrs["index_vector_dim"] == v.type.rank - 1
        return Place((op, number, place.name), cut, picked), domain


_NOWHERE: Mapping[Place, int] = {}


def _largest_result_places(
    results: Iterable[Value], places: Mapping[Value, Mapping[Place, int]]
) -> Mapping[Place, int]:
    """Return the places of all results of an op, each with the largest number of indices of any result."""
    at: dict[Place, int] = {}
    for v in results:
        for place, n in places.get(v, _NOWHERE).items():
            at[place] = max(at.get(place, 0), n)
    return at


def _reads_last_dim_contiguously(op: Op) -> bool:
    """Return True if ``op`` reads its operand at the result's last index plus a constant offset."""
    source, result = op.operands[0].type.shape, op.results[0].type.shape
    match op.name:
        case "slice":
            return bool(source) and dims_of(op.attrs, "stride")[-1] == 1
        case "transpose":
            return op.attrs["perm"][-1] == len(source) - 1
        case "broadcast":
            return bool(source) and op.attrs["dims"][-1] == len(result) - 1 and source[-1] == result[-1]
        case "reshape":
            return bool(source) and bool(result) and source[-1] == result[-1]
        case "pad":
            return not dims_of(op.attrs, "interior")[-1]
    return False


def _is_loop_split_test_free(op: Op) -> bool:
    """Return True if dividing the innermost loop over the last dim removes all tests of a pad or a concatenation."""
    if op.name == "concatenate":
        return op.attrs["dim"] == op.result.type.rank - 1 and SEGMENTS.holds(len(op.operands) + 1)
    return not any(dims_of(op.attrs, "interior")) and sum(map(_tests_of_pad, _pad_amounts(op)[:-1])) == 0


def _pad_amounts(op: Op) -> list[tuple[Dim, Dim, Dim]]:
    return list(zip(dims_of(op.attrs, "low"), dims_of(op.attrs, "high"), dims_of(op.attrs, "interior"), strict=True))


def _tests_of_pad(padding: tuple[Dim, Dim, Dim]) -> int:
    """Return the number of tests of an index along one dim: one for each side or gap that may have padding."""
    return sum(is_possible_relation("gt", width, 0) for width in padding)


CLAMP_WORK = Estimate(3, "scalar operations to clamp one start index of a slice", "by construction: convert, max, min")
TEST_WORK = Estimate(
    2,
    "scalar operations to test an index in a region",
    "by construction: the comparison, and the select or the conjunction that uses its result",
)


def element_work_of_op(op: Op, cut: bool, picked: bool = False) -> int:
    """Return the scalar operations of one element of ``op``; ``cut`` and ``picked`` are as in :class:`Place`."""
    match op.name:
        case "concatenate" if picked and op.attrs["dim"] == op.result.type.rank - 1:
            return 0
        case "concatenate":
            return 0 if cut and _is_loop_split_test_free(op) else TEST_WORK.value * (len(op.operands) - 1)
        case "pad":
            return (
                0
                if cut and _is_loop_split_test_free(op)
                else TEST_WORK.value * sum(map(_tests_of_pad, _pad_amounts(op)))
            )
        case "gather":
            return CLAMP_WORK.value * len(op.attrs["start_index_map"])
        case "dynamic_slice":
            return CLAMP_WORK.value * (len(op.operands) - 1)
        case "reduce_window":
            return estimated_dim(product(dims_of(op.attrs, "window"))) * combiner_work(op)
    if op.name in CONTRACT:
        return 2 * estimated_dim(product(op.operands[0].type.shape[-1:]))
    return 0 if op.name in FREE else scalar_work_of_op(op)


def combiner_work(op: Op) -> int:
    """Return the scalar operations of the combiner of a reduction for one element."""
    return sum(scalar_work_of_op(o) for o in op.regions[0].ops if o.name not in FREE)


def work_of_separate_kernels(ops: Iterable[Op]) -> int:
    """Return the scalar operations of ``ops`` if each one is a separate kernel."""
    total = 0
    for op in ops:
        if op.name == "reduce":
            total += _element_count_of_value(op.operands[0]) * combiner_work(op)
        elif op.results:
            total += _element_count_of_value(op.results[0]) * element_work_of_op(op, cut=True)
    return total


def _element_count_of_value(value: Value) -> int:
    return estimated_elements(value.type.shape)


def loop_work(ops: Mapping[Value, Op], anchors: Anchors, members: Sequence[Op], target: Target) -> RegionWork:
    """Return the work of a region that computes the results of ``members`` in one pass over its iteration space."""
    evaluations = EvaluationCounts(ops, anchors, target.kind == "cpu")
    roots = evaluations.anchored_places(v for op in members for v in op.results)
    return RegionWork(
        evaluations.count_operations(roots, _element_count_of_value(anchors.anchor)),
        work_of_separate_kernels(dict.fromkeys(ops.values())),
    )


def update_work(ops: Mapping[Value, Op], update: Op) -> RegionWork:
    """Return the work of a region that writes part of an array in place.

    Counted are the written elements, and for a scatter its indices, once for each written element.
    """
    parts = update.operands[1:2] if update.name != "scatter" else update.operands[update.attrs["inputs"] :]
    part = parts[-1]
    fused = EvaluationCounts(ops, None).count_operations(
        [(v, Place("update")) for v in parts], _element_count_of_value(part)
    )
    separate = work_of_separate_kernels(op for op in dict.fromkeys(ops.values()) if op is not update)
    return RegionWork(fused, separate)


def row_work(stages: RowStages, stored: Collection[Value]) -> RegionWork:
    """Return the work of a region with reductions that stores ``stored`` between its loops over a row."""
    anchors, ops = stages.anchors, stages.ops
    evaluations = EvaluationCounts(ops, anchors)
    places = _element_count_of_value(anchors.anchor)
    rows = -(-places // max(estimated_dim(stages.elements), 1))
    numbers = [v for v in ops if stages.is_row_scalar(v)]
    available: set[Value] = set()
    fused = 0
    for loop in stages.loops:
        roots = [(v, evaluations.place_at_index(anchors.reads[op])) for op in loop.ops for v in op.inputs]
        fused += evaluations.count_operations(
            [*roots, *evaluations.anchored_places(loop.stores)], places, {*numbers, *available}
        )
        fused += places * sum(map(combiner_work, loop.ops))
        available.update(v for v in stored if v in loop.cone)
    reduced = {v for v in numbers if ops[v].name == "reduce"}
    fused += evaluations.count_operations(
        evaluations.anchored_places(v for v in numbers if ops[v].name not in FREE), rows, reduced
    )
    return RegionWork(fused, work_of_separate_kernels(dict.fromkeys(ops.values())))


def values_between_loops(stages: RowStages, target: Target) -> dict[Value, int]:
    """Return the values that a region stores between its loops over a row, with their bytes.

    These are values that are expensive to compute twice. If the region still repeats too much work, cheaper values are
    stored too, as far as they fit.
    """
    return _stored_values_and_work(stages, target)[0]


def least_row_work(stages: RowStages, target: Target) -> RegionWork:
    """Return the work of a region with reductions that stores its :func:`values_between_loops`."""
    return _stored_values_and_work(stages, target)[1]


def _stored_values_and_work(stages: RowStages, target: Target) -> tuple[dict[Value, int], RegionWork]:
    """Return the values that a region stores between its loops, and its work: first without cheap values, then with."""

    def fit_worker(sizes: Sequence[int]) -> bool:
        return row_values_fit_worker(target, stages, sizes)

    stored = stages.values_to_store(fit_worker)
    work = row_work(stages, stored)
    if work.fits:
        return stored, work
    more = stages.values_to_store(fit_worker, cheap=True)
    return more, work if more == stored else row_work(stages, more)
