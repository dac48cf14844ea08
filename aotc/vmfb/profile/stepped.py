"""Timeline of a call that runs one dispatch at a time, for devices without timers inside of running calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from aotc.vmfb.abi import COPY, Command, operand_value
from aotc.vmfb.profile.records import Dispatch, Part, kernel_work_facts
from aotc.vmfb.profile.trace import StepMemory, Stepper

if TYPE_CHECKING:
    from ctypes import c_void_p

    from aotc.vmfb.interfaces import RuntimeFunction
    from aotc.vmfb.memory.pointers import PointerTable
    from aotc.vmfb.profile.trace import StepExecutable


class Timeline(Stepper):
    """Stepper that runs commands one by one, waits for each, and records the times."""

    def __init__(
        self, executable: StepExecutable, slots: PointerTable, scratch: c_void_p, memory: StepMemory,
        where: str, dispatches: list[Dispatch], begun: int,
    ) -> None:  # fmt: skip
        super().__init__(executable, slots, scratch, memory, where)
        self.made = dispatches
        self._begun = begun or perf_counter_ns()

    def _command(self, command: Command) -> None:
        """Run a command; record it with its time if it is a copy."""
        if command.kind != COPY:
            super()._command(command)
            return
        run = self.executable.call_of_command(command, self.slots, self.parameters, self.scratch)
        size = operand_value(command.dims[0], self.parameters)
        self._append_dispatch(run, "copy", "", {}, 1, 2 * size, 0)

    def _dispatch(self, command: Command, run: Callable[[], None]) -> None:
        name, text, *_ = self.kernels[command.kernel]
        loc = self.location_of(command)
        sizes = [operand_value(word, self.parameters) for word in command.dims]
        work = kernel_work_facts(text, sizes)
        items = operand_value(command.items, self.parameters)
        self._append_dispatch(run, name, loc, work.sizes, items, work.bytes, work.flops)

    def _append_dispatch(
        self, run: Callable[[], None], name: str, loc: str, sizes: dict[str, int], items: int, size: int, flops: int
    ) -> None:
        """Run a command by ``run``, and append a dispatch with its time and these facts to the timeline."""
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
