"""Collectives by NCCL on the stream of a GPU, also inside CUDA graphs; and what happens when a rank is lost.

NCCL does not notice that a process of the same host has ended: its kernels wait for ever, and so does everything behind
them, also calls of the driver that cannot be interrupted. So a thread asks the link between the ranks. After a loss the
communicators are aborted, and the graphs with collectives are destroyed. If NCCL does not return from that, only the
end of the process is sure.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from ctypes import c_void_p
from dataclasses import dataclass
from time import monotonic, sleep

from aotc.vmfb.dtypes import size_of
from aotc.vmfb.errors import CallError, error_of_message
from aotc.vmfb.host.locks import new_lock
from aotc.vmfb.ranks.collectives import Collective
from aotc.vmfb.ranks.gpu_calls import Arrays, GpuCall, RankGpu
from aotc.vmfb.ranks.gpu_reductions import BYTES, GpuReduction, gpu_reduction
from aotc.vmfb.ranks.link import Link
from aotc.vmfb.ranks.nccl.communicators import Communicators, Groups
from aotc.vmfb.ranks.nccl.library import Nccl

# The status with which a process ends whose GPU NCCL does not release: EX_TEMPFAIL of sysexits.h, a failure after which
# the launcher may start the ranks again.
STUCK_STATUS = 75

# Seconds between the error of a lost rank and the end of such a process, in which the error reaches logs and callers.
_LAST_SECONDS = 1.0

# Seconds between two questions to the link and to NCCL whether a rank is lost.
_ASK_SECONDS = 0.1

# Seconds that a call has to notice the loss of a rank before its communicators are ended under it.
_LEAVE_SECONDS = 1.0

# Seconds that the link between the ranks has to name the lost rank after NCCL has met an error: its own sockets may
# notice first that a host is gone.
_NAME_SECONDS = 2.0


class NcclTransport:
    """The GPU of one rank among those of the others: see :class:`aotc.vmfb.ranks.gpu_calls.GpuTransport`.

    It is the ``ranks`` of its GPU, which asks it during each wait.
    """

    def __init__(self, nccl: Nccl, link: Link) -> None:
        self._nccl, self._link = nccl, link
        self._gpu: RankGpu | None = None
        self._communicators: Communicators | None = None
        self._calls: list[Collective] = []
        self._failure: CallError | None = None
        self._pending = False  # is a call under way?
        self._calling, self._ending = new_lock(), new_lock()
        self._is_over = False  # the communicators are being ended

    def call(self, gpu: RankGpu, collective: Collective, arrays: Arrays) -> GpuCall:
        """See :class:`aotc.vmfb.ranks.gpu_calls.GpuTransport`."""
        if self._communicators is None:
            self._gpu, gpu.ranks = gpu, self
            self._communicators = Communicators(self._nccl, self._link, gpu.make_context_current)
            threading.Thread(target=_watch, args=(weakref.ref(self),), name="aotc-nccl-watch", daemon=True).start()
        everyone: Groups = (tuple(range(self._link.size)),)
        communicator = self._communicators.of(collective.groups or everyone)
        self._calls.append(collective)
        group = next(group for group in collective.groups or everyone if self._link.rank in group)
        return NcclCall(self._nccl, collective, arrays, communicator, group.index(self._link.rank), len(group))

    def begin_call(self) -> None:
        """See :class:`aotc.vmfb.ranks.gpu_calls.GpuTransport`; the graphs of an earlier call may be gone."""
        self._calling.acquire()
        if self._is_over or self._failure is not None:
            self._calling.release()
            raise self._error() or CallError("", "this rank has left the others", hint="start all ranks again")
        self._pending = True

    def end_call(self) -> None:
        """See :class:`aotc.vmfb.ranks.gpu_calls.GpuTransport`."""
        self._pending = False
        self._calling.release()

    def check(self) -> None:
        """Raise the error of a lost rank, after which the GPU does none of this model's work any more."""
        if error := self._error():
            raise error

    def settle(self) -> None:
        """Raise the error of a lost rank if its loss has ended work that a wait found complete."""
        if self._pending:
            self.check()

    def fail(self, error: BaseException) -> None:
        """Leave the other ranks after an error in the middle of a call; the communicators end in the background."""
        self._link.close(f"failed ({type(error).__name__})")
        threading.Thread(target=self._end, args=("ncclCommAbort",), daemon=True).start()

    def _error(self) -> CallError | None:
        """Return a new exception for the lost rank, since each exception raised keeps its own traceback."""
        found = self._failure
        return None if found is None else error_of_message(type(found), str(found), vars(found))

    def close(self) -> None:
        """Release the communicators; the graphs that contain collectives are destroyed."""
        self._end("ncclCommDestroy")

    def ask(self) -> bool:
        """Give up the work on the GPU if a rank is lost; return False when there is nothing to watch any more."""
        if self._is_over or self._communicators is None:
            return False
        try:
            problem = self._communicators.async_error()
            found = self._named_by_link(problem) if problem else self._link.lost(self._described())
        except CallError as error:
            found = error
        except Exception as error:  # without a watch, a lost rank would mean a hang
            found = CallError("", f"the watch of the ranks failed: {error!r}", hint="start all ranks again")
        if found is not None:
            self._failure = found
            self._end("ncclCommAbort")
        return found is None

    def _described(self) -> str:
        """Return the collective that a call waits for: its only one, or the first of several."""
        first, *others = self._calls or [Collective("a collective", 0)]
        return f"{first}" + (f", and {len(others)} behind it" if others else "")

    def _named_by_link(self, problem: str) -> CallError:
        """Return the error of the rank that the link names; without one, NCCL's own."""
        end = monotonic() + _NAME_SECONDS
        while monotonic() < end:
            if lost := self._link.lost(self._described()):
                return lost
            sleep(_ASK_SECONDS)
        return CallError("", f"NCCL failed during {self._described()}", problem, hint="NCCL_DEBUG=WARN says more")

    def _end(self, function: str) -> None:
        """End the communicators, once; if NCCL does not return from an abort, end the process."""
        with self._ending:
            if self._is_over or self._gpu is None or self._communicators is None:
                return
            self._is_over = True
        # A call that enqueues must not use what is ended here. It leaves soon, as its waits raise the error; one that
        # does not is inside of the driver, and only the end of the communicators lets it go on.
        entered = self._calling.acquire(timeout=_LEAVE_SECONDS)
        if entered:
            self._calling.release()
        if not self._communicators.end(function, self._gpu.destroy_collective_graphs) and function == "ncclCommAbort":
            _end_process(self._described())


