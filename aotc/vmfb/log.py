"""Messages for the logger ``aotc`` of the standard library's ``logging``.

A program that wants them has imported ``logging``; nothing here imports it, and without it a message costs a lookup.
No message is a warning, so nothing is printed unless the program sets a level. Calls of functions log nothing.
"""

from __future__ import annotations

import sys

# The levels of ``logging``.
DEBUG, INFO = 10, 20


def log(level: int, message: str, *values: object) -> None:
    """Log ``message % values``, if the program uses ``logging``."""
    get = getattr(sys.modules.get("logging"), "getLogger", None)  # another thread may be importing the module
    if get is not None:
        get("aotc").log(level, message, *values, stacklevel=2)
