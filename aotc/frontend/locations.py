"""Convert MLIR locations to :class:`Loc`: line of the text, JAX's name stack, the user's source line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxlib.mlir import ir

from aotc.diagnostics import JITTED, Loc
from aotc.support.memoize import memoized
from aotc.vmfb.profile.model_place import scopes_in_name_stack

_TEXT = "-"  # MLIR's file name of a text
_OF = "-:"  # prefix of file names in merged modules
# Nodes of a location that are read, the innermost frames first. JAX records 10 frames, of three nodes each. A location
# of another tool may contain one part twice on each of many levels.
MOST_NODES = 256

_OWN = str(Path(__file__).parents[1])
_INSTALLED = re.compile(r"[\\/](?:site|dist)-packages[\\/]|[\\/]lib(?:64)?[\\/]python3\.\d+[\\/]|^<frozen ")
_LAYER = re.compile(r"(?:.*\.)?([A-Za-z]\w*)\.(?:__call__|call|forward)")
_Frame = tuple[str, str, int]  # function, file and line


def location_of_mlir_op(op: Any, path: str, cache: dict[Any, Loc] | None) -> Loc:
    """Return the location of ``op``.

    All ops of a location share one object, cached in ``cache``; without ``cache``, each op has its own.
    """
    location = op.location
    if cache is None:
        return loc_from_mlir(location, path)
    loc = cache.get(location.attr)
    if loc is None:
        cache[location.attr] = loc = loc_from_mlir(location, path)
    return loc


def loc_from_mlir(location: Any, path: str) -> Loc:
    """Convert an MLIR location to a :class:`Loc`.

    A bare file location of the parsed text (file ``-``, or a name by :func:`name_file`) is a place in the model; any
    other file is the user's source. Of a traceback, the user's line is the innermost one outside of installed packages.
    """
    name, line, column = "", 0, 0
    frames: list[_Frame] = []
    stack, function = [location], ""
    for _ in range(MOST_NODES):
        if not stack:
            break
        location = stack.pop()
        if isinstance(location, ir.NameLoc):
            function = location.name_str
            name = name or function
            stack.append(location.child_loc)
        elif isinstance(location, ir.CallSiteLoc):
            # The callee is visited first: frames are listed from the innermost one out.
            stack += (location.caller, location.callee)
        elif isinstance(location, ir.FusedLoc):
            stack += reversed(location.locations)
        elif isinstance(location, ir.FileLineColLoc):
            if location.filename == _TEXT or location.filename.startswith(_OF):
                line, column = location.start_line, location.start_col
                path = location.filename.removeprefix(_OF) if location.filename != _TEXT else path
            else:
                frames.append((function, location.filename, location.start_line))
    user = next((f for f in frames if not _is_installed(f[1])), frames[0] if frames else ("", "", 0))
    source, innermost = (f"{f[1]}:{f[2]}" if f[1] else "" for f in (user, frames[0] if frames else user))
    name = name.rstrip(":")
    name = _with_layers(name, _functions_inside_trace(name, frames))
    return Loc(path, line, column, name, source, innermost if innermost != source else "")


@memoized
def _is_installed(file: str) -> bool:
    """Return True if a file belongs to an installed package, to Python or to aotc."""
    return file.startswith(_OWN) or _INSTALLED.search(file) is not None


def _functions_inside_trace(name: str, frames: Sequence[_Frame]) -> list[str]:
    """Return the function names of a traceback from the innermost frame out to the traced function.

    If JAX lowered a function separately, its frames begin at that function.
    """
    traced = name.partition("/")[0]
    if not traced.startswith(JITTED):
        return [f[0] for f in frames]
    own = next((n for n, f in enumerate(frames) if f[1].startswith(_OWN)), len(frames))  # aotc, which traces it
    called = traced[len(JITTED) : -1]
    matches = (n for n, f in enumerate(frames[:own]) if f[0].rpartition(".")[2] == called)
    ends = [n for n in matches if not _is_installed(frames[n][1])]
    end = ends[-1] if ends else own if own < len(frames) else 0
    return [f[0] for f in frames[:end]]


def _with_layers(name: str, functions: Sequence[str]) -> str:
    """Add the class names of the called layers to a name stack ``name`` that has no layer names.

    Flax's NNX has no name scopes: the frames ``NN.__call__`` and ``Linear.__call__`` stand for ``NN/Linear``. Equinox's
    name only the classes of Equinox itself, with dots, as ``eqx.nn.Linear``.
    """
    scopes = scopes_in_name_stack(name)
    layers = [match[1] for function in reversed(functions) if (match := _LAYER.fullmatch(function))]
    if len(layers) <= len(scopes) or not all("." in scope for scope in scopes):
        return name
    first, slash, rest = name.partition("/")
    if not first.startswith(JITTED):
        return "/".join([*layers, name.rpartition("/")[2]])
    return "/".join([first, *layers, rest.rpartition("/")[2] if slash else ""]).rstrip("/")


def name_file(module: ir.Module, path: str) -> None:
    """Add the file's name to the locations of a module that was parsed from text, before modules are merged.

    Locations are unchanged where jaxlib cannot modify them (before 0.8).
    """
    if getattr(ir.Operation.location, "fset", None) is None:
        return
    stack = [module.operation]
    with module.context:
        while stack:
            operation = stack.pop()
            place = operation.location
            if isinstance(place, ir.FileLineColLoc) and place.filename == _TEXT:
                operation.location = ir.Location.file(f"{_OF}{path}", place.start_line, place.start_col)
            stack += [op.operation for region in operation.regions for block in region.blocks for op in block]
