"""Assign a device to each value and each op by propagation from the devices that the model names.

The model names devices by the affinities of arguments and results, and by ``transfer`` ops. Devices propagate:

- *forward*: an op runs on the device with most bytes of its operands, and its results are there;
- *backward*: an argument without affinity, or an op on constants only, is on the device of its first reader;
- *around*: an op that only depends on itself, such as the counter of a loop, is on the device of the loop's other ops.

Constants, and cheap ops on constants alone, have no device: each device that reads them has its own copy. A carried
value of a loop is on the device of its initial value, a result of a branch on that of the first branch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from aotc.diagnostics import size_text
from aotc.ir.opset import CONTROL_FLOW, EXPENSIVE, INLINE, MOVES, SOURCES
from aotc.ir.opset.control import JUDGED
from aotc.ir.tensor.ir import Function, Op, Region, Value, captured_values, walk
from aotc.lowering.cost_model.model import Costs
from aotc.lowering.cost_model.op_time import size_in_bytes
from aotc.lowering.placement.heft import heft, ops_placed_together
from aotc.targets import Target

DEFAULTED = "default device"
OF_MEMORY = "arguments are in the memory of the device, if nothing is said"
OF_RESULT = "affinity of the result"
OF_TARGET = "the target"


@dataclass(frozen=True, slots=True)
class Placement:
    """Devices of the values and ops of a function, with reasons.

    Attributes
    ----------
    values, ops : mapping
        The device of each value and op. Constants, and values computed from them alone, are in neither.
    reasons : mapping of Op or Value to str
    candidates : mapping of Op or Value to tuple of str
        The devices from which the deciding rule chose.
    unplaced : tuple of Op or Value
        The arguments and ops for which no rule decides.
    """

    values: Mapping[Value, str]
    ops: Mapping[Op, str]
    reasons: Mapping[Op | Value, str]
    candidates: Mapping[Op | Value, tuple[str, ...]]
    unplaced: tuple[Op | Value, ...]


def place_function(
    function: Function, default: str = "", targets: Mapping[str, Target] | None = None, costs: Costs | None = None,
    arguments: str = "", decided: Mapping[Op | Value, tuple[str, str]] = MappingProxyType({}),
) -> Placement:  # fmt: skip
    """Assign devices to the values and ops of ``function``.

    Parameters
    ----------
    function : Function
    default : str
        The device for arguments and ops for which no rule decides; an empty string leaves them unplaced.
    targets : mapping of str to Target, optional
        The targets of the devices by name. With ``costs``, large ops are placed first by :mod:`.heft`.
    costs : Costs, optional
    arguments : str
        The device of arguments without an affinity; an empty string places these like ops, by their readers.
    decided : mapping of Op or Value to (str, str)
        Devices, with reasons, that are decided beforehand.
    """
    solver = _DevicePropagation(function)
    for thing, (device, reason) in decided.items():
        solver.assign_device(thing, device, reason)
    for v in function.body.params if arguments else ():
        if not solver.device_of(v):
            solver.assign_device(v, arguments, OF_MEMORY)
    for large, match in heft(function, targets, costs).items() if targets and costs else ():
        for op in ops_placed_together(large):
            if solver.is_placed_work(op):
                solver.assign_device(op, match.device, match.reason, targets or ())
    solver.propagate_devices()
    if default:
        for kind in (Value, Op):  # arguments first, since ops follow their operands
            for thing in [t for t in solver.unplaced() if isinstance(t, kind)]:
                solver.assign_device(thing, default, DEFAULTED)
            solver.propagate_devices()
    values = {v: device for v in solver.placeable_values() if (device := solver.device_of(v))}
    return Placement(values, solver.ops, solver.reasons, solver.candidates, tuple(solver.unplaced()))


def named_devices(function: Function) -> Iterator[str]:
    """Yield the device of each affinity and ``transfer`` in a function."""
    for affinities in function.attrs.get("affinity", {}).values():
        yield from filter(None, affinities)
    yield from (op.attrs["device"] for op in walk(function.body) if op.name == "transfer")


def replicated_ops(region: Region) -> dict[Op, None]:
    """Return the ops that are replicated on each device that reads them: constants, and cheap ops on these alone."""
    replicated: dict[Op, None] = {}
    available: set[Value] = set()
    regions = [region]
    while regions:
        for op in regions.pop().ops:
            if op.name in CONTROL_FLOW:
                regions += op.regions
            elif op.name in SOURCES or (_is_cheap_to_replicate(op) and available.issuperset(op.operands)):
                replicated[op] = None
                available.update(op.results)
    return replicated


def _is_cheap_to_replicate(op: Op) -> bool:
    return (op.name in INLINE or op.name in MOVES) and op.name not in EXPENSIVE and not op.regions


@dataclass
class _DevicePropagation:
    """Propagation of devices through the values and ops of one function.

    Values in ``same`` are aliases: the params of a loop's regions have the device of the loop's result.
    """

    function: Function
    device: dict[Value, str] = field(default_factory=dict)
    ops: dict[Op, str] = field(default_factory=dict)
    reasons: dict[Op | Value, str] = field(default_factory=dict)
    candidates: dict[Op | Value, tuple[str, ...]] = field(default_factory=dict)
    same: dict[Value, Value] = field(default_factory=dict)
    free: set[Value] = field(default_factory=set)
    readers: dict[Value, list[Op | Value | str]] = field(default_factory=dict)
    combiners: set[Op] = field(default_factory=set)  # ops in the regions of other ops: functions of scalars
    replicated: dict[Op, None] = field(default_factory=dict)
    around: dict[Op, Op] = field(default_factory=dict)  # the loop or branch that contains an op
    moved: set[Value] = field(default_factory=set)  # results of transfers in the model
    moved_constants: set[Value] = field(default_factory=set)  # those of them that are transfers of constants

    def __post_init__(self) -> None:
        """Link values that must share a device, and place those whose affinity the signature states."""
        affinity = self.function.attrs.get("affinity", {})
        body = self.function.body
        self.replicated = replicated_ops(body)
        self._link_values_of_region(body)
        for v, device in zip(body.params, affinity.get("arguments", ()) or [""] * len(body.params), strict=True):
            if device:
                self.assign_device(v, device, "affinity of the argument")
        for v, device in zip(body.results, affinity.get("results", ()) or [""] * len(body.results), strict=True):
            if device:
                self._record_reader(v, device)

    def _record_reader(self, v: Value, reader: Op | Value | str) -> None:
        self.readers.setdefault(v, []).append(reader)

    def _link_values_of_region(self, region: Region) -> None:
        """Record the readers of each value, and the aliases among values."""
        for op in region.ops:
            if op.name in CONTROL_FLOW:
                self.around.update((inner, op) for r in op.regions for inner in r.ops)
                self._link_regions(op)
                continue
            self.combiners.update(inner for r in op.regions for inner in walk(r))
            if op.name == "transfer":
                self.moved.add(op.result)
                if op.operands[0] in self.free or op.operands[0] in self.moved_constants:
                    self.moved_constants.add(op.result)
            if op in self.replicated:
                self.free.update(op.results)
            elif op.name != "transfer" and op.name not in JUDGED:
                for v in (*op.operands, *(v for r in op.regions for v in captured_values(r))):
                    self._record_reader(v, op)

    def _link_regions(self, op: Op) -> None:
        """Link a loop or a branch: initial and next values are read by the results, params of a loop alias these."""
        for r in op.regions:
            self._link_values_of_region(r)
        if op.name == "while":
            condition, body = op.regions
            for rows in (op.operands, body.results):
                for v, result in zip(rows, op.results, strict=True):
                    self._record_reader(v, result)
            for rows in (condition.params, body.params):
                self.same.update(zip(rows, op.results, strict=True))
        else:
            for r in op.regions:
                for v, result in zip(r.results, op.results, strict=True):
                    self._record_reader(v, result)

    # --- decisions ---

    def device_of(self, v: Value) -> str:
        """Return the device of ``v``, or an empty string if it is not decided yet."""
        while v in self.same:
            v = self.same[v]
        return self.device.get(v, "")

    def assign_device(self, thing: Op | Value, device: str, reason: str, among: Iterable[str] = ()) -> None:
        """Assign ``device`` to a value, or to an op and its results, for ``reason``."""
        self.reasons[thing] = reason
        self.candidates[thing] = tuple(dict.fromkeys(among)) or (device,)
        if isinstance(thing, Op):
            self.ops[thing] = device
        for v in thing.results if isinstance(thing, Op) else (thing,):
            while v in self.same:
                v = self.same[v]
            self.device[v] = device

    def placeable_values(self) -> Iterator[Value]:
        """Yield every value that can have a device."""
        yield from self.function.body.params
        for op in walk(self.function.body):
            if op.name in CONTROL_FLOW:
                yield from (p for r in op.regions for p in r.params)
            if op not in self.replicated:
                yield from op.results

    def unplaced(self) -> Iterator[Op | Value]:
        """Yield the arguments and ops without a device, in order."""
        yield from (v for v in self.function.body.params if not self.device_of(v))
        yield from (op for op in walk(self.function.body) if self.is_placed_work(op) and op not in self.ops)

    def is_placed_work(self, op: Op) -> bool:
        """Return True if ``op`` runs on a device: not replicated ops, control flow and checks."""
        aside = op.name in CONTROL_FLOW or op.name in JUDGED
        return not (aside or op in self.replicated or op in self.combiners)

    # --- propagation ---

    def propagate_devices(self) -> None:
        """Propagate devices until nothing changes."""
        before = -1
        while len(self.device) + len(self.ops) != before:
            before = len(self.device) + len(self.ops)
            self._place_by_operands(self.function.body)
            if not self._place_by_readers() and not self._place_by_enclosing_loop():
                break

    def _place_by_operands(self, region: Region) -> None:
        """Place each op of ``region`` by its operands, in program order."""
        for op in region.ops:
            if op.name == "transfer":
                if op not in self.ops:
                    self.assign_device(op, op.attrs["device"], "transfer in the model")
            elif op.name in CONTROL_FLOW:
                self._place_results_by_inflow(op, [op.operands] if op.name == "while" else [])
                for r in op.regions:
                    self._place_by_operands(r)
                self._place_results_by_inflow(
                    op, [op.regions[1].results] if op.name == "while" else [r.results for r in op.regions]
                )
            elif op not in self.ops and self.is_placed_work(op):
                self._place_by_operand_bytes(op)

    def _place_results_by_inflow(self, op: Op, rows: list[tuple[Value, ...]]) -> None:
        """Place undecided results of a loop or a branch on the device of the values in ``rows`` that flow into them."""
        for row in rows:
            for v, result in zip(row, op.results, strict=True):
                if not self.device_of(result) and self.device_of(v):
                    self.assign_device(result, self.device_of(v), f"where {v} is")

    def _place_by_operand_bytes(self, op: Op) -> None:
        """Place ``op`` on the device with most bytes of its operands; a tie goes to the target of a transfer.

        A constant that the model transfers counts like other operands, but costs no move: each device has a copy.
        """
        homes = {v: self.device_of(v) for v in (*op.operands, *(v for r in op.regions for v in captured_values(r)))}
        present: dict[str, int] = {}
        moved = dict.fromkeys(homes.values(), 0)  # the bytes to move if ``op`` runs on a device
        for v, home in homes.items():
            if home:
                present[home] = present.get(home, 0) + size_in_bytes(v)
                for d in moved if v not in self.moved_constants else ():
                    moved[d] += size_in_bytes(v) if d != home else 0
        if not present:
            return
        transfer_targets = {home for v, home in homes.items() if v in self.moved}
        best = max(present, key=lambda device: (present[device], device in transfer_targets))  # of equal ones the first
        reason = "its operands are there"
        if len(present) > 1:
            others = ", ".join(f"{size_text(moved[d])} to {d}" for d in present if d != best)
            reason = f"moves {size_text(moved[best])}; it would be {others}"
            if moved[best] > min(moved[d] for d in present):
                reason = f"the model moves a constant there; moves {size_text(moved[best])}"
        self.assign_device(op, best, reason, present)

    def _place_by_readers(self) -> bool:
        """Place ops and values that no operand decides by their readers; return True if that placed any."""
        changed = False
        things: list[Op | Value] = [op for op in walk(self.function.body) if op.name not in JUDGED]
        for thing in (*reversed(things), *reversed(self.function.body.params)):
            if isinstance(thing, Op) and thing.name in CONTROL_FLOW:
                for v in thing.results:
                    changed |= not self.device_of(v) and self._place_by_first_reader(v)
            elif isinstance(thing, Value):
                changed |= not self.device_of(thing) and self._place_by_first_reader(thing)
            elif thing not in self.ops and self.is_placed_work(thing) and thing.name != "transfer":
                changed |= any(self._place_by_first_reader(v, thing) for v in thing.results)
        return changed

    def _place_by_first_reader(self, v: Value, producer: Op | None = None) -> bool:
        """Place ``v``, or its producer, on the device of its first placed reader; return True if there is one."""
        read: list[tuple[str, str]] = []
        for reader in self.readers.get(v, ()):
            if isinstance(reader, str):
                read.append((reader, OF_RESULT))
            elif isinstance(reader, Op):
                read.append((self.ops.get(reader, ""), f"{reader.name} reads it there"))
            else:
                read.append((self.device_of(reader), f"{reader} is there"))
        device_of = [row for row in read if row[0]]
        if device_of:
            self.assign_device(producer or v, *device_of[0], [device for device, _ in device_of])
        return bool(device_of)

    def _place_by_enclosing_loop(self) -> bool:
        """Place loop counters and similar ops on the device where the rest of the loop runs."""
        works_on: dict[Op, str] = {}  # the device of an op in each loop or branch
        for op, device in self.ops.items():
            outer = self.around.get(op)
            while outer is not None and outer not in works_on:
                works_on[outer] = device
                outer = self.around.get(outer)
        before = len(self.ops)
        for op in walk(self.function.body):
            if op.name in CONTROL_FLOW and op not in works_on:
                if device := next(filter(None, map(self.device_of, (*op.results, *op.operands))), ""):
                    works_on[op] = device
            elif op not in self.ops and self.is_placed_work(op):
                outer = self.around.get(op)
                while outer is not None and outer not in works_on:
                    outer = self.around.get(outer)
                if outer is not None:
                    self.assign_device(op, works_on[outer], f"as the {outer.name} around it")
        return len(self.ops) > before
