"""Fusion: group ops into regions and outline each as a private function.

Before::

    %2 = exp %1          %5 = reduce %2 {dims = (1,)} (add)     %7 = div %2, %6
After::

    %7 = dispatch %1 {callee = "k0"}     // k0 holds exp, reduce, broadcast, div; kind = row

Ops are visited in order. Each op joins the latest region that computes one of its operands, if the region's iteration
space covers it (``anchors``) and no cycle arises. Otherwise the op opens a region. A loop that only this op reads is
tried last, as it can be absorbed later. Movement ops are copied into their readers. Then a loop region with a single
reader is merged into that (``absorb``), and regions on a GPU recompute large values that several of them read, if that
is cheaper than storing them (``recompute``).

Until it is outlined, a region is called a *group*. Kinds of region: ``loop``, ``row`` (reductions over trailing axes,
several stages), ``reduce`` (over leading axes), ``window``, ``contract`` (a matmul with its epilogue) and ``single``
(an op with its own lowering).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import replace

from aotc.ir.dims.algebra import is_static, product
from aotc.ir.opset import CONTRACT, CONTROL_FLOW, ELEMENTWISE, FREE, INLINE, PERMUTATIONS, SCALARS, VIEWERS
from aotc.ir.opset.control import JUDGED
from aotc.ir.tensor.ir import Function, Module, Op, Region, TensorType, Value, captured_values, values_captured_by_op
from aotc.lowering.analysis.anchors import Anchors
from aotc.lowering.analysis.in_place import UpdatedArrays, updated_operands
from aotc.lowering.analysis.index_maps import value_before_movement
from aotc.lowering.analysis.parallel_scatters import is_parallel_scatter
from aotc.lowering.analysis.prefix_scans import scan_of
from aotc.lowering.cost_model.measured_work import with_measured_work
from aotc.lowering.passes.fuse.absorb import READS_LATE, GroupAbsorber, RegionBudget, fusion_target
from aotc.lowering.passes.fuse.outline import Group, Outliner
from aotc.lowering.passes.fuse.recompute import CheapValueRecomputer
from aotc.lowering.passes.fuse.record import FusionRecord
from aotc.lowering.plans.fusion_wait import RegionShare, refuses_to_wait, region_share, single_worker_nanoseconds
from aotc.lowering.plans.operand_views import OperandViews, has_aligned_rows, operand_views
from aotc.lowering.plans.thresholds import REGION_BUFFERS, STRIDED_BYTES
from aotc.lowering.threshold import Limit
from aotc.options import Options
from aotc.vmfb.dtypes import size_of

UPDATE = "dynamic_update_slice"


def is_update(op: Op, kind: str, level: int) -> bool:
    """Return True if ``op`` writes part of an array and, on this kind of target, may compute the written values too."""
    return level > 0 and (op.name == UPDATE or (kind == "cuda" and is_parallel_scatter(op)))


def fuse(module: Module, options: Options) -> Module:
    """Outline fused regions in every function: the fusion pass."""
    return fuse_recorded(module, options, FusionRecord())


def fuse_recorded(module: Module, options: Options, record: FusionRecord) -> Module:
    """Run the fusion pass and add its decisions to ``record``."""
    module = with_measured_work(module, options)
    outlined: dict[str, Function] = {}
    changed = {}
    for function in module.functions.values():
        body = _FusionGrouper(options, module.functions, outlined, {}, record).region_of_dispatches(function.body)
        changed[function.name] = replace(function, body=body)
    return Module({**changed, **outlined}, module.name)


def needs_buffer(
    ops: Iterable[Op], results: Iterable[Value], makers: Mapping[Value, Op], viewed: OperandViews, kind: str,
    level: int,
) -> set[Value]:  # fmt: skip
    """Return the values that must be stored in memory because some reader cannot compute them inline.

    ``kind`` is the kind of target, ``level`` the optimization level.
    """
    needed: set[Value] = {*results, *viewed.sources}
    for op in ops:
        if is_update(op, kind, level):
            needed.update(op.operands[n] for n in updated_operands(op))
        elif op.name in VIEWERS:
            copied = {v for v in op.operands if kind == "cuda" and not has_aligned_rows(v, makers)}
            needed.update(
                x
                for v in op.operands
                for x in ([v] if v in copied else _stored_values_behind(v, makers, viewed.slices))
            )
        elif op.name in CONTRACT or op.name in CONTROL_FLOW or not _reads_inline(op):
            needed.update(v for v in op.operands if op.name not in CONTRACT or v not in viewed.operands)
        for r in op.regions:
            if op.name in CONTROL_FLOW:
                needed.update(captured_values(r))
    stack = list(needed)
    while stack:
        op_ = makers.get(stack.pop())
        if op_ is not None and op_.name == "reshape" and op_.operands[0] not in needed:
            needed.add(op_.operands[0])
            stack.append(op_.operands[0])
    return needed


def _stored_values_behind(v: Value, makers: Mapping[Value, Op], slices: Set[Op]) -> Iterator[Value]:
    """Yield the stored values for a read of ``v`` through movement ops and ``slices``: an array, and slice starts."""
    v = value_before_movement(v, makers)
    while (op := makers.get(v)) is not None and op in slices:
        yield from (value_before_movement(start, makers) for start in op.operands[1:])
        v = value_before_movement(op.operands[0], makers)
    yield v


def _reads_inline(op: Op) -> bool:
    """Return True if ``op`` can compute its operands where it reads them, so that they need no memory."""
    return op.name in INLINE or op.name == "reduce" or (op.name == "reduce_window" and scan_of(op) is None)


REPEATED_MOVES = Limit(
    16,
    "consecutive movement ops that are fused into their readers",
    "every reader composes all of them into its index, by recursion (decision 28)",
)


class _FusionGrouper:
    """Group the ops of one region; each group becomes a kernel."""

    def __init__(
        self, options: Options, functions: Mapping[str, Function], outlined: dict[str, Function],
        outer: Mapping[Value, Op], record: FusionRecord,
    ) -> None:  # fmt: skip
        """Start without groups; ``outer`` has the definitions of values from outside of the region.

        ``outlined`` collects the functions of regions by name, ``record`` the reasons for decisions.
        """
        self.options, self.functions, self.outlined = options, functions, outlined
        self.level, self.record = options.opt_level, record
        self.makers: dict[Value, Op] = dict(outer)
        self.outer = frozenset(outer.values())
        self.groups: list[Group] = []
        self.group_of: dict[Op, Group] = {}
        self._times: dict[Group, tuple[int, float]] = {}  # with the number of members counted
        self.budget = RegionBudget(options.opt_level, fusion_target(options), self.makers, self.group_of)

    def region_of_dispatches(self, region: Region) -> Region:
        """Return ``region`` with its ops grouped into dispatches.

        Ops at which the host waits for memory are barriers: ops before and after them are fused separately.
        """
        if any(op.name in JUDGED for op in region.ops):
            return self._fuse_between_host_waits(region)
        self.makers.update((v, op) for op in region.ops for v in op.results)
        self.users: dict[Value, list[Op]] = {}
        for op in region.ops:
            for v in op.operands:
                self.users.setdefault(v, []).append(op)
        self.updated = UpdatedArrays(region.ops)
        self.views = operand_views(region.ops, region.results, self.budget.target, self.level)
        kind = self.budget.target.kind
        self.needed = needs_buffer(region.ops, region.results, self.makers, self.views, kind, self.level)
        moves: dict[Value, int] = {}  # consecutive movement ops that every reader of a value repeats
        for op in region.ops:
            count = 1 + max((moves.get(v, 0) for v in op.operands), default=0)
            if self._belongs_to_group(op) or (
                not REPEATED_MOVES.holds(count) and op.name in FREE and op.name != "reshape"
            ):
                self._join_or_open_group(op)
            elif op.operands:
                moves[op.result] = count
        if self.level >= 2:
            readers: dict[Value, list[Op]] = {}
            for op in self.group_of:
                for v in self._group_values_behind(list(op.operands)):
                    readers.setdefault(v, []).append(op)
            absorber = GroupAbsorber(readers, self.needed, self.budget, self.record, self.views.operands, self.updated)
            absorber.absorb_groups(self.groups, self.group_of)
            CheapValueRecomputer(absorber, self.group_of).recompute_cheap_values(self.groups)
        outer, taken = self.outer, self.functions
        outliner = Outliner(
            self.groups,
            self.group_of,
            self.makers,
            outer,
            taken,
            self.outlined,
            self._fuse_inner_region,
            self.record.groups,
            self.views.operands,
            self.views.slices,
        )
        return outliner.region_with_dispatches(region)

    def _fuse_inner_region(self, op: Op, region: Region) -> Region:
        """Fuse a region of ``op``, for the target of its device if it has one."""
        target = self.options.devices.get(op.attrs.get("device", ""), self.options.target)
        options = replace(self.options, target=target)
        return _FusionGrouper(options, self.functions, self.outlined, self.makers, self.record).region_of_dispatches(
            region
        )

    def _fuse_between_host_waits(self, region: Region) -> Region:
        """Fuse separately the ops between two ops at which the host waits for memory."""
        makers = dict(self.makers)
        ops: list[Op] = []
        begin = 0
        for end in [*(n for n, op in enumerate(region.ops) if op.name in JUDGED), len(region.ops)]:
            part, rest = region.ops[begin:end], region.ops[end:]
            later = {*region.results, *(v for op in rest for v in (*op.operands, *values_captured_by_op(op)))}
            results = tuple(v for op in part for v in op.results if v in later)
            fuser = _FusionGrouper(self.options, self.functions, self.outlined, makers, self.record)
            ops += fuser.region_of_dispatches(Region(region.params, part, results)).ops
            ops += rest[:1]
            makers.update((v, op) for op in part for v in op.results)
            begin = end + 1
        return Region(region.params, tuple(ops), region.results)

    # --- which ops become part of a group ---

    def _belongs_to_group(self, op: Op) -> bool:
        """Return True if ``op`` joins a group; constants, reshapes and cheap moves are copied to readers."""
        if op.name == "constant":  # one of unknown size cannot be in the bundle: a kernel fills it
            return op.result in self.needed and not is_static(op.result.type.shape)
        if op.name == "reshape" or (op.name == "dim"):
            return op.name == "dim" and op.result in self.needed
        if op in self.views.slices:
            return False
        if op.name in FREE:
            is_stored = op.result in self.needed or self.level == 0
            return is_stored or (
                op.name == "transpose"
                and op not in self.views.moves
                and _moves_last_dim(op)
                and _is_large_type(op.result.type)
            )
        return True

    def _join_or_open_group(self, op: Op) -> None:
        """Put ``op`` into the group of an operand if its kind allows it, else into a new group."""
        if op.name in CONTRACT:
            self._open_group(op, "contract")
        elif op.name == "reduce":
            if not self._join_group(op):
                self._open_reduce(op)
        elif op.name == "reduce_window":
            self._open_group(op, "single" if scan_of(op) else "window")
        elif is_update(op, self.budget.target.kind, self.level):
            self._open_group(op, "update")
        elif op.name in INLINE:
            if not self._join_group(op):
                self._open_group(op, "loop")
        else:
            self._open_group(op, "single")

    def _open_group(self, op: Op, kind: str) -> None:
        """Open a group of a kind with ``op`` as its first member."""
        group = Group(len(self.groups), kind, [op])
        if kind not in ("single", "update"):
            group.anchors = Anchors(op, self.makers)
        self.groups.append(group)
        self._add_to_group(group, op, self._source_groups(op))

    def _open_reduce(self, op: Op) -> None:
        """Open a region for a reduction; it iterates over the reduction's operand."""
        anchors = Anchors(op, self.makers)
        if op in anchors.reads:
            group = Group(len(self.groups), _reduce_kind(anchors), [op], anchors)
        else:
            group = Group(len(self.groups), "single", [op])
        self.groups.append(group)
        self._add_to_group(group, op, self._source_groups(op))

    def _add_to_group(self, group: Group, op: Op, sources: list[Group]) -> None:
        """Add ``op``, which reads results of ``sources``, to ``group``."""
        self.group_of[op] = group
        group.reads.update(v for v in op.operands if self._is_computed_outside(v, group))
        for source in sources:
            if source is not group:
                source.after[group] = None
        before = _groups_that_run_before(group, sources)
        stack = [group]
        while stack:  # also for all groups after it
            later = stack.pop()
            if before & ~later.before:
                later.before |= before
                stack += later.after

    def _is_computed_outside(self, v: Value, group: Group) -> bool:
        """Return True if no op of ``group`` computes ``v``."""
        maker = self.makers.get(v)
        return maker is None or self.group_of.get(maker) is not group

    def _source_groups(self, op: Op) -> list[Group]:
        """Return the groups whose results ``op`` reads, directly or through movement ops, the latest first."""
        return self._groups_behind([*op.operands, *values_captured_by_op(op)])

    def _groups_behind(self, stack: list[Value]) -> list[Group]:
        groups = {self.group_of[self.makers[v]] for v in self._group_values_behind(stack)}
        return sorted(groups, key=lambda group: group.number, reverse=True)

    def _group_values_behind(self, stack: list[Value]) -> set[Value]:
        """Return the values of groups on which the values in ``stack`` depend, also through movement ops."""
        values: set[Value] = set()
        seen: set[Value] = set()
        while stack:
            v = stack.pop()
            maker = self.makers.get(v)
            if v in seen or maker is None or maker in self.outer:
                continue
            seen.add(v)
            if maker in self.group_of:
                values.add(v)
            else:
                stack += maker.operands
        return values

    # --- joining ---

    def _join_group(self, op: Op) -> bool:
        """Add ``op`` to the latest suitable group that computes an operand; return False if none is suitable."""
        if self.level == 0 or (self.level == 1 and op.name not in SCALARS):
            return False
        if op.name != "reduce" and op.name not in ELEMENTWISE and op.name not in PERMUTATIONS:
            return False
        sources = self._source_groups(op)
        candidates = [group for group in sources if group.anchors is not None]
        if len(candidates) > 1 and all(group.kind == "loop" for group in candidates):
            candidates.sort(key=lambda group: self._is_only_reader(op, group))
        return any(self._try_to_join(op, group, sources) for group in candidates)

    def _is_only_reader(self, op: Op, group: Group) -> bool:
        """Return True if only ``op`` reads ``group``, so that the region of ``op`` may absorb it."""
        results = [v for member in group.members for v in member.results]
        if self.level < 2 or not self.needed.isdisjoint(results):
            return False
        return all(user is op or self.group_of.get(user) is group for v in results for user in self.users.get(v, ()))

    def _try_to_join(self, op: Op, group: Group, sources: list[Group]) -> bool:
        """Add ``op`` to ``group`` if nothing refuses it; return True if it was added."""
        trial = group.anchors.copy()  # type: ignore[union-attr]
        refusal = self._join_refusal(op, group, sources, trial)
        if not self.record.record_decision([op], group, refusal, "computed in the loop of its operand"):
            return False
        if trial.reduced is not None:
            group.kind = _reduce_kind(trial)
        group.anchors = trial
        group.members.append(op)
        self._add_to_group(group, op, sources)
        return True

    def _join_refusal(self, op: Op, group: Group, sources: list[Group], trial: Anchors) -> str:
        """Return the reason why ``op`` cannot join ``group``, or an empty string; extend ``trial`` by ``op``."""
        if not self.budget.most_ops.holds(len(group.members) + 1):
            return f"{len(group.members) + 1} ops > {self.budget.most_ops.value}"
        if self.level == 1 and group.kind != "loop":
            return "only loops take ops at -O1"
        if op.name == "reduce" and group.kind not in ("loop", "row", "reduce"):
            return f"a reduction cannot join a region of kind {group.kind}"
        # Bit n of these integers is set if group n must run first.
        if _groups_that_run_before(group, sources) >> group.number & 1:
            return "another operand needs its results first"
        earlier = group.before | _groups_that_run_before(group, sources)
        updates = self.updated.updates_after_reads((*group.members, op), op.results[0].type)
        if any(earlier >> self.group_of[u].number & 1 for u in updates if u in self.group_of):
            return READS_LATE
        if self._has_strided_writes(op, group):
            return "it would be written with other elements of the group's in between"
        buffers = len(group.reads) + sum(self._is_computed_outside(v, group) for v in set(op.operands) - group.reads)
        if not REGION_BUFFERS.holds(buffers):
            return f"{buffers} buffers > {REGION_BUFFERS.value}"
        if not trial.extend(op, {*group.members, op}) or not self._reads_at_known_indices(op, group, trial):
            return "it reads at another place than the region's loops are"
        waits = self._wait_refusal(op, group, sources)
        if waits or trial.reduced is None:
            return waits
        level = max(trial.levels[v] for v in op.results)
        if _reduce_kind(trial) == "reduce":
            if not all(trial.levels[v] == 0 or trial.is_row(v) for v in op.results):
                return "columns are complete only when their loop ends"
            if level > 1 and op.name == "reduce":
                return "a reduction over columns has one stage"
        return self.budget.refuses_member([*group.members, op], trial) if level else ""

    def _has_strided_writes(self, op: Op, group: Group) -> bool:
        """Return True if ``op`` is a transpose on a CPU whose writes in the operand's loops would be far apart."""
        transposes = op.name == "transpose" and _moves_last_dim(op) and _is_large_type(op.result.type)
        return transposes and group.kind in ("loop", "window") and self.budget.target.kind == "cpu"

    def _wait_refusal(self, op: Op, group: Group, sources: list[Group]) -> str:
        """Return the reason why ``group`` should not wait for the other operands of ``op``, or an empty string."""
        later = _groups_that_run_before(group, sources) & ~group.before
        if not later or self.budget.target.kind != "cpu":  # a GPU runs regions one after the other anyway
            return ""
        others = (self._share_of_region(self.groups[n]) for n in _numbers_in_bit_set(later))
        return refuses_to_wait(op, self._share_of_region(group), others, self.budget.target)

    def _share_of_region(self, group: Group) -> RegionShare:
        """Return the bytes and operations of a group; only members added since the last call are counted again."""
        counted, nanoseconds = self._times.get(group, (0, 0.0))
        nanoseconds += single_worker_nanoseconds(group.members[counted:], self.budget.target)
        self._times[group] = len(group.members), nanoseconds
        return region_share(nanoseconds, group.anchors, group.kind)

    def _reads_at_known_indices(self, op: Op, group: Group, trial: Anchors) -> bool:
        """Return True if ``op`` reads its operands from ``group`` at known indices, and none as an initial value."""
        members = {*group.members, op}
        inputs = op.inputs if op.name == "reduce" else op.operands
        for n, v in enumerate(op.operands):
            mapped = n < len(inputs) and trial.index_needed_for(v, members) is not None
            if not mapped and group in self._groups_behind([v]):
                return False
        return True


