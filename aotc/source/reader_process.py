"""Child process that reads models from files before this process does.

MLIR's readers check little: about one in ten damaged bytecode files or ``jax.export`` blobs crashes them, which would
end the process. The child reads and imports the model first; a crash of the child is an error here. The child starts
while the compiler is imported, and waits for further models until it has been idle for a minute.

A request is a frame of msgpack, then the model's bytes; a reply is a frame of msgpack, then a module's bytes.
"""

from __future__ import annotations

import atexit
import os
import select
import signal
import struct
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

import msgpack

from aotc.vmfb.host.children import python_command
from aotc.vmfb.host.locks import after_fork, new_lock

# Bytes of one read from, or write to, a pipe: the capacity of a pipe. A larger buffer would be wasted memory. Linux,
# /proc/sys/fs/pipe-max-size.
PIPE_BYTES = 1 << 20


_LENGTHS = struct.Struct("<QQ")  # lengths of the msgpack and of the following bytes
# Seconds without a request after which the reader process ends: it takes 150 MB, and half a second to start.
READER_IDLE_SECONDS = 60


_START = f"from aotc.frontend.child_reader import serve_read_requests; serve_read_requests({READER_IDLE_SECONDS})"


@dataclass(frozen=True, slots=True)
class ReadResult:
    """Result of the child process for one model.

    Attributes
    ----------
    problem : str
        The reason why this process must not read the model, or an empty string.
    error : str
        MLIR's error for a model that it rejects, or an empty string.
    module : bytes
        The module as MLIR writes it, on request: well-formed bytecode, whatever the input was.
    """

    problem: str = ""
    error: str = ""
    module: bytes = b""


class ReaderProcess:
    """The child process that reads models, with its pipes; it handles one request at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            python_command(_START), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin.fileno(), self._process.stdout.fileno()

    def ask(self, request: Mapping[str, Any], data: bytes, seconds: float) -> ReadResult | None:
        """Send ``data`` to the child and return its result; None if the idle child had ended before."""
        end = time.monotonic() + seconds
        try:
            write_frame(self._to, request, data)
            lengths = _LENGTHS.unpack(self._read(_LENGTHS.size, end))
            reply, module = (self._read(size, end) for size in lengths)
        except TimeoutError:
            self.end()
            return ReadResult(f"reading it takes longer than {seconds:g} s")
        except (EOFError, BrokenPipeError):
            return self._ended_child_error(request, len(data))
        except BaseException:
            self.end()
            raise
        return ReadResult(**msgpack.unpackb(reply), module=module)

    def end(self) -> None:
        """Kill the child process."""
        self._process.kill()
        self._process.wait()
        self.close()

    def close(self) -> None:
        """Close the pipes; a child that waits for a request then exits."""
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with suppress(OSError):
                stream.close()

    def _read(self, size: int, end: float) -> bytes:
        """Read ``size`` bytes of the child's reply; raise TimeoutError at the time ``end``, EOFError at its end."""
        parts = []
        while size:
            if not select.select([self._from], [], [], max(0, end - time.monotonic()))[0]:
                raise TimeoutError
            part = os.read(self._from, min(size, PIPE_BYTES))
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _ended_child_error(self, request: Mapping[str, Any], size: int) -> ReadResult | None:
        """Return the result for a child that ended during a request; None if it had ended before."""
        status, memory = self._process.wait(), request["memory"]
        self.close()
        if status == 0:
            return None
        if status == -signal.SIGXCPU:
            return ReadResult(f"reading its {size:,} bytes takes longer than {request['cpu']} s of processor time")
        how = signal.strsignal(-status) if status < 0 else f"exit status {status}"
        more = f", or needs more than {memory >> 20:,} MB" if memory else ""
        return ReadResult(f"MLIR crashes when it reads it ({how}){more}")


_LOCK = new_lock()
_READERS: list[ReaderProcess] = []
"""The child of this process, or empty."""


@after_fork
def _leave_to_parent() -> None:
    while _READERS:
        _READERS.pop().close()


@atexit.register
def _close_child_pipes() -> None:
    while _READERS:
        _READERS.pop().close()


