"""Choose the device of each large op by the cost model: heterogeneous earliest finish time (HEFT).

Source: H. Topcuoglu, S. Hariri, M. Wu, "Performance-effective and low-complexity task scheduling for heterogeneous
computing", 2002. Ops are placed in the order of the longest path from them to the end. Each op goes to the device on
which it finishes first, including the transfers of its operands. Small ops are not placed: they follow their operands.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from aotc.ir.opset import CONTROL_FLOW, INLINE
from aotc.ir.tensor.ir import Function, Op, Value, captured_values, walk
from aotc.lowering.analysis.constant_values import constants_in
from aotc.lowering.cost_model.model import Costs
from aotc.lowering.cost_model.op_time import move_nanoseconds, size_in_bytes
from aotc.lowering.threshold import Limit
from aotc.targets import Target


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """Device chosen for an op, the nanosecond at which the op ends there, and the reason."""

    device: str
    end: float
    reason: str


def heft(function: Function, targets: Mapping[str, Target], costs: Costs) -> dict[Op, DeviceChoice]:
    """Schedule the large ops of ``function`` on devices by HEFT; return the device of each."""
    scheduler = _HeftScheduler(function, targets, costs)
    for op in sorted(scheduler.large, key=scheduler.upward_rank, reverse=True):
        scheduler.placed[op] = scheduler.place_op(op)
    return scheduler.placed


PLACED_NS = Limit(
    19_999,
    "nanoseconds of an op on its fastest device, at most, for which it is not placed by itself but follows its "
    "operands",
    "several times what it takes to hand work to another device",
)


@dataclass
class _HeftScheduler:
    """Placement of one function's large ops: their dependences, and the ops placed so far."""

    function: Function
    targets: Mapping[str, Target]
    costs: Costs
    large: list[Op] = field(default_factory=list)
    reads: dict[Op, list[tuple[Op | Value, int]]] = field(default_factory=dict)  # sources (large op, argument), bytes
    readers: dict[Op, list[Op]] = field(default_factory=dict)
    ranks: dict[Op, float] = field(default_factory=dict)
    placed: dict[Op, DeviceChoice] = field(default_factory=dict)
    busy: dict[str, float] = field(default_factory=dict)  # the nanosecond until which a device is busy

    def __post_init__(self) -> None:
        """Record for each large op the arguments and large results that it reads, and its upward rank.

        The upward rank of an op is its mean time plus the largest rank of its readers, without transfers.
        """
        self.constants = constants_in(self.function.body)
        affinities = self.function.attrs.get("affinity", {}).get("arguments") or [""] * len(self.function.body.params)
        self.homes = {v: device for v, device in zip(self.function.body.params, affinities, strict=True) if device}
        roots: dict[Value, frozenset[Op | Value]] = {v: frozenset([v]) for v in self.homes}
        for op in self.function.body.ops:
            used = dict.fromkeys((*op.operands, *(v for r in op.regions for v in captured_values(r))))
            if self._has_own_placement(op):
                self.large.append(op)
                self.reads[op] = [(root, size_in_bytes(v)) for v in used for root in roots.get(v, ())]
                for root, _ in self.reads[op]:
                    if isinstance(root, Op):
                        self.readers.setdefault(root, []).append(op)
                origins: frozenset[Op | Value] = frozenset([op])
            else:
                origins = frozenset(root for v in used for root in roots.get(v, ()))
            roots.update((v, origins) for v in op.results)
        for op in reversed(self.large):
            after = max((self.ranks[reader] for reader in self.readers.get(op, ())), default=0.0)
            self.ranks[op] = self._mean_device_time(op) + after

    def _has_own_placement(self, op: Op) -> bool:
        """Return True if ``op`` is placed by itself.

        Small ops, ops that can be fused with their producers, and loops and branches that contain transfers are not.
        """
        if op.name in INLINE or op.name == "transfer":
            return False
        moves = any(inner.name == "transfer" for r in op.regions for inner in walk(r))
        cheapest = min(self._device_time(op, device) for device in self.targets)
        return not moves and not PLACED_NS.holds(int(cheapest))

    def _mean_device_time(self, op: Op) -> float:
        return sum(self._device_time(op, device) for device in self.targets) / len(self.targets)

    def _device_time(self, op: Op, device: str) -> float:
        return self.costs.of_op(op, self.targets[device], device, self.constants)

    def upward_rank(self, op: Op) -> float:
        """Return the time of the longest path from ``op`` to the end (upward rank), without transfers."""
        return self.ranks[op]

    def place_op(self, op: Op) -> DeviceChoice:
        """Return the device on which ``op`` ends first, and reserve the device until then."""
        ends = {device: self._end_time_on_device(op, device) for device in self.targets}
        best = min(ends, key=lambda device: ends[device])
        self.busy[best] = ends[best]
        others = ", ".join(f"{end / 1e3:.1f} on {device}" for device, end in ends.items() if device != best)
        return DeviceChoice(best, ends[best], f"ends first, after {ends[best] / 1e3:.1f} us; {others}")

    def _end_time_on_device(self, op: Op, device: str) -> float:
        """Return the nanosecond at which ``op`` would end on ``device``."""
        begin = max(self.busy.get(device, 0.0), *self._operand_arrival_time(op, device), 0.0)
        return begin + self._device_time(op, device)

    def _operand_arrival_time(self, op: Op, device: str) -> Iterable[float]:
        """Yield the nanosecond at which each operand of ``op`` is on ``device``, transfers included."""
        for root, bytes_ in self.reads[op]:
            home = self.placed[root].device if isinstance(root, Op) else self.homes[root]
            end = self.placed[root].end if isinstance(root, Op) else 0.0
            near = home == device or home not in self.targets
            yield end + (0.0 if near else move_nanoseconds(bytes_, self.targets[home].kind, self.targets[device].kind))


def ops_placed_together(op: Op) -> Iterable[Op]:
    """Yield the ops that are placed with ``op``: itself, or the ops in a loop or a branch."""
    if op.name in CONTROL_FLOW:
        yield from (inner for r in op.regions for inner in walk(r) if inner.name not in CONTROL_FLOW)
    else:
        yield op
