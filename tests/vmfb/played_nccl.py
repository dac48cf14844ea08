"""NCCL played by threads: the functions of its library on simulated GPUs, with its rules and its ways to fail.

Each rank is a thread with a library of its own; ``Network`` is what connects them. What a rank enqueues is done when
its GPU comes to it, and then waits for the other ranks of the communicator. All must be in the same call.
"""

import ctypes
import threading
import time

import ml_dtypes
import numpy as np
from vmfb.simulated_gpu import SimulatedGpu

TYPES = {0: "i1", 1: "u1", 2: "i4", 3: "u4", 4: "i8", 5: "u8", 6: "f2", 7: "f4", 8: "f8", 9: ml_dtypes.bfloat16}
OPS = (np.add, np.multiply, np.maximum, np.minimum)
IN_PROGRESS, INVALID = 7, 5


class Network:
    """What ranks have put down for each call of each communicator."""

    def __init__(self):
        self.changed, self.put = threading.Condition(), {}
        self.joined = {}
        self.hangs = False  # does an abort never return?
        self.rows = []  # the names of all calls, by rank

    def libraries(self, size):
        self.rows = [[] for _ in range(size)]
        return [PlayedLibrary(self, rank) for rank in range(size)]


class Communicator:
    def __init__(self, key, members, rank):
        self.key, self.members, self.rank, self.calls, self.aborted = key, members, rank, 0, False


class PlayedLibrary:
    """The functions of ``libnccl.so.2`` for one rank; a status of ``ncclInProgress`` is as good as success."""

    def __init__(self, network, rank):
        self.network, self.number = network, rank
        self.communicators, self.group = {}, None
        for name in [n for n in dir(type(self)) if n.startswith("nccl")]:
            method = getattr(self, name)
            setattr(self, name, lambda *a, method=method: method(*a))

    def ncclGetErrorString(self, status):
        return b"played error %d" % status

    def ncclGetVersion(self, out):
        out._obj.value = 22809
        return 0

    def ncclGetUniqueId(self, out):
        out._obj.data[0:2] = [self.number, 77]
        return 0

    def ncclCommInitRankConfig(self, out, size, own, position, config):
        assert own.data[1] == 77
        assert config._obj.magic == 0xCAFEBEEF
        with self.network.changed:
            key = own.data[0], size, len([c for c in self.communicators.values() if len(c.members) == size])
            members = self.network.joined.setdefault(key, {})
            members[position] = self.number
            self.network.changed.notify_all()
            self.network.changed.wait_for(lambda: len(members) == size, 20)
        made = Communicator(key, [members[n] for n in range(size)], position)
        self.communicators[id(made)] = made
        out._obj.value = id(made)
        return 0

    def ncclCommGetAsyncError(self, communicator, out):
        out._obj.value = 0
        return 0

    def ncclCommAbort(self, communicator):
        self.network.rows[self.number].append("ncclCommAbort")
        while self.network.hangs:
            time.sleep(0.01)
        self.communicators[communicator.value].aborted = True
        return 0

    def ncclCommDestroy(self, communicator):
        self.network.rows[self.number].append("ncclCommDestroy")
        return 0

    def ncclGroupStart(self):
        assert self.group is None
        self.group = []
        return 0

    def ncclGroupEnd(self):
        group, self.group = self.group, None
        if group:
            gpu, stream = self._gpu(group[0][1])
            group.sort(key=lambda call: call[0] == "receive")  # all run at once
            gpu.enqueue(stream, "nccl", lambda: [self._run(*call) for call in group])
        return IN_PROGRESS

    def ncclAllReduce(self, source, to, count, dtype, op, communicator, stream):
        return self._call("all_reduce", stream, communicator, (source, to, count, dtype, op))

    def ncclReduceScatter(self, source, to, count, dtype, op, communicator, stream):
        return self._call("reduce_scatter", stream, communicator, (source, to, count, dtype, op))

    def ncclAllGather(self, source, to, count, dtype, communicator, stream):
        return self._call("all_gather", stream, communicator, (source, to, count, dtype))

    def ncclBroadcast(self, source, to, count, dtype, root, communicator, stream):
        return self._call("broadcast", stream, communicator, (source, to, count, dtype, root))

    def ncclSend(self, source, count, dtype, peer, communicator, stream):
        return self._call("send", stream, communicator, (source, count, dtype, peer))

    def ncclRecv(self, to, count, dtype, peer, communicator, stream):
        return self._call("receive", stream, communicator, (to, count, dtype, peer))

    def _call(self, name, stream, communicator, arguments):
        assert self.group is not None, "aotc groups its calls"
        if communicator.value not in self.communicators:
            return INVALID
        self.network.rows[self.number].append(name)
        self.group.append((name, stream, self.communicators[communicator.value], arguments))
        return 0

    @staticmethod
    def _gpu(stream):
        found = [gpu for gpu in list(SimulatedGpu.every) if stream in (gpu.handle, *gpu.captured)]
        return found[0], stream

    def _run(self, name, stream, one, arguments):
        """Do what was enqueued, when the stream comes to it."""
        gpu, _ = self._gpu(stream)
        match name, arguments:
            case "send", (source, count, 1, peer):
                self._give(gpu, one, ("sent", one.rank, peer), memory(source, count, "u1").copy())
            case "receive", (to, count, 1, peer):
                memory(to, count, "u1")[:] = self._take(gpu, one, ("sent", peer, one.rank))
            case _:
                self._together(gpu, one, name, arguments)

    def _together(self, gpu, one, name, arguments):
        source, to, count, dtype, *more = arguments
        size, kind, me = len(one.members), TYPES[dtype], one.rank
        own = memory(source, count * (size if name == "reduce_scatter" else 1), kind).copy()
        one.calls += 1
        for rank in range(size):
            self._give(gpu, one, (one.calls, me, rank), (name, count, dtype, more, own))
        rows = [self._take(gpu, one, (one.calls, rank, me)) for rank in range(size)]
        if one.aborted:
            return
        assert all(row[:4] == (name, count, dtype, more) for row in rows), "ranks are in different calls"
        arrays = [row[4] for row in rows]
        match name:
            case "all_reduce":
                memory(to, count, kind)[:] = reduced(arrays, more[0])
            case "reduce_scatter":
                memory(to, count, kind)[:] = reduced(arrays, more[0])[me * count : (me + 1) * count]
            case "all_gather":
                memory(to, count * size, kind)[:] = np.concatenate(arrays)
            case "broadcast":
                memory(to, count, kind)[:] = arrays[more[0]]

    def _give(self, gpu, one, key, value):
        with self.network.changed:
            self.network.put.setdefault((one.key, *key), []).append(value)
            self.network.changed.notify_all()

    def _take(self, gpu, one, key):
        """Wait for what another rank gives, as the kernels of NCCL do: for ever, unless the communicator is aborted."""
        end = time.monotonic() + 30
        while True:
            with self.network.changed:
                found = self.network.put.get((one.key, *key))
                if found:
                    return found.pop(0)
                self.network.changed.wait(0.01)
            assert time.monotonic() < end
            if one.aborted:
                return ("", 0, 0, [], np.zeros(0))
            gpu.ranks.check()  # as the host does while it waits for the stream


def memory(address, count, kind):
    size = count * np.dtype(kind).itemsize
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), kind)


def reduced(arrays, op):
    with np.errstate(all="ignore"):
        found = arrays[0].copy()
        for other in arrays[1:]:
            found = OPS[op](found, other)
    return found
