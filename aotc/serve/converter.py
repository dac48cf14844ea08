"""Converter process: replaces JSON numbers by binary tensors in large requests, and the reverse in responses.

Python parses JSON, and creates lists of numbers, while it owns the GIL: a document of 60 MB would block the event loop
for seconds even on another thread. So the server sends large documents to a separate process with a memory limit.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from traceback import format_exc
from typing import Any

import numpy as np

from aotc.serve.errors import BAD, TOO_LONG, RequestFault, client_error_text
from aotc.serve.job_pipe import Job, read, write
from aotc.serve.limits import INLINE_BYTES, MOST_TOKENS, SPARE_CONVERTER_BYTES
from aotc.serve.protocol import HEADER_LENGTH, InferRequest, infer_response_body, parse_infer, parse_object
from aotc.serve.tensors import checked_shape, datatype_of, dtype_of, tensor_from_bytes
from aotc.vmfb.dtypes import from_numpy

Done = tuple[bytes, int | None]  # the bytes, and the length of their JSON part


def json_request(job: Job, body: bytes) -> Done:
    """Replace the JSON numbers of an inference request by binary tensors."""
    request = parse_infer(body, job["header_length"], job["where"], job["most"])
    rows, tensors = [], []
    for name, array in request.inputs.items():
        tensors.append(array.tobytes())
        row = {"name": name, "datatype": datatype_of(from_numpy(array.dtype)), "shape": list(array.shape)}
        rows.append({**row, "parameters": {"binary_data_size": len(tensors[-1])}})
    document: dict[str, Any] = {"id": request.id, "inputs": rows}
    document["parameters"] = {"binary_data_output": request.binary}
    if request.timeout is not None:
        document["parameters"]["timeout"] = request.timeout * 1e6
    if request.outputs is not None:
        document["outputs"] = [{"name": n, "parameters": {"binary_data": b}} for n, b in request.outputs]
    return _document_with_tensors(document, tensors, job["where"])


def json_answer(job: Job, body: bytes) -> Done:
    """Write an inference response as JSON, followed by the bytes of the outputs that the client requested in binary."""
    results, at = {}, 0
    for name, datatype, shape, size in job["results"]:
        data = memoryview(body)[at : at + size]
        results[name] = tensor_from_bytes(data, dtype_of(datatype, name), checked_shape(shape, name), name)
        at += size
    request = InferRequest(job["id"], outputs=[(name, binary) for name, binary in job["outputs"]])
    parts, length = infer_response_body(job["where"], job["version"], request, results)
    return b"".join(parts), length


def json_tokens(job: Job, body: bytes) -> Done:
    """Replace the tokens of a generation request by 64-bit integers: ``tokens``, then ``stop``."""
    document, lists = parse_object(body, job["where"]), []
    for key in ("tokens", "stop"):
        values = document.pop(key, None)
        if values is None:
            values = []
        if not isinstance(values, list) or not set(map(type, values)) <= {int}:
            what, expected = f"{key} must be a list of integers", f'"{key}": [1, 2, 3]'
            raise RequestFault(BAD, job["where"], what, type(values).__name__, expected)
        if len(values) > MOST_TOKENS:
            raise RequestFault(TOO_LONG, job["where"], f"too many {key}", len(values), f"at most {MOST_TOKENS}")
        try:
            lists.append(np.array(values, np.int64))
        except OverflowError:
            raise RequestFault(BAD, job["where"], f"one of {key} is out of range", expected="64 bits") from None
    document |= {"tokens": lists[0].nbytes, "stop": lists[1].nbytes}
    return _document_with_tensors(document, [values.tobytes() for values in lists], job["where"])


def _document_with_tensors(document: dict[str, Any], tensors: list[bytes], where: str) -> Done:
    """Return a JSON document followed by the bytes of tensors.

    Raises
    ------
    RequestFault
        If the document is still large without its numbers: the server would have to parse it again.
    """
    head = json.dumps(document).encode()
    if len(head) > INLINE_BYTES:
        what, expected = "the request is too long without its numbers", f"at most {INLINE_BYTES} bytes"
        raise RequestFault(TOO_LONG, where, what, f"{len(head)} bytes", expected)
    return b"".join([head, *tensors]), len(head)


def raw_message(job: Job, body: bytes) -> Done:
    """Replace the numbers of a gRPC request by bytes."""
    from aotc.serve.grpc.tensors import with_raw_inputs  # gRPC is optional

    return with_raw_inputs(body, job["most"]), None


def number_message(job: Job, body: bytes) -> Done:
    """Replace the bytes of a gRPC response by numbers; ``stream`` wraps the response as a stream message."""
    from aotc.serve.grpc.tensors import with_number_outputs  # gRPC is optional

    return with_number_outputs(body, job["stream"]), None


JOBS: dict[str, Callable[[Job, bytes], Done]] = {
    f.__name__: f for f in (json_request, json_answer, json_tokens, raw_message, number_message)
}


def run_jobs() -> None:
    """Run jobs until the pipe ends; ``sys.argv`` contains the memory limit in bytes.

    A response contains ``spent`` if the job used so much memory that a new process should run the next job.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the server, which closes the pipe
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = min(mapped + int(sys.argv[1]), sys.maxsize)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    found: tuple[Job, bytes] | None
    while (found := read(sys.stdin.buffer)) is not None:
        head, body = run_job(*found)
        found = None
        spent = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 > SPARE_CONVERTER_BYTES
        write(sys.stdout.buffer, {**head, "spent": spent}, body)


def run_job(job: Job, body: bytes) -> tuple[Job, bytes]:
    """Run a job; return a message with its result or error."""
    try:
        data, length = JOBS[job["job"]](job, body)
        return {HEADER_LENGTH: length}, data
    except MemoryError:
        what, hint = "parsing the request needs too much memory", "binary tensors, or a smaller request"
        return {"status": TOO_LONG, "text": str(RequestFault(TOO_LONG, job.get("where", ""), what, hint=hint))}, b""
    except RequestFault as error:
        return {"status": error.status, "text": client_error_text(error)}, b""
    except Exception:
        return {"failure": format_exc()}, b""
