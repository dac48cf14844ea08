"""Calls whose arguments and results are on the GPU: the short way, which makes no driver call but the launch.

A call that went the long way once, and touched nothing of the host's, leaves a :class:`ResidentCall` for arguments of
these types. Later ones find it by one look-up, take memory for results that earlier ones left, and run the graph that
was recorded for these addresses (:mod:`aotc.vmfb.devices.recorded`). They return before the GPU is done; who reads
a result waits for it (:mod:`aotc.vmfb.devices.stream_order`). Whatever is not as it was goes the long way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aotc.vmfb.device import Plan
from aotc.vmfb.devices.cuda_array import ArrayType, CudaArray, CudaBuffer, array_type
from aotc.vmfb.devices.driver_library import failure
from aotc.vmfb.devices.placed import PlacedExecutable, PlacedPlan
from aotc.vmfb.devices.recorded import Recorded
from aotc.vmfb.limits import PLANS
from aotc.vmfb.process.interruption import is_submitted

_FRESH, _GIVEN, _TAKEN = range(3)  # where a result is: in new memory, in the caller's buffer, in a donated argument's


class ResidentCalls:
    """The short ways of a function."""

    def __init__(self, executable: PlacedExecutable) -> None:
        self._executable = executable
        self._rows: dict[Any, ResidentCall] = {}

    def call(self, values: Sequence[Any], out: Sequence[Any] | None, donate: Any, results: str) -> list[Any] | None:
        """Make a call; return None if it is to go the long way."""
        try:
            given = None if out is None else tuple([x.kind for x in out])
            row = self._rows.get((tuple([x.kind for x in values]), given, donate, results))
        except (AttributeError, TypeError):  # what is no array of ours
            return None
        if row is None or is_submitted():
            return None
        return row.run(values, out)

    def learn(
        self, plan: Plan, replay: Any, before: Any, arrays: Sequence[Any], made: Sequence[Any],
        out: Sequence[Any] | None,
    ) -> None:  # fmt: skip
        """Keep a short way for calls like one that has just been made.

        Parameters
        ----------
        plan : Plan
        replay : method
            Of the :class:`PlacedPlan`.
        before : tuple
            What :meth:`key` said before the call.
        arrays, made : sequence of arrays
            What the call read, and its results.
        out : sequence of arrays or None
        """
        key, buffers = before
        plain = all(type(x) is CudaArray and x._buffer is b for x, b in zip(arrays, buffers, strict=True))
        if not plain or plan.judgements or not all(type(x) is CudaArray and x.kind is not None for x in made):
            return
        if len(self._rows) >= PLANS:
            self._rows.clear()
        self._rows[key] = ResidentCall(self._executable, replay.__self__, plan, made, out)

    def key(self, values: Sequence[Any], out: Sequence[Any] | None, donate: Any, results: str) -> Any:
        """Return what a short way is found by, or None if there is none for such a call."""
        kinds = tuple([getattr(x, "kind", None) for x in values])
        given = None if out is None else tuple([getattr(x, "kind", None) for x in out])
        key = kinds, given, donate, results
        if None in kinds or (given and None in given) or key in self._rows:
            return None
        return key, [x._buffer for x in values]


class ResidentCall:
    """A function for arguments of given types, all on the GPU."""

    def __init__(
        self, executable: PlacedExecutable, placed: PlacedPlan, plan: Plan, made: Sequence[CudaArray],
        out: Sequence[Any] | None,
    ) -> None:  # fmt: skip
        self._pool, self._placed = executable.pool, placed
        self._block = executable.gpus[0].block
        taken = dict(plan.taken)
        self._rows: list[tuple[int, int, ArrayType, str]] = []
        for number, x in enumerate(made):
            kind = array_type(x.shape, x.dtype, x.ordinal)
            if out is not None:
                self._rows.append((_GIVEN, number, kind, x.device))
            elif number in taken:
                self._rows.append((_TAKEN, taken[number], kind, x.device))
            else:
                self._rows.append((_FRESH, 0, kind, x.device))
        self._donated = [taken[n] for n in taken] if out is None else []
        self._exclusive = out is not None or bool(self._donated)
        self._is_plain = True  # nothing but graphs, as far as is known

    def run(self, values: Sequence[CudaArray], out: Sequence[CudaArray] | None) -> list[Any] | None:
        """Make a call; return None if it is to go the long way."""
        if not self._is_plain:
            return None
        streams = self._pool.take()
        try:
            buffers: list[Any] = [x._buffer for x in values]
            call, gpu = self._placed.on(streams), streams.gpus[0]
            mark = gpu.mark
            made, written = self._results(buffers, out, mark)
            addresses = tuple([b.address for b in buffers] + [b.address for b in written])
            found = call.recorded.get(addresses)
            if found is None:
                if self._exclusive and not _apart(buffers, written, self._donated):
                    return None
                gpu.enter()
                found = call.aim(addresses)
            elif streams.last is not call.me:
                streams.note(call)
            if not found.launches and not _prepare(found, gpu):
                self._is_plain = False
                return None
            for buffer in buffers:
                if mark not in buffer.users:
                    buffer.read_by(gpu)
            for buffer in written:
                if buffer.writer is not mark or len(buffer.users) != 1:
                    buffer.written_by(gpu)
            for number in self._donated:
                values[number]._buffer = values[number].kind = None
            streams.busy = True
            _launch(found.launches)
            return made
        finally:
            self._pool.give(streams)

    def _results(
        self, buffers: Sequence[CudaBuffer], out: Sequence[Any] | None, mark: Any
    ) -> tuple[list[CudaArray], list[CudaBuffer]]:
        """Return the results, which are still to be written, and their memory."""
        made, written = [], []
        for where, number, kind, device in self._rows:
            if where == _GIVEN:
                assert out is not None
                x: CudaArray = out[number]
                buffer: Any = x._buffer
            else:
                buffer = self._block(kind.size, mark) if where == _FRESH else buffers[number]
                x = CudaArray.__new__(CudaArray)
                x._buffer, x._type, x.kind, x.device = buffer, kind, kind, device
            made.append(x)
            written.append(buffer)
        return made, written


def _apart(buffers: Sequence[CudaBuffer], written: Sequence[CudaBuffer], donated: Sequence[int]) -> bool:
    """Is what the call writes nothing else that it touches? A buffer is one array's."""
    outs = [b for b in written if b not in buffers]
    several = len(set(outs)) != len(outs) or any(buffers.count(buffers[n]) != 1 for n in donated)
    return not several and len(outs) + len(donated) == len(written)


def _prepare(found: Recorded, gpu: Any) -> bool:
    """Make the launches of what was recorded; tell whether it is nothing but graphs."""
    if not found.graphs:
        return False
    found.launches = [gpu.enter_quickly, *(gpu.prepared(graph) for graph in found.graphs)]
    return True


def _launch(launches: Sequence[Any]) -> None:
    for launch in launches:
        status = launch()
        if status:
            raise failure("cuGraphLaunch", status)
