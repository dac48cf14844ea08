"""Log messages for ``logging.getLogger("aotc")``.

A program that reads log messages has imported ``logging`` itself. This module never imports it, to keep start-up fast.
No message is a warning, so nothing is printed unless the program sets a level. Calls of functions log nothing.
"""

from __future__ import annotations

import sys

# The levels of ``logging``.
DEBUG, INFO = 10, 20


def log(level: int, message: str, *values: object) -> None:
    """Log ``message % values`` at a level of ``logging``; do nothing if the program has not imported ``logging``."""
    get = getattr(sys.modules.get("logging"), "getLogger", None)  # another thread may be importing the module
    if get is not None:
        get("aotc").log(level, message, *values, stacklevel=2)
