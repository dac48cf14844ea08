"""Outlining, the second part of fusion: make a private function of each group of ops.

Movement ops and small constants that several groups read are repeated in each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace

from aotc.ir.opset import CONTROL_FLOW, FREE, MOVES, OPS, PARTIAL, VIEWERS
from aotc.ir.opset.control import DEVICE_OPS, JUDGED
from aotc.ir.tensor.ir import Function, Op, Region, Value, post_order, values_captured_by_op
from aotc.lowering.analysis.anchors import Anchors
from aotc.lowering.analysis.in_place import updated_operands
from aotc.vmfb.ranks.layout import RANK_CALL


@dataclass(eq=False)
class Group:
    """A group of ops that will be outlined as a region."""

    number: int
    kind: str
    members: list[Op]
    anchors: Anchors | None = None
    before: int = 0  # bit set of groups that must run earlier
    after: dict[Group, None] = field(default_factory=dict)  # groups that read a result of this one
    reads: set[Value] = field(default_factory=set)  # values from outside that its members read
    absorbed: list[Op] = field(default_factory=list)


@dataclass
class Outliner:
    """Replaces the groups of one region by dispatches of outlined functions.

    Attributes
    ----------
    groups : list of Group
    group_of : dict of Op to Group
    makers : dict of Value to Op
        The op that defines each value, in this region and enclosing ones.
    outer : frozenset of Op
        The ops of enclosing regions.
    functions : dict of str to Function
        The functions of the module, whose names are taken.
    outlined : dict of str to Function
        The outlined functions; new ones are added.
    fuse_region : callable
        Fuses a region of an op: a loop, a branch, or the ops of a device.
    named : dict of str to Group
        The group of each outlined function; new ones are added.
    viewed : set of Value
        Operands of matmuls that are read in place, through movement ops.
    slices : set of Op
        Dynamic slices that their readers read in place, as if they were movement ops.
    """

    groups: list[Group]
    group_of: Mapping[Op, Group]
    makers: Mapping[Value, Op]
    outer: frozenset[Op]
    functions: Mapping[str, Function]
    outlined: dict[str, Function]
    fuse_region: Callable[[Op, Region], Region]
    named: dict[str, Group]
    viewed: Set[Value] = frozenset()
    slices: Set[Op] = frozenset()
    _read_outside: set[Value] = field(default_factory=set, init=False)

    def region_with_dispatches(self, region: Region) -> Region:
        """Return ``region`` with a dispatch in place of each group's ops."""
        live = [g for g in self.groups if g.members]
        outputs = self._group_outputs(region, live)
        ops: list[Op] = [op for op in region.ops if op not in self.group_of and self._is_outside_of_groups(op)]
        emitted = {g.number: self._dispatch_of_group(g, outputs[g.number]) for g in live}
        return Region(region.params, tuple(self._ops_in_dependence_order(region, ops, emitted)), region.results)

    def _is_outside_of_groups(self, op: Op) -> bool:
        """Return True if ``op`` stays outside of groups, as a buffer or a view: constants and some reshapes do."""
        if op.name == "constant":
            return True
        return op.name == "reshape" and op.result in self._read_outside

    def _group_outputs(self, region: Region, live: list[Group]) -> dict[int, list[Value]]:
        """Return, by group number, the values of a group that other groups, outer ops or the region's results read."""
        inside = {op: g for g in live for op in (*g.members, *g.absorbed)}
        read: set[Value] = set(region.results)
        by_group: dict[int, set[Value]] = {}
        for g in live:
            external = self._buffers_read_by_group(g)
            by_group[g.number] = set(external)
            read.update(external)
        stack = list(read)
        while stack:
            maker = self.makers.get(stack.pop())
            if maker is not None and maker not in inside and maker not in self.outer:
                stack += [v for v in maker.operands if v not in read]
                read.update(maker.operands)
        self._read_outside = read
        return {g.number: [v for op in g.members for v in op.results if v in read] for g in live}

    def _buffers_read_by_group(self, group: Group) -> list[Value]:
        """Return the buffers that the region of ``group`` reads, in order of first use."""
        inside = {*group.members, *group.absorbed}
        buffers: dict[Value, None] = {}
        seen: set[Value] = set()
        stack = [v for op in reversed(group.members) for v in reversed([*op.operands, *values_captured_by_op(op)])]
        while stack:
            v = stack.pop()
            if v in seen:
                continue
            seen.add(v)
            maker = self.makers.get(v)
            if maker is not None and maker in inside:
                stack += reversed([*maker.operands, *values_captured_by_op(maker)])
            elif maker is not None and self._is_copied_into_group(maker, v, group):
                stack += reversed(maker.operands)
            else:
                buffers[v] = None
        return list(buffers)

    def _is_copied_into_group(self, maker: Op, value: Value, group: Group) -> bool:
        """Return True if the movement op or small constant ``maker`` is duplicated in the group that reads it."""
        if maker in self.slices:
            return True
        if group.kind == "single" and not (group.members[0].name in VIEWERS and maker.name in MOVES):
            first = group.members[0]  # a scalar that its region reads becomes an immediate
            return maker.name == "constant" and value not in first.operands and value.type.shape == ()
        if group.kind == "contract" and value in group.members[0].operands and value not in self.viewed:
            return False
        if group.kind == "update" and value in _overwritten_operands_of(group.members[0]):
            return False
        if maker in self.group_of or maker.name not in FREE:
            return False
        if maker in self.outer and maker.name in MOVES:
            source = self.makers.get(maker.operands[0])
            return source is not None and source.name == "constant" and _is_splat_constant(source)
        return maker.name != "constant" or _is_splat_constant(maker)

    def _dispatch_of_group(self, group: Group, outputs: list[Value]) -> Op:
        """Outline the function of a group and return its dispatch; loops, branches and host waits stay ops."""
        first = group.members[0]
        if first.name in CONTROL_FLOW:
            inner = tuple(self.fuse_region(first, r) for r in first.regions)
            return replace(first, regions=inner)
        if first.name in JUDGED or first.name in DEVICE_OPS:
            return first
        inputs = self._buffers_read_by_group(group)
        name = f"k{len(self.outlined)}_{_region_label(group)}"
        while name in self.outlined or name in self.functions:
            name += "_"
        whole = group.kind in ("single", "update") and (first.name not in PARTIAL or not outputs)
        results = first.results if whole else tuple(outputs)
        ops = self._region_body(group, set(inputs))
        params = list(inputs)
        if group.kind in ("single", "update"):
            inputs, params, ops = _overwritten_params_first(first, inputs, ops)
        body = Region(tuple(params), tuple(ops), results)
        root = first.results[0].name if group.anchors else ""
        self.named[name] = group
        self.outlined[name] = Function(name, body, attrs={"kind": group.kind, "root": root}, loc=first.loc)
        return Op("dispatch", tuple(inputs), results, {"callee": name}, loc=first.loc)

    def _region_body(self, group: Group, inputs: set[Value]) -> list[Op]:
        """Return every op of the region in SSA order, including copied movement ops."""

        def operand_ops(op: Op) -> list[Op]:
            reads = (*op.operands, *values_captured_by_op(op))
            return [self.makers[v] for v in reversed(reads) if v in self.makers and v not in inputs]

        order = post_order((op for op in group.members if op.results), operand_ops)
        return [*order, *(op for op in group.members if not op.results)]

    def _ops_in_dependence_order(self, region: Region, loose: list[Op], emitted: dict[int, Op]) -> list[Op]:
        """Return dispatches and other ops in an order in which every value is defined before it is used."""
        position = {op: i for i, op in enumerate(region.ops)}
        ranked = [(position[op], op) for op in loose]
        ranked += [(max(position[m] for m in self.groups[n].members), op) for n, op in emitted.items()]
        ranked.sort(key=lambda t: t[0])
        makers = {v: op for _, op in ranked for v in op.results}

        def operand_ops(op: Op) -> list[Op]:
            return [makers[v] for v in (*op.operands, *values_captured_by_op(op)) if v in makers]

        return post_order((op for _, op in ranked), operand_ops)


