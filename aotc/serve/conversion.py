"""Convert requests and responses between bytes and arrays: small ones in this process, large ones in another."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from aotc.serve.background_threads import run_in_background
from aotc.serve.errors import BAD, CLOSED, TOO_LONG, RequestFault
from aotc.serve.job_pipe import Job, read, write
from aotc.serve.limits import INLINE_BYTES, SPARE_CONVERTER_BYTES
from aotc.serve.protocol import (
    HEADER_LENGTH,
    InferRequest,
    infer_response_body,
    json_size,
    parse_infer,
    parse_object,
    requested_outputs,
)
from aotc.serve.tensors import Buffer, datatype_of, tensor_to_bytes
from aotc.vmfb.dtypes import from_numpy
from aotc.vmfb.host.children import python_command

_PROGRAM = "from aotc.serve.converter import run_jobs\nrun_jobs()"
_ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class ConverterFailed(RuntimeError):
    """A converter process failed because of a bug in the server."""


# Numbers in a response up to which the event loop writes the text itself; a separate process writes longer ones,
# because the event loop serves no other client meanwhile. At this size writing f32 takes 5 ms, 0.6 us each.
INLINE_ELEMENTS = 1 << 13
# Converter processes: large requests and responses converted at the same time; others wait. With two, a slow conversion
# does not block all others. Each may use EXPANSION times the maximum JSON size.
CONVERTERS = 2
# Bytes of memory that a converter process may use for each byte of JSON; beyond that the request is refused. The worst
# document, of objects with one entry, takes 30; arrays and text are created from it as well.
EXPANSION = 48
# Minimum bytes that a number of a result sent as text counts for. Its text and its Python object have about the same
# size whatever its type.
NUMBER_BYTES = 4


class Conversion:
    """Parser of requests and writer of responses that does not block the event loop for long.

    Parameters
    ----------
    most : int
        Maximum bytes of JSON in a request, and of results in JSON.

    Attributes
    ----------
    turn : asyncio.Lock
        Locked during a conversion in this process, so that the event loop can serve other requests, such as health
        checks, between two conversions.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.turn = asyncio.Lock()
        self._free = asyncio.Semaphore(CONVERTERS)
        self._idle: list[_ConverterProcess] = []

    async def read_request(self, body: bytes, header_length: str | None, where: str, most: int) -> InferRequest:
        """Parse an inference request over HTTP, as :func:`~aotc.serve.protocol.parse_infer` does.

        Raises
        ------
        RequestFault
            If it is malformed, or has too much JSON.
        """
        if self.is_large(json_size(body, header_length, where), where, "binary tensors, or --max-json-mb"):
            job = {"job": "json_request", "where": where, "most": most, "header_length": header_length}
            body, length = await self.run(job, body)
            header_length = str(length)
        async with self.turn:
            return parse_infer(body, header_length, where, most)

    async def read_tokens(self, body: bytes, where: str) -> dict[str, Any]:
        """Parse a generation request over HTTP; long lists ``tokens`` and ``stop`` become arrays of int64.

        Raises
        ------
        RequestFault
            If it is malformed or too long.
        """
        if not self.is_large(len(body), where, "--max-json-mb"):
            async with self.turn:
                return parse_object(body, where)
        data, length = await self.run({"job": "json_tokens", "where": where}, body)
        assert length is not None
        document = json.loads(data[:length])
        for key in ("tokens", "stop"):
            size = document[key]
            document[key] = np.frombuffer(data, np.int64, size // 8, length)
            length += size
        return document

    async def write_answer(
        self, name: str, version: int, request: InferRequest, results: Mapping[str, np.ndarray]
    ) -> tuple[list[Buffer], int | None]:
        """Write an inference response over HTTP, as :func:`~aotc.serve.protocol.infer_response_body` does.

        Raises
        ------
        RequestFault
            If a result cannot be represented in JSON, or is too large for it.
        """
        wanted = requested_outputs(request, results)
        numbers = [results[output] for output, binary in wanted if not binary]
        if not self.check_numbers(numbers, name, '"binary_data": true'):
            async with self.turn:
                return infer_response_body(name, version, request, results)
        arrays = [(n, results[n]) for n, _ in wanted]
        rows = [(n, datatype_of(from_numpy(x.dtype)), list(x.shape), x.nbytes) for n, x in arrays]
        about = {"id": request.id, "where": name, "version": version, "outputs": wanted, "results": rows}
        data, length = await self.run({"job": "json_answer", **about}, *[tensor_to_bytes(x) for _, x in arrays])
        return [data], length

    def check_numbers(self, results: list[np.ndarray], where: str, hint: str) -> bool:
        """Refuse results with too many numbers for JSON; return True if another process must write them.

        Raises
        ------
        RequestFault
            If the results exceed the limit.
        """
        size = sum([x.size * max(x.itemsize, NUMBER_BYTES) for x in results])
        if size > self.most:
            what = "the results are too large to be sent as numbers"
            raise RequestFault(BAD, where, what, f"{size} bytes", f"at most {self.most}", f"{hint}, or --max-json-mb")
        return sum([x.size for x in results]) > INLINE_ELEMENTS

    def is_large(self, size: int, where: str, hint: str) -> bool:
        """Return True if ``size`` bytes of JSON are too many to parse in this process; refuse more than the limit."""
        if size > self.most:
            raise RequestFault(TOO_LONG, where, "the JSON is too long", f"{size} bytes", f"at most {self.most}", hint)
        return size > INLINE_BYTES

    async def run(self, job: Job, *body: Buffer) -> tuple[bytes, int | None]:
        """Run a job of :data:`~aotc.serve.converter.JOBS` in a converter process; cancellation kills the process.

        The parts of ``body`` are concatenated. Return the result's bytes, and the length of its JSON if tensors follow.

        Raises
        ------
        RequestFault
            As raised by the job; also if the process has ended.
        """
        async with self._free:
            process = (
                self._idle.pop() if self._idle else _ConverterProcess(EXPANSION * self.most + SPARE_CONVERTER_BYTES)
            )
            try:
                found = await run_in_background(lambda: process.exchange(job, body))
            except BaseException:
                process.end()
                raise
            if found is None or found[0].get("spent"):
                process.end()
            else:
                self._idle.append(process)
        if found is None:
            what = "the process that parses large requests has ended"
            raise RequestFault(CLOSED, job.get("where", ""), what, hint="again, or a smaller request", retry=1)
        head, data = found
        if "failure" in head:
            raise ConverterFailed(head["failure"])
        if "status" in head:
            raise RequestFault(head["status"], "", head["text"])
        return data, head[HEADER_LENGTH]

    def close(self) -> None:
        """End the idle converter processes; busy ones end with their requests."""
        while self._idle:
            self._idle.pop().end()


class _ConverterProcess:
    """A converter process, started by its first job.

    Parameters
    ----------
    memory : int
        Maximum bytes of its memory.
    """

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._started: subprocess.Popen[bytes] | None = None
        self._ended = False

    def exchange(self, job: Job, body: Sequence[Buffer]) -> tuple[Job, bytes] | None:
        """Send a job to the process and wait for its result; None if the process has ended."""
        if self._started is None:
            command = python_command(_PROGRAM, str(self._memory))
            environment = {**os.environ, **_ONE_THREAD}
            self._started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
            if self._ended:  # killed meanwhile, by another thread
                self._started.kill()
        assert self._started.stdin is not None
        assert self._started.stdout is not None
        with suppress(OSError):
            write(self._started.stdin, job, *body)
            return read(self._started.stdout)
        return None

    def end(self) -> None:
        """Kill the process.

        A thread that waits for its result receives None, and closes the pipes.
        """
        self._ended = True
        if self._started is not None:
            self._started.kill()
            threading.Thread(target=self._started.wait, name="aotc-serve-reap", daemon=True).start()
