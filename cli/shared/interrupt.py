"""Handle Ctrl-C in the ``aotc`` command: print one line, and exit with the code that shells expect."""

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
def resend_dropped_interrupts() -> Iterator[None]:
    """Raise an interrupt again if Python drops it in the ``with`` block, unless the process has its own handler."""
    before = sys.unraisablehook
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        sys.unraisablehook = _resend_interrupt
    try:
        yield
    finally:
        sys.unraisablehook = before


def end_interrupted() -> NoReturn:
    """Print a message and exit; further interrupts are ignored."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print("interrupted", file=sys.stderr)
    sys.exit(INTERRUPTED)


def _resend_interrupt(unraisable: sys.UnraisableHookArgs) -> None:
    """Send the interrupt again a little later: Python drops exceptions from finalizers and collector callbacks."""
    if not issubclass(unraisable.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)
        return
    timer = threading.Timer(_AGAIN_SECONDS, os.kill, (os.getpid(), signal.SIGINT))
    timer.daemon = True
    timer.start()
