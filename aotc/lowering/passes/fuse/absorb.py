"""Third part of fusion: merge a loop region into its only reader, which recomputes its values wherever it reads them.

Before::

    %7 = dispatch %1 {callee = "k0"}     // k0 holds exp
    %8 = dispatch %7, %2 {callee = "k1"} // k1 holds a product with its epilogue, which adds %7
After::

    %8 = dispatch %1, %2 {callee = "k1"} // k1 holds exp, too

The recomputation is counted (``region_work``), and a group stays separate if it would be too much.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from aotc.ir.dims.algebra import product
from aotc.ir.opset import FREE, OPS, SCALARS
from aotc.ir.opset.dim_attributes import dims_of
from aotc.ir.tensor.ir import Op, TensorType, Value, post_order, values_captured_by_op
from aotc.lowering.analysis.anchors import Anchors, anchors_of
from aotc.lowering.analysis.in_place import UpdatedArrays, updated_operands
from aotc.lowering.cost_model.machines import machine_of
from aotc.lowering.cost_model.row_stages import RowStages
from aotc.lowering.cost_model.work import estimated_dim
from aotc.lowering.passes.fuse.outline import Group
from aotc.lowering.passes.fuse.record import FusionRecord
from aotc.lowering.plans.region_work import RegionWork, least_row_work, loop_work, update_work
from aotc.lowering.plans.resources import row_memory, row_values_fit_worker
from aotc.lowering.plans.thresholds import REGION_BUFFERS, REGION_WORK, REPEATED_WORK
from aotc.lowering.threshold import Limit
from aotc.options import Options
from aotc.targets import Target, resolve_targets
from aotc.vmfb.dtypes import size_of

READS_LATE = "it would read an array after its update, so the array would have to be copied"

ABSORBING = {"loop", "row", "reduce", "window", "contract", "update"}


GPU_REGION_OPS = Limit(
    192,
    "ops of a fused region on a GPU",
    "Threefry with its counters fits; in two regions it would write and read all its words once more",
)
REGION_OPS = Limit(
    96,
    "ops of a fused region on a CPU",
    "lowering recurses over a region's ops (decision 28), and LLVM's time grows with its size",
)


@dataclass(frozen=True)
class RegionBudget:
    """Limits on the work and the memory of a group.

    Attributes
    ----------
    level : int
        The optimization level.
    target : Target
    makers : mapping of Value to Op
        The op that makes each value.
    group_of : mapping of Op to Group
        The group of each op. Movement ops have no group: each group that reads them has a copy.
    """

    level: int
    target: Target
    makers: Mapping[Value, Op]
    group_of: Mapping[Op, Group]

    @property
    def most_ops(self) -> Limit:
        """Return the limit on the number of ops of a region."""
        return GPU_REGION_OPS if self.target.kind == "cuda" else REGION_OPS

    def body(self, ops: Iterable[Op]) -> dict[Value, Op]:
        """Return the ops of a group by their results, in order, with copies of the movement ops that it reads."""
        inside = dict.fromkeys(ops)

        def operand_ops(op: Op) -> list[Op]:
            makers = [self.makers.get(v) for v in reversed((*op.operands, *values_captured_by_op(op)))]
            return [m for m in makers if m and (m in inside or (m.name in FREE and m not in self.group_of))]

        return {v: op for op in post_order(inside, operand_ops) for v in op.results}

    def refuses_member(self, members: Sequence[Op], anchors: Anchors) -> str:
        """Return the reason why ``members`` cannot be a region with reductions, or an empty string."""
        return self._row_region_refusal(self.body(members), members, anchors)

    def refuses_absorbed(self, group: Group, reader: Group) -> str:
        """Return the reason why ``reader`` cannot also compute ``group``, or an empty string."""
        members = reader.members
        ops = self.body([*group.absorbed, *group.members, *reader.absorbed, *members])
        if reader.kind in ("row", "reduce"):
            return self._row_region_refusal(ops, members, anchors_of(members[0], list(dict.fromkeys(ops.values()))))
        if reader.kind == "update" or reader.anchors is None:
            work = update_work(ops, members[0])
        else:
            work = loop_work(ops, reader.anchors, members, self.target)
            if reader.kind in ("loop", "window") and self._saves_memory(group, work, reader.anchors):
                return ""
        return "" if work.fits else _too_much_work_reason(work)

    def _saves_memory(self, group: Group, work: RegionWork, anchors: Anchors) -> bool:
        """Return True if on a GPU a separate kernel that stores the group's results would take longer."""
        again, elements = work.fused - work.separate, estimated_dim(product(anchors.anchor.type.shape))
        cheap = REPEATED_WORK.holds(again // max(elements, 1)) or self.consists_of_pads(group)
        if self.target.kind != "cuda" or not cheap:
            return False
        machine = machine_of(self.target)
        stored = sum(
            estimated_dim(product(v.type.shape)) * size_of(v.type.dtype) for op in group.members for v in op.results
        )
        move = 2 * stored / machine.level_of(stored).rate
        return again / machine.vector <= machine.launch + move

    def consists_of_pads(self, group: Group) -> bool:
        """Return True if a group on a GPU consists only of pads, which cost nothing beside the memory reads."""
        return self.target.kind == "cuda" and all(op.name == "pad" for op in (*group.members, *group.absorbed))

    def _row_region_refusal(self, ops: Mapping[Value, Op], members: Sequence[Op], anchors: Anchors) -> str:
        """Return the reason why a worker cannot compute rows with ``members``, or an empty string."""
        read = {v for op in members for v in op.operands}
        stored = [v for op in members for v in op.results if v not in read and not anchors.is_row(v)]
        stages = RowStages(ops, anchors, stored)
        work = least_row_work(stages, self.target)
        if work.fits:
            return ""
        needed = [*stages.values_to_store(lambda sizes: True, cheap=True).values()]
        if not needed or row_values_fit_worker(self.target, stages, needed):
            return _too_much_work_reason(work)
        where, limit = row_memory(self.target, stages)
        reason = _too_much_work_reason(work)
        return f"{sum(needed):,} bytes of a row > {limit:,} bytes of {where}, and without them {reason}"


REPEATED_WORK_O3 = Limit(
    16,
    "scalar operations per element that a reader may recompute, at -O3",
    "one expensive operation (work 16 in the op table) may be computed twice",
)
STAGE_WORK = Limit(
    4,
    "scalar operations per element that each stage of a row recomputes",
    "more expensive values are computed once, into a row of scratch memory (REPEATED_STAGE_WORK)",
)


@dataclass(frozen=True)
class GroupAbsorber:
    """Merges loop groups into the groups that are their only readers.

    Attributes
    ----------
    readers : mapping of Value to sequence of Op
        The ops of groups that read each value, directly or through movement ops.
    needed : set of Value
        The values that must exist in memory.
    budget : Budget
    record : FusionRecord
    widened : set of Value
        The values that matmuls compute as they read them.
    updated : UpdatedArrays
    """

    readers: Mapping[Value, Sequence[Op]]
    needed: Set[Value]
    budget: RegionBudget
    record: FusionRecord
    widened: Set[Value]
    updated: UpdatedArrays

    def absorb_groups(self, groups: Sequence[Group], group_of: dict[Op, Group]) -> None:
        """Merge groups into their only readers where recomputation is cheaper, last ones first.

        ``group_of`` is updated.
        """
        for group in reversed(groups):
            reader = self._only_reader_of_group(group, group_of) if group.kind == "loop" else None
            if reader is None:
                continue
            ops = [*group.members, *group.absorbed]
            if self.record.record_decision(ops, reader, self.refusal(group, reader), "only this region reads it"):
                self.record.absorbed[group] = reader
                reader.absorbed += ops
                group_of.update(dict.fromkeys(ops, reader))
                group.members, group.absorbed = [], []

    def _only_reader_of_group(self, group: Group, group_of: Mapping[Op, Group]) -> Group | None:
        """Return the group that alone reads the results of ``group`` and can compute them, or None."""
        results = [v for op in group.members for v in op.results]
        if any(v in self.needed for v in results):
            return None
        pairs = {(v, g) for v in results for op in self.readers.get(v, ()) if (g := group_of[op]) is not group}
        reading = {g for _, g in pairs}
        if len(reading) != 1:
            return None
        (reader,) = reading
        # a loop that reads it twice would be part of it, unless a gather reads it as places, too
        several = {"update", "loop"} if self.budget.target.kind == "cuda" else {"update"}
        if len(pairs) > 1 and reader.kind not in several and not self._reads_in_place(results, reader):
            return None
        return reader if reader.kind in ABSORBING else None

    def _reads_in_place(self, values: Sequence[Value], reader: Group) -> bool:
        """Return True if a loop reads a group's values only in elementwise ops of the same shape: nothing is repeated.

        Such a loop is a separate group if its other operand is from a group that was opened later.
        """
        if reader.kind != "loop":
            return False
        read = [(v, op) for v in values for op in self.readers.get(v, ())]
        return all(op.name in SCALARS and v in op.operands and v.type.shape == op.result.type.shape for v, op in read)

    def refusal(self, group: Group, reader: Group) -> str:
        """Return the reason why recomputing ``group`` in its reader is worse than storing it, or an empty string."""
        count = len(group.members) + len(group.absorbed) + len(reader.members) + len(reader.absorbed)
        if not self.budget.most_ops.holds(count):
            return f"{count} ops > {self.budget.most_ops.value}"
        ops = [*group.members, *group.absorbed, *reader.members, *reader.absorbed]
        buffers = self._buffers_read_by(ops)
        if not REGION_BUFFERS.holds(buffers):
            return f"{buffers} buffers > {REGION_BUFFERS.value}"
        results = {v for op in group.members for v in op.results}
        first = reader.members[0]
        if reader.kind == "update" and any(first.operands[n] in results for n in updated_operands(first)):
            return "it is updated in place"
        if reader.kind == "update" and self._reads_updated(group, first):
            return "it reads what is updated, which would have to be copied"
        updates = self.updated.updates_after_reads(ops, group.members[-1].results[0].type)
        # reader.before) | Bit n of ``before`` is set if group n must run first.
        if any((group.before | reader.before) >> self.budget.group_of[u].number & 1 for u in updates):
            return READS_LATE
        if reader.kind == "contract" and not results & set(reader.members[0].operands) <= self.widened:
            return "a product reads it many times"
        if reader.kind == "row" and self.budget.target.kind == "cpu" and self._has_strided_reads(group, reader):
            return "each row of many would read it with strides"
        frame = self.budget.consists_of_pads(group) and reader.kind in ("loop", "window")
        if reader.kind != "update" and not frame:
            repeated = self._repeated_operations(group, reader)
            limit = REPEATED_WORK if self.budget.level < 3 else REPEATED_WORK_O3
            if not limit.holds(repeated):
                return f"{repeated} scalar operations per element would be repeated > {limit.value}"
        return self.budget.refuses_absorbed(group, reader)

    def _reads_updated(self, group: Group, update: Op) -> bool:
        """Return True if a group reads a small part of an array that ``update``, or an update before it, overwrites."""
        updated: set[Value] = set()
        left = [update.operands[n] for n in updated_operands(update)]
        while left:
            v = left.pop()
            updated.add(v)
            if (maker := self.budget.makers.get(v)) is not None and v in maker.results[: len(updated_operands(maker))]:
                left.append(maker.operands[updated_operands(maker)[maker.results.index(v)]])
        own_elements, whole = (_element_count_of_type(v.type) for v in (group.members[-1].result, update.operands[0]))
        small = own_elements is not None and whole is not None and own_elements < whole
        ops = self.budget.body([*group.absorbed, *group.members]).values()
        return small and any(v in updated for op in ops for v in op.operands)

    def _has_strided_reads(self, group: Group, reader: Group) -> bool:
        """Return True if the group is a transpose that a reader of several rows would read with strides."""
        last = group.members[-1]
        if last.name != "transpose" or last.operands[0].type.shape[-1] == 1:
            return False
        written, read = (
            _element_count_of_type(last.result.type),
            _element_count_of_type(reader.members[0].operands[0].type),
        )
        moved = last.attrs["perm"][-1] != last.result.type.rank - 1
        return moved and written is not None and read is not None and read > written

    def _repeated_operations(self, group: Group, reader: Group) -> int:
        """Return the scalar operations per element that a reader repeats if it recomputes ``group``."""
        cost = sum(op.attrs.get("work", OPS[op.name].work) for op in group.members + group.absorbed)
        written = _element_count_of_type(group.members[-1].result.type)
        anchor = reader.anchors.anchor if reader.anchors else reader.members[0].results[0]
        read = _element_count_of_type(anchor.type)
        repeats = 1 if written is None or read is None else max(1, -(-read // max(written, 1)))
        if reader.kind == "window":
            repeats = estimated_dim(product(dims_of(reader.members[0].attrs, "window")))
        if reader.kind == "row":
            levels = max(reader.anchors.levels.values()) + 1 if reader.anchors else 1
            repeats *= levels if STAGE_WORK.holds(cost) else 1
        return cost * (repeats - 1)

    def _buffers_read_by(self, ops: list[Op]) -> int:
        inside = set(ops)
        return len({v for m in inside for v in m.operands if self.budget.makers.get(v) not in inside})


def _too_much_work_reason(work: RegionWork) -> str:
    """Return the reason for the refusal of a region that would do too much work."""
    share = f"{work.percent_of_separate} % of {work.separate} in separate kernels"
    return f"{work.fused} scalar operations, {share} > {REGION_WORK.value} %"


def fusion_target(options: Options) -> Target:
    """Return the target for whose limits fusion sizes its regions, adjusted by the options."""
    return resolve_targets(options.target)[0].with_limits(options.stack_limit, options.shared_memory_limit)


def _element_count_of_type(type_: TensorType) -> int | None:
    n = product(type_.shape)
    return n if isinstance(n, int) else None
