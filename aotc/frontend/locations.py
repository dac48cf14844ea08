"""From MLIR locations to :class:`Loc`: the text's line, JAX's name stack, the user's line."""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir

from aotc.diagnostics import Loc

_TEXT = "-"  # what MLIR calls the file of a text
_OF = "-:"  # begins the name of a file of several that are one module


def place_of(op: Any, path: str, known: dict[Any, Loc] | None) -> Loc:
    """Return what the location of ``op`` says.

    It is one object for all ops of a location, of which ``known`` are those met so far; or, with none, each op's own.
    """
    location = op.location
    if known is None:
        return to_loc(location, path)
    loc = known.get(location.attr)
    if loc is None:
        known[location.attr] = loc = to_loc(location, path)
    return loc


def to_loc(location: Any, path: str) -> Loc:
    """Return what ``location`` says about the place and the trace.

    A bare file location of the parsed text (file ``-``, or as :func:`name_file` says) is a place in the model;
    any other file is the user's source.
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
    """Let the places of a module that was parsed from text say of which file, for it will be one of several.

    Where jaxlib cannot change a location (before 0.8), they stay as they are.
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
