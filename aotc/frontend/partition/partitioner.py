"""Ask XLA's partitioner, which runs in a child process: a request and a program in, facts and a program out."""

from __future__ import annotations

import re
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from typing import IO, Any

from aotc.diagnostics import CompileError, Loc
from aotc.source.reader_process import read_frame, write_frame
from aotc.vmfb.host.children import python_command

_CHILD = "from aotc.frontend.partition.xla_child import serve; serve()"
_FATAL = re.compile(r"F\d{4} [\d:.]+\s+\d+ \S+\] (.*)")
# Seconds that XLA may take for a program: 32 layers for 512 devices take two.
PARTITION_SECONDS = 600
# Flags of XLA that decide on the program. Without the last one, groups of devices are axes of a mesh, whose order of
# devices the conversion to StableHLO loses.
FLAGS = (("xla_backend_optimization_level", 0), ("xla_enable_rgv3_materialization", False))


def ask_partitioner(request: Mapping[str, Any], code: bytes, path: str) -> tuple[dict[str, Any], bytes]:
    """Send a request to the child process and return its reply: fields and data.

    The folder of XLA's files is removed here, after the child has ended: its compiler still writes files there when the
    reply is ready.
    """
    with (
        tempfile.TemporaryDirectory(prefix="aotc-partition-") as folder,
        tempfile.TemporaryFile() as source,
        tempfile.TemporaryFile() as sink,
        tempfile.TemporaryFile() as messages,
    ):
        write_frame(source.fileno(), {**request, "folder": folder, "flags": FLAGS}, code)
        source.seek(0)
        try:
            command, limit = python_command(_CHILD), PARTITION_SECONDS
            ended = subprocess.run(command, stdin=source, stdout=sink, stderr=messages, timeout=limit, check=False)
        except OSError as error:
            message = f"the system starts no process for XLA's partitioner: {error.strerror}"
            raise CompileError.at(Loc(path), message) from None
        except subprocess.TimeoutExpired:
            message = f"XLA partitions the program for more than {PARTITION_SECONDS} s"
            raise CompileError.at(Loc(path), message, hint="a smaller program, or fewer devices") from None
        sink.seek(0)
        frame = read_frame(sink) if ended.returncode == 0 else None
        if frame is None:
            message = f"XLA's partitioner ended ({_exit_status_text(ended.returncode)}){_fatal_message(messages)}"
            raise CompileError.at(Loc(path), message, hint="other shardings, or jax.shard_map in place of jax.jit")
        return frame


def _exit_status_text(status: int) -> str:
    return str(signal.strsignal(-status)) if status < 0 else f"exit status {status}"


def _fatal_message(messages: IO[bytes]) -> str:
    """Return the first line of XLA's fatal check, as a suffix for an error message; empty if there is none."""
    messages.seek(0)
    for line in messages.read().decode(errors="replace").splitlines():
        if match := _FATAL.match(line):
            return f": {match[1]}"
    return ""
