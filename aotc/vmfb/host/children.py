"""Python processes that import what this one imports."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_ROOT = str(Path(__file__).parents[3])


def python_command(code: str, *arguments: str) -> list[str]:
    """Return the command that runs ``code`` with the module path of this process and ``arguments`` in ``sys.argv``.

    Python itself would put the working folder first, and leave out what this process added: a folder that holds
    another ``aotc``, or an older ``numba``, would answer in the place of ours. This package comes first; the working
    folder, which an interactive process looks into, is left out.
    """
    paths = [_ROOT, *(os.path.abspath(p) for p in sys.path if isinstance(p, str) and p)]
    program = f"import sys\nsys.path[:] = {list(dict.fromkeys(paths))!r}\n{code}"
    return [sys.executable, "-P", "-c", program, *arguments]
