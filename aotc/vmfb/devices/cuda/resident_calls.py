"""Fast path for calls whose arguments and results are all on one GPU: the only driver call is the launch of a graph.

A call on the general path that accessed no host memory creates a fast path (:class:`ResidentCall`) for its argument
types. Later calls find it by one lookup, reuse cached memory for results, and launch the graph recorded for these
addresses (:mod:`aotc.vmfb.devices.cuda.graph_cache`). They return before the GPU is done; readers of a result wait for
it (:mod:`aotc.vmfb.devices.cuda.stream_order`). A call that does not fit takes the general path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

from aotc.vmfb.devices.cuda.array import ArrayType, CudaArray, CudaBuffer, array_type
from aotc.vmfb.devices.cuda.driver import Gpu
from aotc.vmfb.devices.cuda.graph_cache import AddressedPrograms
from aotc.vmfb.devices.cuda.libcuda.library import driver_failure
from aotc.vmfb.devices.cuda.stream_order import Mark, change_counter, order_reads
from aotc.vmfb.devices.mixed.call import PlacedCall
from aotc.vmfb.devices.mixed.executable import PlacedExecutable, PlacedPlan
from aotc.vmfb.host.interruption import runs_submission
from aotc.vmfb.limits import PLANS
from aotc.vmfb.plan import Plan

_FRESH, _GIVEN, _TAKEN = range(3)  # a result's memory: new, the caller's buffer, a donated argument


class BoundArrays:
    """Bound GPU arrays of a function, which are the same in each call.

    Attributes
    ----------
    calls : dict
        Fast paths of calls with these arguments.
    open : list of int
        Numbers of the arguments that are not bound.
    token : object
        Replaces the addresses of bound arrays in cache keys.
    """

    def __init__(self, arrays: Mapping[int, CudaArray], count: int) -> None:
        self.calls: dict[Any, ResidentCall] = {}
        self.open = [number for number in range(count) if number not in arrays]
        self.token = object()
        self._arrays = list(arrays.values())
        self._kinds = [x.kind for x in self._arrays]
        self._all: list[Any] = [arrays[n]._buffer if n in arrays else None for n in range(count)]
        self._looked: dict[Mark, int] = {}  # by stream: changes() at the last successful check

    def are_ready(self, gpu: Gpu) -> bool:
        """Order a stream behind the writers of the bound arrays; return False if an array is no longer usable."""
        now = change_counter()
        if self._looked.get(gpu.mark) == now:
            return True
        if any(x.kind is not kind or kind is None for x, kind in zip(self._arrays, self._kinds)):
            return False
        order_reads(gpu, [x.buffer for x in self._arrays])
        self._looked[gpu.mark] = now
        return True

    def with_open_arguments(self, buffers: Sequence[CudaBuffer]) -> list[CudaBuffer]:
        """Return the memory of all arguments of a call, given the memory of its open arguments."""
        found = self._all.copy()
        for number, buffer in zip(self.open, buffers):
            found[number] = buffer
        return found


class ResidentCalls:
    """The fast paths of a function, by the types of the arguments."""

    def __init__(self, executable: PlacedExecutable) -> None:
        self._executable = executable
        self._rows: dict[Any, ResidentCall] = {}

    def run_fast_path(
        self, values: Sequence[Any], out: Sequence[Any] | None, donate: Any, results: str,
        bound: BoundArrays | None = None,
    ) -> list[Any] | None:  # fmt: skip
        """Run a call on its fast path; return None if there is none.

        With ``bound`` arrays, ``values`` are the open arguments.
        """
        try:
            given = None if out is None else tuple([x.kind for x in out])
            rows = self._rows if bound is None else bound.calls
            row = rows.get((tuple([x.kind for x in values]), given, donate, results))
        except (AttributeError, TypeError):  # not a GPU array
            return None
        if row is None or runs_submission():
            return None
        return row.run(values, out)

    def new_fast_path_key(
        self, values: Sequence[Any], out: Sequence[Any] | None, donate: Any, results: str
    ) -> tuple[Any, list[Any]] | None:
        """Return the key of a fast path for a call, and the memory of its arguments.

        Return None if the fast path exists already, or if the call cannot have one.
        """
        kinds = tuple([getattr(x, "kind", None) for x in values])
        given = None if out is None else tuple([getattr(x, "kind", None) for x in out])
        key = kinds, given, donate, results
        if None in kinds or (given and None in given) or key in self._rows:
            return None
        return key, [x._buffer for x in values]

    def create_fast_path(
        self, plan: Plan, replay: Any, before: tuple[Any, list[Any]], arrays: Sequence[Any], results: Sequence[Any],
        out: Sequence[Any] | None,
    ) -> None:  # fmt: skip
        """Create a fast path for calls with the argument types of a call that has just run on the general path.

        Parameters
        ----------
        plan : Plan
        replay : method
            The method of the :class:`PlacedPlan`.
        before : tuple
            The result of :meth:`new_fast_path_key` before the call.
        arrays, results : sequence of arrays
            The call's arguments and results.
        out : sequence of arrays or None
        """
        key, buffers = before
        plain = all(type(x) is CudaArray and x._buffer is b for x, b in zip(arrays, buffers, strict=True))
        if not plain or plan.judgements or not all(type(x) is CudaArray and x.kind is not None for x in results):
            return
        if len(self._rows) >= PLANS:
            self._rows.clear()
        self._rows[key] = ResidentCall(self._executable, replay.__self__, plan, results, out is not None)

    def bound_arrays(self, arrays: Mapping[int, CudaArray], count: int) -> BoundArrays:
        """Create the :class:`BoundArrays` of a function with ``count`` arguments from arrays by argument number."""
        return BoundArrays(arrays, count)

    def create_bound_fast_path(
        self, bound: BoundArrays, kinds: Sequence[ArrayType], out_kinds: Any, donate: Any, results: str
    ) -> None:
        """Create a fast path for calls with bound arrays from the fast path for all arguments, if that exists."""
        found = self._rows.get((tuple(kinds), out_kinds, donate, results))
        if found is not None:
            opened = tuple([kinds[number] for number in bound.open])
            bound.calls[opened, out_kinds, donate, results] = found.with_bound(bound)


class ResidentCall:
    """Fast path of a function for one combination of argument types, all on the GPU."""

    def __init__(
        self, executable: PlacedExecutable, placed: PlacedPlan, plan: Plan, results: Sequence[CudaArray], given: bool
    ) -> None:
        self._pool, self._placed = executable.pool, placed
        self._allocate_buffer = executable.gpus[0].allocate_buffer
        self._bound: BoundArrays | None = None
        taken = {} if given else dict(plan.taken)
        self._rows: list[tuple[int, int, ArrayType, str]] = []
        for number, x in enumerate(results):
            where = _GIVEN if given else _TAKEN if number in taken else _FRESH
            source = taken.get(number, number)
            self._rows.append((where, source, array_type(x.shape, x.dtype, x.ordinal), x.device))
        self._donated = list(taken.values())
        self._is_plain = True  # consists of graphs only, as far as is known

    def with_bound(self, bound: BoundArrays) -> ResidentCall:
        """Return this fast path for calls that pass only the open arguments."""
        made = copy(self)
        made._bound = bound
        made._donated = [bound.open.index(number) for number in self._donated]
        made._rows = [
            (where, bound.open.index(source) if where == _TAKEN else source, kind, device)
            for where, source, kind, device in self._rows
        ]
        return made

    def run(self, values: Sequence[CudaArray], out: Sequence[CudaArray] | None) -> list[Any] | None:
        """Run a call: order it behind the writers of its memory, launch its graphs, and return the results.

        Return None if the call needs the general path.
        """
        if not self._is_plain:
            return None
        streams = self._pool.take_streams()
        try:
            buffers: list[Any] = [x._buffer for x in values]
            call, gpu, bound = self._placed.on(streams), streams.gpus[0], self._bound
            if bound is not None and not bound.are_ready(gpu):
                return None
            mark = gpu.mark
            made, written = self._allocate_results(buffers, out, mark)
            key: tuple[Any, ...] = tuple([b.address for b in buffers] + [b.address for b in written])
            if bound is not None:
                key = (bound.token, *key)
            found = call.recorded.get(key)
            if found is None or not found.launches:
                found = self._programs_for_addresses(call, gpu, key, buffers, written)
                if found is None:
                    return None
            elif streams.last is not call.me:
                streams.mark_recently_used(call)
            for buffer in buffers:
                if mark not in buffer.users:
                    order_reads(gpu, buffers)
                    break
            for buffer in written:
                if buffer.writer is not mark or len(buffer.users) != 1:
                    buffer.order_write(gpu)
            for number in self._donated:
                values[number].lose()
            streams.busy = True
            _launch_graphs(found.launches)
            if gpu.ranks is not None:  # after the loss of a rank, results would be read that are no values
                streams.wait()
            return made
        finally:
            self._pool.return_streams(streams)

    def _programs_for_addresses(
        self, call: PlacedCall, gpu: Gpu, key: tuple[Any, ...], buffers: list[CudaBuffer], written: list[CudaBuffer]
    ) -> AddressedPrograms | None:
        """Return the programs recorded for the addresses of this call; None if the call needs the general path."""
        every = buffers if self._bound is None else self._bound.with_open_arguments(buffers)
        donated = [buffers[number] for number in self._donated]
        if not _are_disjoint(every, written, donated):
            return None
        gpu.make_context_current()
        addresses = tuple([b.address for b in every] + [b.address for b in written])
        found: AddressedPrograms = call.programs_at_addresses(key, addresses)
        if not found.launches:
            self._is_plain = bool(found.graphs)
            if self._is_plain:
                found.launches = [gpu.try_make_context_current, *(gpu.graph_launcher(graph) for graph in found.graphs)]
        return found if found.launches else None

    def _allocate_results(
        self, buffers: Sequence[CudaBuffer], out: Sequence[Any] | None, mark: Mark
    ) -> tuple[list[CudaArray], list[CudaBuffer]]:
        """Return the result arrays of a call, which the GPU has yet to compute, and their memory."""
        made, written = [], []
        for where, number, kind, device in self._rows:
            if where == _GIVEN:
                assert out is not None
                x: CudaArray = out[number]
                assert x._buffer is not None  # it has a type, so it was not donated
                buffer = x._buffer
            else:
                buffer = self._allocate_buffer(kind.size, mark) if where == _FRESH else buffers[number]
                x = CudaArray.__new__(CudaArray)
                x._buffer, x._type, x.kind, x.device, x._reader = buffer, kind, kind, device, None
            made.append(x)
            written.append(buffer)
        return made, written


def _are_disjoint(every: Sequence[CudaBuffer], written: Sequence[CudaBuffer], donated: Sequence[CudaBuffer]) -> bool:
    """Return True if the memory that a call writes does not overlap other memory that it accesses."""
    if any(every.count(b) != 1 for b in donated):
        return False
    others = [b for b in written if b not in every]
    return len(others) + len(donated) == len(written) == len(set(written))


def _launch_graphs(launches: Sequence[Any]) -> None:
    for launch in launches:
        status = launch()
        if status:
            raise driver_failure("cuGraphLaunch", status)
