"""Command line of a child Python process with the import path of this process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_ROOT = str(Path(__file__).parents[3])


def python_command(code: str, *arguments: str) -> list[str]:
    """Return the command that runs ``code`` with this process's ``sys.path`` and ``arguments`` in ``sys.argv``.

    Python itself would put the working folder first and omit paths that this process added. Another ``aotc``, or an
    older ``numba``, could then be imported. The folder of this package comes first in the child; the working folder,
    which is on the path of an interactive process, is omitted.
    """
    paths = [_ROOT, *(os.path.abspath(p) for p in sys.path if isinstance(p, str) and p)]
    program = f"import sys\nsys.path[:] = {list(dict.fromkeys(paths))!r}\n{code}"
    return [sys.executable, "-P", "-c", program, *arguments]
