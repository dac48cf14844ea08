"""Child process of a gang: one rank, which runs calls on parts of arrays in shared memory.

Messages are those of :mod:`aotc.vmfb.ranks.frames`, on a pair of sockets. A second pipe carries nothing: its end is the
end of the gang's process, which a thread of its own notices also during a call.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import threading
from collections.abc import Sequence
from functools import partial
from mmap import mmap
from time import perf_counter
from typing import Any, NoReturn

import numpy as np

from aotc.vmfb.api.buckets import has_buckets
from aotc.vmfb.errors import CallError, Error
from aotc.vmfb.gang.shared_arrays import SharedFunction, mapped_memory
from aotc.vmfb.gang.states import RankStates
from aotc.vmfb.module import LoadedModule, load
from aotc.vmfb.ranks.frames import MOST_BYTES, FrameReader, send_frame
from aotc.vmfb.ranks.ranks import Ranks

ORPHANED = 75  # the exit status of a rank whose gang ended


def serve() -> None:
    """Run one rank: ``sys.argv`` has the descriptors of the socket, of the pipe and of the shared memory."""
    channel, life, memory = map(int, sys.argv[1:4])
    threading.Thread(target=_end_with_the_gang, args=(life,), daemon=True).start()
    sock = socket.socket(fileno=channel)
    sock.setblocking(False)
    reader = FrameReader(sock)
    try:
        options = _next_gang_message(reader)
        try:
            _serve_calls(sock, reader, options, memory)
        except ConnectionError:
            raise
        except BaseException as error:  # also SystemExit of a custom call: the caller is told
            send_frame(sock, {"error": _error_as_data(error)})
            _end_process(1)
    except ConnectionError:  # the gang was closed
        _end_process(0)


def _end_process(status: int) -> NoReturn:
    """End at once: the other ranks notice closed connections, and nothing here needs an orderly end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _end_with_the_gang(life: int) -> None:
    os.read(life, 1)
    os._exit(ORPHANED)


def _next_gang_message(reader: FrameReader) -> dict[str, Any]:
    while True:
        message = reader.read()
        if message is not None:
            return message
        select.select([reader.sock], [], [])


def _serve_calls(sock: socket.socket, reader: FrameReader, options: dict[str, Any], file: int) -> None:
    """Load the bundle as one rank, and answer the gang's messages: calls, steps of a state, recordings.

    Arrays are passed in the shared memory of the descriptor ``file``.
    """
    ranks = Ranks(*options["ranks"])
    module = load(options["path"], ranks=ranks, **options["keywords"])
    own = {name: entry for name, entry in module.functions.items() if not has_buckets(module.get_function(name))}
    calls = {name: _Call(module, name, ranks.rank) for name in own}
    memory = mapped_memory(file)
    os.close(file)
    send_frame(sock, {"signatures": {name: repr(entry.signature) for name, entry in own.items()}})
    states = RankStates(module)
    while True:
        match _next_gang_message(reader):
            case {"record": str(name), "calls": int(count), "file": str(path)}:
                calls[name].record(memory, count, path)
                send_frame(sock, {})
            case {"step": str(name), "state": int(number), "dropped": list(dropped)}:
                calls[name].step(memory, states, number, dropped)
                send_frame(sock, {})
            case {"call": str(name)}:
                send_frame(sock, {"seconds": calls[name].run(memory)})
            case message:
                raise CallError("", f"the gang sent an unknown message: {sorted(message)}")


class _Call:
    """The calls of one function, whose arrays stay where they are."""

    def __init__(self, module: LoadedModule, name: str, rank: int) -> None:
        assert module.mesh is not None  # ``load`` refuses ranks for other bundles
        self._module, self._name, self._rank = module, name, rank
        self._shared = SharedFunction(module.mesh, module.functions[name].signature)
        self._arrays: tuple[list[Any], list[Any]] | None = None

    def _arrays_in(self, memory: mmap) -> tuple[list[Any], list[Any]]:
        """Return the arguments and the buffers of results."""
        if self._arrays is None:
            shared, rank = self._shared, self._rank
            self._arrays = shared.rank_arguments(memory, rank), shared.rank_results(memory, rank)
        return self._arrays

    def record(self, memory: mmap, calls: int, path: str) -> None:
        """Record some calls, and write the recording to a file."""
        from aotc.vmfb.gang.rank_recording import record_calls_on_rank  # only for profiles

        values, out = self._arrays_in(memory)
        call = partial(self._module.invoke, self._name, *values, out=out)
        found = record_calls_on_rank(self._module, self._name, call, values, calls)
        with open(path, "w", encoding="utf-8") as file:
            json.dump(found, file)

    def step(self, memory: mmap, states: RankStates, number: int, dropped: Sequence[int]) -> None:
        """Run a call on the first argument in shared memory and a state; write the first result to shared memory."""
        values, out = self._arrays_in(memory)
        first = states.step(self._name, values[0], number, dropped)
        if out[0] is not None:
            out[0][...] = np.asarray(first)

    def run(self, memory: mmap) -> float:
        """Run a call; return its time in seconds."""
        values, out = self._arrays_in(memory)
        start = perf_counter()
        self._module.invoke(self._name, *values, out=out)
        return perf_counter() - start


def _error_as_data(error: BaseException) -> dict[str, Any]:
    """Return an error as plain data: the gang raises it again."""
    ours = isinstance(error, Error)
    text = str(error) if ours else f"{type(error).__name__}: {error}"
    kind = type(error).__name__ if ours else ""
    return {"kind": kind, "text": text[: MOST_BYTES // 16], "rank": getattr(error, "rank", None)}
