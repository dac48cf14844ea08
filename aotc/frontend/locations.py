"""MLIR locations to :class:`Loc`: line of the text, JAX's name stack, the user's line."""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir

from aotc.diagnostics import Loc

_TEXT = "-"  # MLIR's file name of a text
_OF = "-:"  # prefix of file names in merged modules


def place_of(op: Any, path: str, known: dict[Any, Loc] | None) -> Loc:
    """Return the location of ``op``.

    All ops of a location share one object, cached in ``known``; without ``known``, each op has its own.
    """
    location = op.location
    if known is None:
        return to_loc(location, path)
    loc = known.get(location.attr)
    if loc is None:
        known[location.attr] = loc = to_loc(location, path)
    return loc


def to_loc(location: Any, path: str) -> Loc:
    """Return place and trace of ``location``.

    A bare file location of the parsed text (file ``-``, or a name by :func:`name_file`) is a place in the model; any
    other file is the user's source.
    """
    names: list[str] = []
    source = ""
    line = column = 0
    while True:
        if isinstance(location, ir.NameLoc):
            names.append(location.name_str)
            location = location.child_loc
        elif isinstance(location, ir.CallSiteLoc):
            location = location.callee
        elif isinstance(location, ir.FusedLoc) and location.locations:
            location = location.locations[0]
        elif isinstance(location, ir.FileLineColLoc):
            if location.filename == _TEXT or location.filename.startswith(_OF):
                line, column = location.start_line, location.start_col
                path = location.filename.removeprefix(_OF) if location.filename != _TEXT else path
            else:
                source = f"{location.filename}:{location.start_line}"
            break
        else:
            break
    return Loc(path, line, column, names[0].rstrip(":") if names else "", source)


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
