"""Read models (StableHLO, JAX functions and exports) and import them as tensor IR."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Defer ``KeyboardInterrupt`` to the end of the ``with`` block; a signal handler of the caller is not replaced."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    noted: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: noted.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if noted:
        raise KeyboardInterrupt


os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")  # as `import jax` does: XLA logs no start-up lines to stderr
with defer_interrupts():  # a Python exception during the load of jaxlib's libraries ends the process
    from jaxlib.mlir.dialects import chlo, mhlo, mpmd, sdy, stablehlo  # noqa: F401