def _watch(transport: weakref.ref[NcclTransport]) -> None:
    """Ask whether ranks are lost, until the module is closed or collected."""
    while True:
        sleep(_ASK_SECONDS)  # without a reference: a module that is dropped is freed
        found = transport()
        if found is None or not found.ask():
            return
        del found


def _end_process(what: str) -> None:
    """End the process when its error has had time to be read: NCCL does not release the GPU."""
    sleep(_LAST_SECONDS)
    print(f"aotc: NCCL does not return from {what} of a lost rank; this process ends", file=sys.stderr, flush=True)
    os._exit(STUCK_STATUS)


@dataclass(frozen=True, slots=True)
class NcclCall:
    """A collective by NCCL: see :class:`aotc.vmfb.ranks.gpu_calls.GpuCall`.

    ``position`` and ``members`` are this rank's position in its group, and the number of ranks there.
    """

    nccl: Nccl
    collective: Collective
    arrays: Arrays
    communicator: c_void_p
    position: int
    members: int
    is_recorded: bool = True

    def __call__(self, gpu: RankGpu, stream: int, addresses: Sequence[int]) -> None:
        """See :class:`aotc.vmfb.ranks.gpu_calls.GpuCall`."""
        run, count = _OPS[self.collective.op], len(self.arrays.operands)
        rows = zip(self.arrays.operands, addresses[:count], addresses[count + 1 :])
        whole = [(dtype, elements, operand, result) for (dtype, elements), operand, result in rows if elements]
        if not whole:
            return
        self.nccl.call("ncclGroupStart")
        try:
            for dtype, elements, operand, result in whole:
                run(self, gpu, stream, _Operand(dtype, elements, operand, result))
        finally:
            self.nccl.call("ncclGroupEnd")

    def reduction(self, dtype: str) -> GpuReduction:
        """Return NCCL's numbers of the reduction; the compiler refuses dtypes that NCCL does not support."""
        found = gpu_reduction(self.collective.reduction, dtype)
        if found is None:
            raise CallError("", f"{self.collective}: NCCL does not reduce {dtype} by {self.collective.reduction}")
        return found


@dataclass(frozen=True, slots=True)
class _Operand:
    """An operand with its number of elements, and the addresses of it and of its result."""

    dtype: str
    elements: int
    address: int
    result: int

    @property
    def bytes(self) -> int:
        return self.elements * size_of(self.dtype)


def _all_reduce(c: NcclCall, gpu: RankGpu, stream: int, x: _Operand) -> None:
    dtype, op, parts = c.reduction(x.dtype)
    c.nccl.call("ncclAllReduce", x.address, x.result, x.elements * parts, dtype, op, c.communicator, stream)


def _reduce_scatter(c: NcclCall, gpu: RankGpu, stream: int, x: _Operand) -> None:
    dtype, op, parts = c.reduction(x.dtype)
    count = x.elements // c.members * parts
    c.nccl.call("ncclReduceScatter", x.address, x.result, count, dtype, op, c.communicator, stream)


def _all_gather(c: NcclCall, gpu: RankGpu, stream: int, x: _Operand) -> None:
    c.nccl.call("ncclAllGather", x.address, x.result, x.bytes, BYTES, c.communicator, stream)


def _all_to_all(c: NcclCall, gpu: RankGpu, stream: int, x: _Operand) -> None:
    size = x.bytes // c.members
    for other in range(c.members):
        c.nccl.call("ncclSend", x.address + other * size, size, BYTES, other, c.communicator, stream)
        c.nccl.call("ncclRecv", x.result + other * size, size, BYTES, other, c.communicator, stream)


def _collective_permute(c: NcclCall, gpu: RankGpu, stream: int, x: _Operand) -> None:
    """Enqueue a permutation: receive from this rank's source, or store zeros without one, and send to its targets."""
    me, pairs = c.position, c.collective.pairs  # of all ranks, whose group has them in order
    source = next((source for source, target in pairs if target == me), None)
    if source is None:
        gpu.set_zeros(x.result, x.bytes, stream)
    elif source == me:
        gpu.copy_on(stream, x.result, x.address, x.bytes)
    else:
        c.nccl.call("ncclRecv", x.result, x.bytes, BYTES, source, c.communicator, stream)
    for first, target in pairs:
        if first == me != target:
            c.nccl.call("ncclSend", x.address, x.bytes, BYTES, target, c.communicator, stream)


def _collective_broadcast(c: NcclCall, gpu: RankGpu, stream: int, x: _Operand) -> None:
    c.nccl.call("ncclBroadcast", x.address, x.result, x.bytes, BYTES, 0, c.communicator, stream)


_OPS: dict[str, Callable[[NcclCall, RankGpu, int, _Operand], None]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "collective_permute": _collective_permute,
    "collective_broadcast": _collective_broadcast,
}
