"""Measurement of each kernel of a call in isolation, on one core or on a whole GPU, for a cost record.

Arrays that a kernel updates in place are restored before each run, so that the call computes its usual results. The
time of a kernel is the minimum of several rounds, because other programs on the machine can only slow it down.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from math import prod
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import numpy as np

from aotc.vmfb.abi import Command, Place, operand_value
from aotc.vmfb.dtypes import size_of
from aotc.vmfb.errors import ArgumentError, ArgumentValueError
from aotc.vmfb.profile.cost_record import FORMAT, kernel_text_digest
from aotc.vmfb.profile.touched_bytes import touched_bytes
from aotc.vmfb.profile.trace import StepMemory, Stepper, declared_flops, evaluate_dim, read_kernel_header

if TYPE_CHECKING:
    from ctypes import c_void_p

    from aotc.vmfb.interfaces import RuntimeFunction
    from aotc.vmfb.memory.pointers import PointerTable
    from aotc.vmfb.profile.trace import StepExecutable

Key = tuple[int, tuple[int, ...], tuple[str, ...]]  # kernel, sizes, device


def measure(function: RuntimeFunction, arrays: Sequence[Any], repeat: int) -> dict[str, Any]:
    """Run a function once, time each of its kernels in ``repeat`` rounds, and return the cost record.

    Raises
    ------
    CallError
        As for a trace, and for a wrong number of arguments.
    """
    if len(arrays) != len(function.arguments):
        expected = ", ".join(map(str, function.arguments))
        raise ArgumentError(function.where, "wrong number of arguments", len(arrays), expected)
    if not isinstance(repeat, int) or isinstance(repeat, bool) or repeat < 1:
        what = "repeat is not a number of rounds"
        raise ArgumentValueError(function.where, what, repr(repeat), "an integer from 1 on")
    found: list[Profiler] = []

    def make(executable: StepExecutable, slots: PointerTable, scratch: c_void_p, memory: StepMemory) -> Profiler:
        found.append(Profiler(executable, slots, scratch, memory, function.where, repeat))
        return found[0]

    function.step(arrays, make)
    return found[0].record(function.name)


# Nanoseconds of a round, in which a kernel runs repeatedly. Compared with this, the call itself, about 1 us, and the
# resolution of the clock are negligible.
ROUND_NANOSECONDS = 100_000
# Maximum number of runs of a kernel in a round. Each occupies some words of the command buffer, which should stay in
# the first-level cache together with the kernel's operands.
MOST_REPEATS = 256
# Nanoseconds after which no further round of a kernel is measured. A kernel that reaches this is slow enough to be
# measured accurately in few rounds.
MEASURED_NANOSECONDS = 2_000_000_000


class Profiler(Stepper):
    """Stepper that times each kernel with each combination of sizes, at the first dispatch.

    Parameters
    ----------
    executable, slots, scratch, memory, where
        As in :class:`aotc.vmfb.profile.trace.Stepper`.
    repeat : int
        Number of rounds; the fastest counts.
    """

    def __init__(
        self, executable: StepExecutable, slots: PointerTable, scratch: c_void_p, memory: StepMemory,
        where: str, repeat: int,
    ) -> None:  # fmt: skip
        super().__init__(executable, slots, scratch, memory, where)
        self.repeat = repeat
        self.target: str = executable.stats()["target"]
        self.rows: dict[Key, dict[str, Any]] = {}
        self._empty: dict[tuple[str, ...], int] = {}

    def _dispatch(self, command: Command, run: Callable[[], None]) -> None:
        """Run a dispatch; if its kernel has not run with these sizes yet, time it and add a row to the record."""
        sizes = tuple([operand_value(word, self.parameters) for word in command.dims])
        name, text, loc, ops, own = self.kernels[command.kernel]
        home = self.memory.devices_of(command.places[0][0]) if command.places else ()
        devices = (own,) if own else home
        row = self.rows.get((command.kernel, sizes, devices))
        if row is not None:
            row["runs"] += 1
            row["places"][self.location_of(command)] = row["places"].get(self.location_of(command), 0) + 1
            run()
            return
        header = read_kernel_header(text)
        dims = dict(zip(header.dims, sizes, strict=True))
        extents = [prod(evaluate_dim(d, dims) for d in p.dims) * size_of(p.dtype) for p in header.parameters]
        outputs = [
            (place, extent)
            for place, p, extent in zip(command.places, header.parameters, extents, strict=True)
            if p.output
        ]
        inputs = len(header.parameters) - len(outputs)
        spans = [
            (self._address(p), self._address(p) + extent) for p, extent in zip(command.places, extents, strict=True)
        ]
        given, made = [s for s in spans[:inputs] if s[0] < s[1]], spans[inputs:]
        in_place = header.parameters[0].name != "a0" or any(a < d and c < b for a, b in given for c, d in made)
        saved = [(p, self._bytes(p, extent)) for p, extent in outputs] if in_place else []
        ns = self._time_kernel(command, devices, run, saved)
        self.rows[command.kernel, sizes, devices] = {
            "digest": kernel_text_digest(text), "name": name, "loc": loc, "ops": ops, "sizes": dims, "runs": 1,
            "places": {self.location_of(command): 1},
            "bytes": sum(touched_bytes(text, sizes)), "flops": declared_flops(text, dims),
            "ns": dict.fromkeys(devices, ns),
        }  # fmt: skip

    def _time_kernel(
        self, command: Command, devices: tuple[str, ...], run: Callable[[], None], saved: Sequence[tuple[Place, bytes]]
    ) -> float:
        """Return the nanoseconds of one run of ``command``.

        Afterwards the outputs are those of one run: ``saved`` content is restored before each round.
        """
        first = _timed_run(run)
        if self.executable.has_callbacks:  # callbacks must run only once
            return max(first, 1)
        nothing = self._time_empty_call(command, devices)
        times = 1
        if not saved:
            again = max(_timed_run(run) - nothing, 1)
            times = max(1, min(ROUND_NANOSECONDS // again, MOST_REPEATS))
        alone = self._call(command, times) if times > 1 else run
        best, spent = float(first), first
        for _ in range(self.repeat):
            for place, data in saved:
                self.memory.write(place[0], self._address(place), data)
            taken = _timed_run(alone)
            best = min(best, (taken - nothing) / times)
            spent += taken
            if spent > MEASURED_NANOSECONDS:
                break
        return round(max(best, 1.0), 1)

    def _call(self, command: Command, times: int) -> Callable[[], None]:
        return self.executable.call_of_command(command, self.slots, self.parameters, self.scratch, times)

    def _time_empty_call(self, command: Command, devices: tuple[str, ...]) -> int:
        """Return the nanoseconds of a call that runs ``command`` zero times, on its device."""
        if devices not in self._empty:
            call = self._call(command, 0)
            self._empty[devices] = min(_timed_run(call) for _ in range(self.repeat + 1))
        return self._empty[devices]

    def record(self, function: str) -> dict[str, Any]:
        """Return the cost record, with the kernels in the order of their first runs."""
        return {
            "format": FORMAT,
            **self.executable.origin(),
            "target": self.target,
            "function": function,
            "machine": {"cpu": processor_name(), "cores": os.cpu_count() or 1, **_gpu_names(self.executable.stats())},
            "versions": {"python": platform.python_version(), "numpy": np.__version__},
            "kernels": list(self.rows.values()),
        }


def _timed_run(run: Callable[[], None]) -> int:
    begin = perf_counter_ns()
    run()
    return perf_counter_ns() - begin


def _gpu_names(stats: Mapping[str, Any]) -> dict[str, str]:
    return {"gpu": stats["device"]} if stats.get("device") else {}


def processor_name() -> str:
    """Return the model name of the processor."""
    try:
        with open("/proc/cpuinfo") as f:
            rows: Mapping[str, str] = dict(line.split(":", 1) for line in f if ":" in line)
    except OSError:
        rows = {}
    names = [value.strip() for key, value in rows.items() if key.strip() == "model name"]
    return names[0] if names else platform.machine()