def _overwritten_params_first(
    update: Op, inputs: list[Value], ops: list[Op]
) -> tuple[list[Value], list[Value], list[Op]]:
    """Reorder region parameters so that arrays overwritten by ``update`` come first, as in-place results need."""
    places = updated_operands(update)
    if not places:
        return inputs, inputs, ops
    old = _overwritten_operands_of(update)
    renamed_params = [Value(f"{v.name}_old{n}" if n else f"{v.name}_old", v.type) for n, v in enumerate(old)]
    renamed = dict(zip(places, renamed_params, strict=True))
    changed = replace(update, operands=tuple(renamed.get(n, v) for n, v in enumerate(update.operands)))
    read = {v for op in ops for v in (changed if op is update else op).operands}
    rest = [v for v in inputs if v not in old or v in read]
    return [*old, *rest], [*renamed_params, *rest], [changed if op is update else op for op in ops]


def _overwritten_operands_of(update: Op) -> list[Value]:
    return [update.operands[n] for n in updated_operands(update)]


def _is_splat_constant(op: Op) -> bool:
    return op.attrs["value"].size == 1


def _region_label(group: Group) -> str:
    """Return the word by which a kernel is named: its collective, its most significant op, or ``row``."""
    call = next((op.attrs["target"] for op in group.members if op.name == "custom_call"), "")
    if call.startswith(RANK_CALL):
        return call.removeprefix(RANK_CALL)
    names = [op.name for op in group.members if op.name not in FREE]
    hero = next((n for n in names if OPS[n].names_kernel), None)
    if group.kind == "row":
        return "row"
    return hero or (names[-1] if names else group.members[-1].name)
