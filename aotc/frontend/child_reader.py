"""Child process of :mod:`aotc.source.reader_process`: reads and imports models that may crash it."""

from __future__ import annotations

import math
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

from aotc.diagnostics import CompileError, InternalError
from aotc.frontend.importer import import_raw
from aotc.frontend.journal import Journal
from aotc.frontend.mlir import RawModel
from aotc.frontend.mlir_types import module_bytes
from aotc.source.reader_process import read_frame, write_frame


def serve_read_requests(idle: float) -> None:
    """Answer read requests until the parent closes the pipe, or sends none for ``idle`` seconds."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    output = os.dup(1)
    os.dup2(2, 1)
    while select.select([0], [], [], idle)[0] and (frame := read_frame(sys.stdin.buffer)) is not None:
        write_frame(output, *_answer_read_request(*frame))


def _answer_read_request(request: Mapping[str, Any], data: bytes) -> tuple[dict[str, str], bytes]:
    """Read one model; return the fields of a :class:`ReadResult` except its module, and the module's bytes."""
    modules: list[bytes] = []
    reply = {"problem": "", "error": ""}
    _limit_memory(request["memory"])
    _limit_processor(request["cpu"])
    try:
        import_raw(
            RawModel(data, request["path"], request["metadata"]), Journal(),
            parsed=lambda module: modules.append(module_bytes(module) if request["rewrite"] else b""),
        )  # fmt: skip
    except (CompileError, InternalError) as error:  # errors of the importer are left to the parent
        if isinstance(error.__cause__, MemoryError):
            reply["problem"] = f"reading it needs more than {request['memory'] >> 20:,} MB"
        elif not modules:
            reply["error"] = str(error).partition("\n")[0]
    finally:
        _limit_memory(0)
        _limit_processor(None)
    return reply, modules[0] if modules else b""


def _limit_memory(memory: int) -> None:
    """Limit the memory that this process may allocate from now on to ``memory`` bytes; 0 for no limit."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    soft = hard
    if memory:
        with open("/proc/self/statm", encoding="ascii") as file:
            soft = int(file.read().split()[5]) * resource.getpagesize() + memory
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _limit_processor(seconds: int | None) -> None:
    """End this process by SIGXCPU after ``seconds`` of processor time from now; None for no limit."""
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = math.ceil(time.process_time()) + seconds if seconds is not None else hard
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
