"""Runs numbered cases in child processes: a crash or an endless case costs one child, and its number is known."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable

PATIENCE = 60.0  # seconds without a word from a child
MEMORY = 6 << 30  # bytes of address space for what a child takes besides what its parent has
Case = Callable[[int], str]


def never(number: int) -> bool:
    """No case may hang."""
    return False


def run(
    case: Case,
    numbers: range,
    seconds: float = float("inf"),
    may_hang: Callable[[int], bool] = never,
    patience: float = PATIENCE,
) -> tuple[Counter[str], list[str]]:
    """Run ``case(number)`` for each number, until the time is over.

    A case returns a word for what became of it. What it raises, what ends its process and what takes longer than
    ``patience`` seconds, though it may not, is a failure.

    Returns
    -------
    outcomes : Counter
        How often each word came back.
    failures : list of str
        One text for each, with the number that repeats it.
    """
    outcomes: Counter[str] = Counter()
    failures: list[str] = []
    end = time.monotonic() + seconds
    at = numbers.start
    while at < numbers.stop and time.monotonic() < end:
        at = _child(case, range(at, numbers.stop), end, patience, outcomes, failures)
        if failures and failures[-1].endswith(": hangs") and may_hang(at - 1):
            failures.pop()
    return outcomes, failures


def _child(
    case: Case, numbers: range, end: float, patience: float, outcomes: Counter[str], failures: list[str]
) -> int:
    """Run cases in one child until it ends; return the number to go on with."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _work(case, numbers, end, writer)
    os.close(writer)
    current, words = numbers.start, b""
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        while True:
            ready, _, _ = select.select([pipe], [], [], patience)
            data = pipe.read(1 << 16) if ready else b""
            words += data
            *lines, words = words.split(b"\n")
            for line in lines:
                number, outcome, text = json.loads(line)
                current = number + 1
                outcomes[outcome] += 1
                if text:
                    failures.append(f"case {number}: {text}")
            if not data:
                break
    if not ready:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        what = "hangs" if not ready else f"ends its process with {signal.Signals(os.WTERMSIG(status)).name}"
        outcomes[what] += 1
        failures.append(f"case {current}: {what}")
        return current + 1
    return numbers.stop if os.WEXITSTATUS(status) == 0 else current


def _work(case: Case, numbers: range, end: float, writer: int) -> None:
    """The life of a child: cases, each followed by a line about it; never returns."""
    with open("/proc/self/statm") as f:
        used = int(f.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    sys.setrecursionlimit(1000)
    for number in numbers:
        if time.monotonic() > end:
            break
        try:
            line = [number, case(number), ""]
        except BaseException:
            line = [number, "raises", traceback.format_exc(limit=-4)]
        os.write(writer, json.dumps(line).encode() + b"\n")
    os._exit(0)
