"""Choose the ops of a GPU program that run on the host: those without a GPU kernel, and cheap ops around them.

The choice is a minimum cut (:mod:`.min_cut`) between two *sides*, host and GPU. An op costs its time on its side. A
value costs the time of its transfer if its producer and its readers are on different sides. Costs in a loop count once
per iteration. Arguments and results are on the GPU. Host ops that are not connected to an op without a GPU kernel are
moved back to the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from aotc.ir.opset import CONTROL_FLOW, INLINE, MOVES
from aotc.ir.opset.control import JUDGED
from aotc.ir.tensor.ir import Function, Op, Region, Value, captured_values, walk
from aotc.lowering.analysis.constant_values import constants_in
from aotc.lowering.cost_model.machines import machine_of
from aotc.lowering.cost_model.model import Costs
from aotc.lowering.cost_model.op_time import move_nanoseconds, size_in_bytes
from aotc.lowering.cost_model.work import expected_iterations
from aotc.lowering.placement.devices import OF_TARGET, replicated_ops
from aotc.lowering.placement.host_only import host_only
from aotc.lowering.placement.min_cut import FIRST, SECOND, MinCut
from aotc.lowering.threshold import Estimate
from aotc.options import DEVICE, HOST
from aotc.targets import Target


def host_side(
    function: Function, gpu: Target, host: Target, costs: Costs
) -> dict[Op | Value, tuple[str, str]]:
    """Choose host or GPU for each op by a minimum cut of times and transfers; return device and reason."""
    return _HostGpuCut(function, gpu, host, costs).placement_with_reasons()


HOST_READ_NS = Estimate(15_000, "nanoseconds until the host has read a scalar that a GPU computes")


@dataclass
class _HostGpuCut:
    """Flow network of one function: nodes on the first side run on the host, on the second side on the GPU."""

    function: Function
    gpu: Target
    host: Target
    costs: Costs
    cut: MinCut = field(default_factory=MinCut)
    things: dict[Op | Value, int] = field(default_factory=dict)  # nodes of ops, and of results of loops and branches
    makers: dict[Value, int] = field(default_factory=dict)
    iterations: dict[Value, int] = field(default_factory=dict)  # how often a value is computed
    readers: dict[Value, list[int]] = field(default_factory=dict)
    forced: dict[Op, str] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)  # producers of the conditions of loops and branches that the host runs

    def __post_init__(self) -> None:
        """Build the network: a node for each op, and the costs of moving each value between host and GPU.

        Arguments and results are on the side of the GPU.
        """
        body = self.function.body
        self.own = replicated_ops(body)
        self.constants = constants_in(body)
        for v in body.params:
            self._add_produced_value(v, SECOND, 1)
        self._add_region(body, 1, None)
        for v in body.results:
            self._add_read(v, SECOND)
        for v, maker in self.makers.items():
            move = move_nanoseconds(size_in_bytes(v), self.gpu.kind, self.host.kind)
            self.cut.add_separation_cost((maker, *self.readers.get(v, ())), move * self.iterations[v])

    # ------------------------------------------------------------ the network

    def _add_produced_value(self, v: Value, thing: int, iterations: int) -> None:
        self.makers[v], self.iterations[v] = thing, iterations

    def _add_read(self, v: Value, thing: int) -> None:
        self.readers.setdefault(v, []).append(thing)

    def _add_region(self, region: Region, iterations: int, whole: int | None) -> None:
        """Add the ops of ``region``, which run ``iterations`` times; they share the node ``whole`` if there is one."""
        for op in region.ops:
            if op in self.own or op.name in JUDGED:
                continue
            if op.name in CONTROL_FLOW:
                self._add_control_flow(op, iterations, whole)
                continue
            thing = self.things[op] = self.cut.add_node() if whole is None else whole
            self._set_costs(op, thing, iterations)
            for v in (*op.operands, *(v for r in op.regions for v in captured_values(r))):
                self._add_read(v, thing)
            for v in op.results:
                self._add_produced_value(v, thing, iterations)

    def _set_costs(self, op: Op, thing: int, iterations: int) -> None:
        """Set the costs of an op on both sides; without a GPU kernel it is fixed to the host."""
        only = host_only(op)
        if only is not None:
            self.forced[op] = only.what
            self.cut.fix_to_side(thing, FIRST)
            return
        on_host, on_gpu = (self.costs.of_op(op, target) for target in (self.host, self.gpu))
        if op.name in INLINE or op.name in MOVES:  # fused into a kernel that is launched anyway
            on_gpu = max(on_gpu - machine_of(self.gpu).launch, 0.0)
            on_host = max(on_host, on_gpu)
        self.cut.set_side_costs(thing, on_host * iterations, on_gpu * iterations)

    def _add_control_flow(self, op: Op, iterations: int, whole: int | None) -> None:
        """Add a loop or a branch: a single node, unless an op in it has no GPU kernel."""
        divided = any(host_only(inner) for r in op.regions for inner in walk(r))
        if whole is None and not divided:
            whole = self.cut.add_node()
        for v in op.results:
            self.things[v] = self.cut.add_node() if whole is None else whole
            self._add_produced_value(v, self.things[v], iterations)
        inside = iterations * self._trip_count_of(op) if op.name == "while" else iterations
        if op.name == "while":
            condition, body = op.regions
            for v, *rows in zip(op.results, condition.params, body.params, body.results, op.operands, strict=True):
                for p in rows[:2]:
                    self._add_produced_value(p, self.things[v], inside)
                for read in rows[2:]:
                    self._add_read(read, self.things[v])
        else:
            for r in op.regions:
                for branch_result, v in zip(r.results, op.results, strict=True):
                    self._add_read(branch_result, self.things[v])
        for r in op.regions:
            self._add_region(r, inside, whole)
        condition_value = op.regions[0].results[0] if op.name == "while" else op.operands[0]
        if whole is not None:
            self._add_read(condition_value, whole)
        elif condition_value in self.makers:  # the host runs the loop or branch, and waits for its condition
            self.cut.add_separation_cost((self.makers[condition_value], FIRST), HOST_READ_NS.value * inside)
            self.asked.add(self.makers[condition_value])

    def _trip_count_of(self, op: Op) -> int:
        return expected_iterations(op, self.constants, {})

    # ------------------------------------------------------------ the solution

    def placement_with_reasons(self) -> dict[Op | Value, tuple[str, str]]:
        """Return the device of each op, loop result, branch result and argument, with the reason."""
        host_nodes = self._nodes_near_host_only_op(self.cut.first_side_of_min_cut())
        placement: dict[Op | Value, tuple[str, str]] = {}
        for thing, number in self.things.items():
            on_host = number in host_nodes
            reason = "moves less than on the GPU" if on_host else OF_TARGET
            if isinstance(thing, Op) and thing in self.forced:
                reason = f"{self.forced[thing]} has no kernel for {self.gpu.name}"
            placement[thing] = (HOST if on_host else DEVICE), reason
        placement.update((v, (DEVICE, OF_TARGET)) for v in self.function.body.params)
        return placement

    def _nodes_near_host_only_op(self, side: set[int]) -> set[int]:
        """Return the host-side nodes connected to an op that must run on the host."""
        neighbours: dict[int, set[int]] = {}
        for v, maker in self.makers.items():
            row = {n for n in (maker, *self.readers.get(v, ())) if n in side and n > SECOND}
            for n in row:
                neighbours.setdefault(n, set()).update(row)
        near = {self.things[op] for op in self.forced} | (self.asked & side)
        stack = list(near)
        while stack:
            more = neighbours.get(stack.pop(), set()) - near
            near |= more
            stack += more
        return near
