"""Ties: pairs of values between which no copy is needed if both have the same memory.

They are: an update and its operand; the state of a loop, its initial value, and its next value; the result of a branch
and that of the ``case``; a function's result and the caller's memory. Further pairs only save memory: an elementwise
result and an operand that it may overwrite.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from aotc.ir.loop.ir import Kernel
from aotc.ir.opset.control import RUNS_ONCE
from aotc.ir.tensor.ir import Function, Op, Region, Value
from aotc.lowering.analysis.in_place import count_overwritten_parameters
from aotc.lowering.cost_model.work import estimated_bytes, expected_iterations

NEXT_STATE = "the next state"

UNROLLED = "unrolled"
"""The attribute of a loop with the number of iterations that its body does."""


@dataclass(frozen=True, slots=True, eq=False)
class Tie:
    """Two values that should share memory.

    Attributes
    ----------
    new, old : Value
        If they do not share memory, ``old`` is copied to ``new``.
    kind : str
        Reason for the copy.
    op : Op or None
        The op that copies; None for a function's result.
    cost : int
        Bytes copied per call.
    loops : tuple of Op
        The loops around the copy, outer first.
    """

    new: Value
    old: Value
    kind: str
    op: Op | None
    cost: int
    loops: tuple[Op, ...] = ()


@dataclass
class Ties:
    """Collection of the ties of a function; ``copies`` avoid a copy at run time, ``aliases`` only save memory."""

    functions: Mapping[str, Function]
    kernels: Mapping[str, Kernel]
    copies: list[Tie] = field(default_factory=list)
    aliases: list[tuple[Value, tuple[Value, ...]]] = field(default_factory=list)
    updates: dict[Op, int] = field(default_factory=dict)
    _constants: dict[Value, Op] = field(default_factory=dict)
    _runs: dict[Op, int] = field(default_factory=dict)  # how often each loop starts in a call

    def collect_ties(self, region: Region, loops: tuple[Op, ...] = (), times: int = 1) -> None:
        """Collect the ties of a region that runs ``times`` times per call, and of the regions inside of it."""
        for op in region.ops:
            match op.name:
                case "constant":
                    self._constants[op.result] = op
                case "dispatch":
                    self._ties_of_dispatch(op, loops, times)
                case "while":
                    self._ties_of_while(op, loops, times)
                case "case":
                    for n, branch in enumerate(op.regions):
                        once = op.attrs.get(RUNS_ONCE) == n and loops
                        inside = (loops[:-1], self._runs[loops[-1]]) if once else (loops, times)
                        self.collect_ties(branch, *inside)
                        rows = zip(op.results, branch.results, strict=True)
                        self.copies += self._append_ties(rows, "the result of a branch", op, *inside)

    def allows_sharing(self, op: Op, result: int, operands: tuple[int, ...]) -> bool:
        """Return True if result ``result`` of ``op`` may share memory with all of ``operands``."""
        if op.name == "while":
            return result in operands  # other states with the same first value are copied before the loop
        if op.name != "dispatch":
            return False
        updates = self.updates[op]
        if result < updates:
            return operands == (result,)
        aliases = self.kernels[op.attrs["callee"]].aliases
        return all((result, n - updates) in aliases for n in operands)

    def _ties_of_dispatch(self, op: Op, loops: tuple[Op, ...], times: int) -> None:
        """Collect the ties of a kernel's results with operands that the kernel updates, or may overwrite."""
        callee = op.attrs["callee"]
        count = self.updates[op] = count_overwritten_parameters(self.functions[callee])
        pairs = zip(op.results[:count], op.operands[:count], strict=True)
        self.copies += self._append_ties(pairs, "an update", op, loops, times)
        operands: dict[int, list[Value]] = {}
        for result, number in self.kernels[callee].aliases:
            if result >= count:
                operands.setdefault(result, []).append(op.operands[count + number])
        self.aliases += [(op.results[n], tuple(some)) for n, some in operands.items()]

    def _ties_of_while(self, op: Op, loops: tuple[Op, ...], times: int) -> None:
        """Collect the ties of a loop's results with its initial and next states, and the ties inside it."""
        self.copies += self._append_ties(zip(op.results, op.operands, strict=True), "the first state", op, loops, times)
        inside = *loops, op
        self._runs[op] = times
        iterations = times * expected_iterations(op, self._constants, self.functions)
        for region in op.regions:
            self.collect_ties(region, inside, iterations)
        rows = zip(op.results, op.regions[1].results, strict=True)
        self.copies += self._append_ties(rows, NEXT_STATE, op, inside, iterations)

    def _append_ties(
        self, rows: Iterator[tuple[Value, Value]], kind: str, op: Op, loops: tuple[Op, ...], times: int
    ) -> list[Tie]:
        return [Tie(new, old, kind, op, estimated_bytes(new) * times, loops) for new, old in rows]


def original_iterations_per_iteration(loop: Op) -> int:
    """Return the number of original iterations in one iteration of an unrolled loop."""
    return int(loop.attrs.get(UNROLLED, 1))
