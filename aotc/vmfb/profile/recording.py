"""Recording of every dispatch of the calls in a ``with`` block: times, threads, rates.

During a recording the command buffers of the module contain the addresses of thunks (:mod:`aotc.vmfb.profile.thunks`)
in place of kernels. Calls that started before are recorded from their next claim on. Copies by the executor run no
kernel and have no rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from time import perf_counter_ns, sleep
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np

from aotc.vmfb.abi import DISPATCH, Command
from aotc.vmfb.commands import all_commands, kernel_words
from aotc.vmfb.errors import CallError
from aotc.vmfb.host.locks import new_lock
from aotc.vmfb.memory.pointers import address_of
from aotc.vmfb.profile.perfetto import events_text, trace_events
from aotc.vmfb.profile.records import Dispatch, Part, Span, kernel_work_facts
from aotc.vmfb.profile.roofline import roof_of
from aotc.vmfb.profile.thunks import (
    CAPACITY,
    COUNT,
    ROW_BEGAN,
    ROW_DIMS,
    ROW_ENDED,
    ROW_FIRST,
    ROW_LAST,
    ROW_NUMBER,
    ROW_PLACE,
    ROW_THREAD,
    ROW_WORDS,
    ROWS,
    Thunks,
)

if TYPE_CHECKING:
    from aotc.vmfb.interfaces import Executable
    from aotc.vmfb.profile.debug_texts import DebugText
    from aotc.vmfb.verify.buffers import Buffers


class _RecordingState:
    """Thunks and log of an executable's recordings.

    They outlive a recording, because a worker may still run a thunk.
    """

    def __init__(self) -> None:
        self.lock = new_lock()
        self.thunks: Thunks | None = None
        self.kernels: list[int] = []  # kernel addresses that the thunks replace
        self.rows = np.zeros((0, ROW_WORDS), np.int64)


_PLACES: WeakKeyDictionary[Executable, _RecordingState] = WeakKeyDictionary()


# Kernel claims that a recording has room for; later ones are only counted. A row takes 128 bytes, 128 MiB in all, and
# the system allocates a page when it is first written. Enough for some seconds of claims of microseconds.
RECORDED_CLAIMS = 1 << 20
# Minimum duration of a recording in seconds. The rate of the processor's clock is computed from two comparisons with
# the system's clock, at the start and at the end. Each is accurate within 100 ns, so the rate is accurate to 1 in 100
# 000.
CLOCK_SECONDS = 0.02


class CallRecording:
    """Record the dispatches of a module's calls, on all threads, while the ``with`` block runs.

    Parameters
    ----------
    executable : CpuExecutable
    where : str
        The name of the module.

    Raises
    ------
    CallError
        If the module is not on the CPU or has no kernel texts, or thunks are not available for this machine.
    """

    def __init__(self, executable: Executable, where: str) -> None:
        if not hasattr(executable, "words"):
            what = "only dispatches of a CPU are timed while calls run"
            raise CallError(where, what, hint="module.profile(name, *arrays), and `aotc profile`, take any device")
        found = executable.kernel_texts()
        if found is None:
            raise CallError(where, "the bundle contains no kernel text", hint="compile it with debug information")
        self.where = where
        self.kernels: list[DebugText] = found
        self._patches = _kernel_address_positions(executable.words, executable.buffers)
        self._locs = self._locations_of_dispatches(executable)
        self._place = _PLACES.setdefault(executable, _RecordingState())
        self._spans: list[tuple[str, int, int]] = []
        self._rows = np.zeros((0, ROW_WORDS), np.int64)
        self._clocks: list[tuple[int, int]] = []
        self._own = 0
        self.lost = 0

    def _locations_of_dispatches(self, executable: Executable) -> dict[int, str]:
        """Return the source location of each dispatch, by the identity of its command."""
        found: dict[int, str] = {}
        for number, nodes in enumerate(executable.buffers.nodes):
            locs = executable.command_locs(number)
            for command in all_commands(nodes):
                if command.kind == DISPATCH:
                    found[id(command)] = locs.get(command.at, self.kernels[command.kernel].loc)
        return found

    # ------------------------------------------------------------ recording

    def __enter__(self) -> CallRecording:
        """Start the recording: write the addresses of thunks to the command buffers."""
        if self._clocks:
            raise CallError(self.where, "a recording is made once", hint="call module.profile() again")
        if not self._place.lock.acquire(blocking=False):
            raise CallError(self.where, "another recording of this module is on")
        try:
            self._thunks = self._make_thunks()
            self._rows = np.zeros((RECORDED_CLAIMS, ROW_WORDS), np.int64)  # untouched pages take no memory
            log = self._thunks.log
            log[ROWS], log[COUNT], log[CAPACITY] = address_of(self._rows), 0, RECORDED_CLAIMS
            self._begun = perf_counter_ns()
            self._clocks = [_matching_clock_times(self._thunks)]
            for (words, at, _), address in zip(self._patches, self._thunks.addresses):
                words[at] = address
        except BaseException:
            self._place.lock.release()
            raise
        self._own = self._thunks.thread()
        return self

    def _make_thunks(self) -> Thunks:
        kernels = [(int(words[at]), len(c.places), len(c.dims)) for words, at, c in self._patches]
        if self._place.thunks is None:
            self._place.thunks = Thunks(kernels, self.where)
            self._place.kernels = [address for address, *_ in kernels]
        return self._place.thunks

    def __exit__(self, *failure: object) -> None:
        """End the recording: restore the addresses of kernels, and copy the log."""
        for (words, at, _), address in zip(self._patches, self._place.kernels):
            words[at] = address
        log = self._thunks.log
        log[CAPACITY] = 0
        self._spans.append(("module.profile", self._begun, perf_counter_ns()))
        sleep(max(0.0, CLOCK_SECONDS - (perf_counter_ns() - self._begun) / 1e9))  # longer: a more accurate rate
        self._clocks.append(_matching_clock_times(self._thunks))
        count = int(log[COUNT])
        self.lost = max(count - RECORDED_CLAIMS, 0)
        self._place.rows, self._rows = self._rows, self._rows[: min(count, RECORDED_CLAIMS)].copy()
        self._place.lock.release()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record a named span of this thread's work: the time of the block."""
        begin = perf_counter_ns()
        try:
            yield
        finally:
            self._spans.append((name, begin, perf_counter_ns()))

    # ------------------------------------------------------------ results

    @property
    def begun(self) -> int:
        """The time of ``time.perf_counter_ns`` at which the recording began, from which its times count."""
        return self._begun

    @property
    def spans(self) -> list[Span]:
        """The named spans, the outermost last."""
        return [Span(name, begin - self._begun, end - begin) for name, begin, end in self._spans]

    @cached_property
    def dispatches(self) -> list[Dispatch]:
        """The dispatches, in order of start.

        Raises
        ------
        CallError
            If the block has not been left.
        """
        if len(self._clocks) < 2:
            raise CallError(self.where, "the recording is not over", hint="look at it after the with block")
        (ticks, first), (later, last) = self._clocks
        rate = (last - first) / max(later - ticks, 1)
        rows = self._rows[np.argsort(self._rows[:, ROW_BEGAN], kind="stable")]
        shift = first - self._begun
        times = ((rows[:, [ROW_BEGAN, ROW_ENDED]] - ticks) * rate).astype(np.int64) + shift
        threads = _numbered_threads(rows[:, ROW_THREAD].tolist(), self._own)
        made: list[_OpenDispatch] = []
        current: dict[tuple[int, ...], list[_OpenDispatch]] = {}
        for row, (began, ended), thread in zip(rows.tolist(), times.tolist(), threads):
            command = self._patches[row[ROW_NUMBER]][2]
            sizes = tuple(row[ROW_DIMS : ROW_DIMS + len(command.dims)])
            claim = Part(row[ROW_FIRST], row[ROW_LAST], began, ended, thread)
            some = current.setdefault((row[ROW_NUMBER], row[ROW_PLACE], *sizes), [])
            found = next((o for o in some if o.accepts_claim(claim)), None)
            if found is None:
                found = _OpenDispatch(command, sizes)
                some.append(found)
                made.append(found)
            found.parts.append(claim)
            if found.is_complete():
                some.remove(found)
        return [self._dispatch(o) for o in made]

    def _dispatch(self, o: _OpenDispatch) -> Dispatch:
        """Compute times and rates of a dispatch from its claims."""
        name, text, *_ = self.kernels[o.command.kernel]
        loc = self._locs[id(o.command)]
        work = kernel_work_facts(text, o.sizes)
        start = min(c.began for c in o.parts)
        ns = max(max(c.ended for c in o.parts) - start, 1)
        busy = max(sum(c.ended - c.began for c in o.parts), 1)
        threads = sorted({c.thread for c in o.parts})
        items = sum(c.last - c.first for c in o.parts)
        least = roof_of(work.bytes).nanoseconds(work.flops, work.bytes)
        return Dispatch(
            name, loc, work.sizes, start, ns, busy, items, len(o.parts), threads, work.bytes, work.flops,
            round(work.flops / ns, 3), round(work.bytes / ns, 3), round(least / busy, 4), o.parts,
        )  # fmt: skip

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace as JSON for Perfetto and Chrome, atomically.

        Raises
        ------
        CallError
            If the block has not been left, or the file cannot be written.
        """
        from aotc.vmfb.host.files import write_atomically

        events = trace_events(self.dispatches, self.spans, self.where)
        try:
            write_atomically(os.fspath(path), [events_text(events).encode()])
        except OSError as error:
            raise CallError(self.where, f"cannot write the trace: {error.strerror or error}", path) from error


class _OpenDispatch:
    """A dispatch under reconstruction: the command, its sizes, and the claims found in the log so far."""

    def __init__(self, command: Command, sizes: Sequence[int]) -> None:
        self.command, self.sizes = command, sizes
        self.parts: list[Part] = []
        self._items = 0 if command.items & 1 else command.items >> 1  # 0: known only to the call

    def accepts_claim(self, claim: Part) -> bool:
        """Return True if ``claim`` can belong to this dispatch: none of its items has been claimed before."""
        return all(claim.first >= c.last or claim.last <= c.first for c in self.parts)

    def is_complete(self) -> bool:
        """Return True if all items are claimed and their total number is known."""
        return 0 < self._items <= sum(c.last - c.first for c in self.parts)


def _kernel_address_positions(
    every_words: Sequence[np.ndarray], buffers: Buffers
) -> list[tuple[np.ndarray, int, Command]]:
    """Return words, position in the words, and command, for each kernel address in the command buffers."""
    found = []
    for words, nodes in zip(every_words, buffers.nodes):
        dispatches = [command for command in all_commands(nodes) if command.kind == DISPATCH]
        found += [(words, at, command) for at, command in zip(kernel_words(nodes), dispatches, strict=True)]
    return found


def _matching_clock_times(thunks: Thunks) -> tuple[int, int]:
    """Return one moment as the time of the thunks' clock and of Python's clock.

    Of several attempts to read both, the fastest is the most accurate.
    """
    looks = []
    for _ in range(20):
        begin = perf_counter_ns()
        ticks = thunks.clock()
        end = perf_counter_ns()
        looks.append((end - begin, ticks, (begin + end) // 2))
    return min(looks)[1:]


def _numbered_threads(threads: Sequence[int], own: int) -> list[int]:
    """Number threads in order of appearance from 1; ``own``, the recording thread, is 0."""
    known = {own: 0}
    return [known.setdefault(t, len(known)) for t in threads]
