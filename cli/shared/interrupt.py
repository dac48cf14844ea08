"""Ctrl-C in the ``aotc`` command: one line, and the exit code that shells expect."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

INTERRUPTED = 128 + signal.SIGINT
_AGAIN_SECONDS = 0.01


@contextmanager
def interrupts_come_again() -> Iterator[None]:
    """Within this block, an interrupt that is lost comes again, unless the process takes them in its own way."""
    before = sys.unraisablehook
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        sys.unraisablehook = _come_again
    try:
        yield
    finally:
        sys.unraisablehook = before


def end_interrupted() -> NoReturn:
    """Say so and exit; another interrupt, as one that comes again, changes nothing any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print("interrupted", file=sys.stderr)
    sys.exit(INTERRUPTED)


def _come_again(unraisable: sys.UnraisableHookArgs) -> None:
    """Interrupt a little later: what a finalizer or a callback of the garbage collector raises ends there."""
    if not issubclass(unraisable.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)
        return
    timer = threading.Timer(_AGAIN_SECONDS, os.kill, (os.getpid(), signal.SIGINT))
    timer.daemon = True
    timer.start()
