"""Timeline of a call run one dispatch at a time, for devices whose dispatches cannot be timed in running calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from aotc.vmfb.abi import COPY, Command, operand_value
from aotc.vmfb.profile.records import Dispatch, Part, work_of
from aotc.vmfb.profile.trace import StepMemory, Stepper

if TYPE_CHECKING:
    from ctypes import c_void_p

    from aotc.vmfb.interfaces import RuntimeFunction
    from aotc.vmfb.memory.pointers import PointerTable
    from aotc.vmfb.profile.trace import StepExecutable


class Timeline(Stepper):
    """Runs the submissions of a call command by command, waiting for each, and records the times."""

    def __init__(
        self, executable: StepExecutable, slots: PointerTable, scratch: c_void_p, memory: StepMemory,
        where: str, dispatches: list[Dispatch], begun: int,
    ) -> None:  # fmt: skip
        super().__init__(executable, slots, scratch, memory, where)
        self.made = dispatches
        self._begun = begun or perf_counter_ns()

    def _command(self, command: Command) -> None:
        if command.kind != COPY:
            super()._command(command)
            return
        run = self.executable.call_of_command(command, self.slots, self.parameters, self.scratch)
        size = operand_value(command.dims[0], self.parameters)
        self._note(run, "copy", "", {}, 1, 2 * size, 0)

    def _dispatch(self, command: Command, run: Callable[[], None]) -> None:
        name, text, *_ = self.kernels[command.kernel]
        loc = self.loc_of(command)
        sizes = [operand_value(word, self.parameters) for word in command.dims]
        work = work_of(text, sizes)
        self._note(run, name, loc, work.sizes, operand_value(command.items, self.parameters), work.bytes, work.flops)

    def _note(
        self, run: Callable[[], None], name: str, loc: str, sizes: dict[str, int], items: int, size: int, flops: int
    ) -> None:
        begin = perf_counter_ns()
        run()
        ns = max(perf_counter_ns() - begin, 1)
        start = begin - self._begun
        rates = round(flops / ns, 3), round(size / ns, 3), 0.0
        parts = [Part(0, items, start, start + ns, 0)]
        self.made.append(Dispatch(name, loc, sizes, start, ns, ns, items, 1, [0], size, flops, *rates, parts))


def stepped_dispatches(function: RuntimeFunction, arrays: Sequence[Any], begun: int = 0) -> list[Dispatch]:
    """Return the dispatches of a call of a loaded function, without roofline fractions.

    Their times count from ``begun``, a time of ``time.perf_counter_ns``; by default from the first command.

    Raises
    ------
    CallError
        As for a trace.
    """
    dispatches: list[Dispatch] = []
    function.step(arrays, partial(Timeline, where=function.where, dispatches=dispatches, begun=begun))
    return dispatches
