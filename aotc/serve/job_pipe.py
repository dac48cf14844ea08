"""Messages between a server and its converter processes.

A message is a line of JSON, followed by the number of bytes that it specifies.
"""

from __future__ import annotations

import json
from typing import IO, Any

from aotc.serve.tensors import Buffer

Job = dict[str, Any]


def write(pipe: IO[bytes], head: Job, *body: Buffer) -> None:
    """Write a message to a pipe: the JSON ``head``, then the parts of its body."""
    pipe.write(json.dumps({**head, "size": sum(map(len, body))}).encode() + b"\n")
    for part in body:
        pipe.write(part)
    pipe.flush()


def read(pipe: IO[bytes]) -> tuple[Job, bytes] | None:
    """Read a message from a pipe: its JSON and its body; return None at the end of the pipe."""
    line = pipe.readline()
    if not line.endswith(b"\n"):
        return None
    head = json.loads(line)
    body = pipe.read(head["size"])
    return (head, body) if len(body) == head["size"] else None