def _groups_that_run_before(group: Group, sources: list[Group]) -> int:
    """Return, as a bit set, the groups that must run before ``group`` if it reads results of ``sources``."""
    bits = 0
    for source in sources:
        if source is not group:
            bits |= source.before | 1 << source.number
    return bits


def _numbers_in_bit_set(bits: int) -> Iterator[int]:
    """Yield the numbers in a bit set."""
    while bits:
        yield bits.bit_length() - 1
        bits ^= 1 << (bits.bit_length() - 1)


def _reduce_kind(anchors: Anchors) -> str:
    """Return the kind ``row`` if the reduced axes are the trailing ones, else ``reduce``."""
    real = [k for k, e in enumerate(anchors.space) if e != 0]
    reduced = anchors.reduced or frozenset()
    return "row" if real[len(real) - len(reduced) :] == sorted(reduced) else "reduce"


def _moves_last_dim(op: Op) -> bool:
    perm = op.attrs["perm"]
    moved = [p for p in perm if op.operands[0].type.shape[p] != 1]
    return bool(moved) and moved[-1] != max(moved)


def _is_large_type(type_: TensorType) -> bool:
    """Return True if an array of this type exceeds the size above which strided writes are slow."""
    return not STRIDED_BYTES.holds(product(type_.shape) * size_of(type_.dtype))