# Bytes of memory for reading an untrusted source, besides UNTRUSTED_RATIO times its size. A small model takes some
# megabytes; a source of 100 kB that allocates all memory is refused.
UNTRUSTED_BYTES = 1 << 30
# Bytes of memory for each byte of an untrusted source: MLIR's ops take more memory than their bytecode.
UNTRUSTED_RATIO = 16


def reader_memory_limit(data: bytes) -> int:
    """Return the number of bytes that the child may allocate to read ``data`` of unknown origin."""
    return UNTRUSTED_BYTES + UNTRUSTED_RATIO * len(data)


def prepare_reader_process() -> None:
    """Start the child process that reads models, unless it runs.

    It imports MLIR while this process imports the compiler.

    Raises
    ------
    OSError
        If the system cannot start a process.
    """
    with _LOCK:
        if not _READERS:
            _READERS.append(ReaderProcess())


def prepare_reader_for_model(model: Any) -> None:
    """Start the child process if ``model``, bytes or the path of a file, is not text."""
    head = model
    with suppress(OSError, ValueError):  # the actual read reports the error
        if isinstance(model, str | os.PathLike) and os.path.isfile(model):  # bytes of a pipe would be lost
            with open(model, "rb") as file:
                head = file.read(8)
        if isinstance(head, bytes | bytearray) and any(b < 9 or b > 126 for b in head[:8]):
            prepare_reader_process()


# Seconds of wall time until the process that reads a model of unknown origin is stopped, whatever the model's size.
READER_SECONDS = 600
# Seconds of processor time for reading a model, besides those for its size: a damaged file of 1 kB can make MLIR's
# reader loop without end. A small model takes 0.1 s. Processor time, unlike wall time, hardly depends on other
# processes; the factor is for slow machines.
READER_CPU_SECONDS = 20
# Seconds of processor time for each MB: reading and importing one takes 1 to 5 s.
READER_CPU_SECONDS_PER_MB = 60


def reader_cpu_seconds(size: int) -> int:
    """Return the processor time in seconds that the child may use for a model of ``size`` bytes."""
    return READER_CPU_SECONDS + size * READER_CPU_SECONDS_PER_MB // (1 << 20)


def read_in_child(
    data: bytes, path: str = "", metadata: Mapping[str, Any] | None = None, memory: int = 0, rewrite: bool = False,
    seconds: float = READER_SECONDS,
) -> ReadResult:  # fmt: skip
    """Read and import MLIR bytecode in the child process, and report if it survives.

    Parameters
    ----------
    data : bytes
        The model.
    path : str
        File of the model, for messages.
    metadata : mapping, optional
        jax.export's metadata of the model.
    memory : int
        Bytes that the child may allocate in addition; 0 for no limit.
    rewrite : bool
        Return the module as MLIR writes it.
    seconds : float
        Wall time after which the child is killed. The size of ``data`` limits its processor time.

    Returns
    -------
    ReadResult
        Without a problem if the child survived. The child does not report errors of the model itself: this process
        reads it again.
    """
    request = {
        "path": path, "metadata": dict(metadata or {}), "memory": memory, "cpu": reader_cpu_seconds(len(data)),
        "rewrite": rewrite,
    }  # fmt: skip
    found = None
    while found is None:  # an idle child may end just when a request comes
        try:
            with _LOCK:
                reader = _READERS.pop() if _READERS else ReaderProcess()
        except OSError as error:
            return ReadResult(f"the system starts no process to read it in: {error.strerror}")
        found = reader.ask(request, data, seconds)
        if found is not None and reader._process.returncode is None:
            with _LOCK:
                _READERS.append(reader)
    return found


def write_frame(descriptor: int, message: Mapping[str, Any], data: bytes) -> None:
    """Write a message, followed by bytes, to a pipe."""
    packed = msgpack.packb(message)
    for part in (_LENGTHS.pack(len(packed), len(data)), packed, data):
        view = memoryview(part)
        while view:
            view = view[os.write(descriptor, view[:PIPE_BYTES]) :]


def read_frame(stream: IO[bytes]) -> tuple[Any, bytes] | None:
    """Return the next message with its bytes, or None at the end of the stream."""
    lengths = stream.read(_LENGTHS.size)
    if len(lengths) < _LENGTHS.size:
        return None
    head, size = _LENGTHS.unpack(lengths)
    return msgpack.unpackb(stream.read(head)), stream.read(size)
