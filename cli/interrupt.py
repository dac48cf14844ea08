"""Ctrl-C in the ``aotc`` command: one line, and the exit code that shells expect."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from types import FrameType
from typing import NoReturn

INTERRUPTED = 128 + signal.SIGINT
_AGAIN_SECONDS = 0.01


def take_interrupts() -> None:
    """Have SIGINT raise KeyboardInterrupt where it is not lost; this is the program's own process."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def end_interrupted() -> NoReturn:
    """Say so and exit."""
    print("interrupted", file=sys.stderr)
    sys.exit(INTERRUPTED)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise; a little later in a callback of the garbage collector, as jax has one: there it would be lost."""
    codes = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    while frame is not None:
        if frame.f_code in codes:
            timer = threading.Timer(_AGAIN_SECONDS, os.kill, (os.getpid(), number))
            timer.daemon = True
            timer.start()
            return
        frame = frame.f_back
    raise KeyboardInterrupt
