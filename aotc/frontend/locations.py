"""From MLIR locations to :class:`Loc`: the text's line, JAX's name stack, the user's line."""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir

from aotc.diagnostics import Loc


def to_loc(location: Any, path: str) -> Loc:
    """Return what ``location`` says about the place and the trace.

    A bare file location of the parsed text (file ``-``) is a place in the model;
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
            if location.filename == "-":
                line, column = location.start_line, location.start_col
            else:
                source = f"{location.filename}:{location.start_line}"
            break
        else:
            break
    return Loc(path, line, column, names[0].rstrip(":") if names else "", source)
