"""Runs numbered cases in child processes: a crash or an endless case costs one child, and its number is known."""

from __future__ import annotations

import io
import json
import mmap
import os
import resource
import select
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PATIENCE = 60.0  # seconds without a word from a child
GRACE = 2.0  # seconds in which Ctrl-C has to end whatever a child does
MEMORY = 6 << 30  # bytes of address space for what a child takes besides what its parent has
Case = Callable[[int], str]
_THEIRS = mmap.mmap(-1, 1)  # shared with the children: 1 while code runs that is not ours


@contextmanager
def not_ours() -> Iterator[None]:
    """Mark work of others beside which results are held: where it crashes or hangs, that is not a failure."""
    _THEIRS[0] = 1
    try:
        yield
    finally:
        _THEIRS[0] = 0


def run(
    case: Case,
    numbers: range,
    seconds: float = float("inf"),
    patience: float = PATIENCE,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[Counter[str], list[str]]:
    """Run ``case(number)`` for each number, until the time is over.

    A case returns a word for what became of it. What it raises and what ends its process is a failure. A case that
    takes longer than ``patience`` seconds, without those in which it waits for a core, gets a Ctrl-C: what it makes of
    the ``KeyboardInterrupt`` is up to it, and one that does not come back then is a failure.

    Returns
    -------
    outcomes : Counter
        How often each word came back.
    failures : list of str
        One text for each, with the number that repeats it; ``say`` has each at once.
    """
    outcomes: Counter[str] = Counter()
    failures: list[str] = []
    end = time.monotonic() + seconds
    at = numbers.start
    while at < numbers.stop and time.monotonic() < end:
        known = len(failures)
        at = _child(case, range(at, numbers.stop), end, patience, outcomes, failures)
        for text in failures[known:]:
            say(text)
    return outcomes, failures


def _child(
    case: Case, numbers: range, end: float, patience: float, outcomes: Counter[str], failures: list[str]
) -> int:
    """Run cases in one child until it ends; return the number to go on with."""
    _THEIRS[0] = 0
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            _work(case, numbers, end, writer)
        finally:  # also where a Ctrl-C comes between two cases
            os._exit(1)
    os.close(writer)
    current, words, heard, asked = numbers.start, b"", True, False
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        while heard or not asked:
            if not heard:
                os.kill(child, signal.SIGINT)
            asked = not heard
            heard = _hears(pipe, child, GRACE if asked else patience)
            if not heard:
                continue
            data = pipe.read(1 << 16)
            if not data:
                break
            *lines, words = (words + data).split(b"\n")
            for line in lines:
                number, outcome, text = json.loads(line)
                current = number + 1
                outcomes[outcome] += 1
                if text:
                    failures.append(f"case {number}: {text}")
    if not heard:
        os.kill(child, signal.SIGKILL)
    return _ended(child, heard, current, numbers, outcomes, failures)


def _hears(pipe: io.FileIO, child: int, patience: float) -> bool:
    """Return True if a child writes within ``patience`` seconds; those in which it waited for a core do not count."""
    begin, before = time.monotonic(), _queued(child)
    rest = patience
    while rest > 0:
        if select.select([pipe], [], [], rest)[0]:
            return True
        waited = max((seconds - before.get(thread, 0.0) for thread, seconds in _queued(child).items()), default=0.0)
        rest = patience + waited - (time.monotonic() - begin)
    return False


def _queued(process: int) -> dict[int, float]:
    """Return the seconds that each thread of a process and of its children has waited for a core.

    Empty on systems that do not count them.
    """
    found: dict[int, float] = {}
    for folder in Path(f"/proc/{process}/task").glob("*"):
        with suppress(OSError, IndexError):  # a thread that has ended
            found[int(folder.name)] = int((folder / "schedstat").read_text().split()[1]) / 1e9
            for other in (folder / "children").read_text().split():
                found |= _queued(int(other))
    return found


def _ended(
    child: int, heard: bool, current: int, numbers: range, outcomes: Counter[str], failures: list[str]
) -> int:
    """Look at how a child ended; return the number to go on with."""
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        return numbers.stop if os.WEXITSTATUS(status) == 0 else current
    what = f"ends its process with {signal.Signals(os.WTERMSIG(status)).name}" if heard else "hangs"
    if _THEIRS[0]:
        outcomes[f"the reference {what}"] += 1
    else:
        outcomes[what] += 1
        failures.append(f"case {current}: {what}")
    return current + 1


def _work(case: Case, numbers: range, end: float, writer: int) -> None:
    """The life of a child: cases, each followed by a line about it; never returns."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
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
        except KeyboardInterrupt:
            line = [number, "hangs", "hangs\n" + traceback.format_exc(limit=-4)]
        except BaseException:
            line = [number, "raises", traceback.format_exc(limit=-4)]
        os.write(writer, json.dumps(line).encode() + b"\n")
    os._exit(0)
