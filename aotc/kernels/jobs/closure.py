"""The modules of this package that a module depends on, found in their source texts without importing them.

Python's own parser would take ten times as long as a warm cache saves, so import statements are found by a regular
expression. A match in a docstring only adds a module.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGE = "aotc"
_IMPORT = re.compile(
    rb"\n[ \t]*(?:from[ \t]+(aotc(?:\.\w+)*)[ \t]+import[ \t]+(\([^)]*\)|[^\n#]*)|import[ \t]+(aotc(?:\.\w+)*))"
)
_NAME = re.compile(rb"(\w+)(?:[ \t]+as[ \t]+\w+)?")


def imports_of(source: bytes) -> Iterator[tuple[str, str]]:
    """Yield module and name (or an empty name) of each import from this package in ``source``, even in functions."""
    for module, names, whole in _IMPORT.findall(b"\n" + source):
        if whole:
            yield whole.decode(), ""
        for name in _NAME.findall(names):
            yield module.decode(), name.decode()


def import_closure(entry: str, root: Path = ROOT) -> dict[str, bytes]:
    """Return the texts of all modules that importing and running ``entry`` can load, with their parent packages.

    Parameters
    ----------
    entry : str
        The full name of a module.
    root : Path
        The folder of the package.
    """
    sources: dict[str, bytes] = {}
    waiting = [entry]
    while waiting:
        name = waiting.pop()
        if name in sources:
            continue
        sources[name] = source = _file_of(name, root)[0].read_bytes()
        if name != PACKAGE:
            waiting.append(name.rpartition(".")[0])
        for module, inner in imports_of(source):
            waiting.append(module)
            if inner and _file_of(module, root)[1] and _file_of(f"{module}.{inner}", root)[0].is_file():
                waiting.append(f"{module}.{inner}")
    return sources


@cache
def _file_of(name: str, root: Path) -> tuple[Path, bool]:
    """Return the path that a module would have, and whether it is a package."""
    path = root.joinpath(*name.split("."))
    package = path / "__init__.py"
    return (package, True) if package.is_file() else (path.with_suffix(".py"), False)
