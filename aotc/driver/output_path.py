"""Check the path of an output before the work that leads to it."""

from __future__ import annotations

import os
from pathlib import Path

from aotc.diagnostics import CompileError, Loc


def check_output_path(output: Path, source: Path | str = "", option: str = "-o") -> None:
    """Check that a file can be written at ``output``.

    Parameters
    ----------
    output : Path
    source : Path or str
        The input file, which the output must not replace.
    option : str
        The option that names the output, for messages.

    Raises
    ------
    CompileError
        If ``output`` is a folder or the input file, or cannot be written.
    """
    hint = f"another place with {option}"
    if source and output.is_file() and Path(source).is_file() and output.samefile(source):
        raise CompileError.at(Loc(str(output)), "the output would replace the input", hint=hint)
    if output.is_dir():
        raise CompileError.at(Loc(str(output)), "it is a folder", hint=f"{option} with the name of a file")
    if output.exists() and not output.is_file():  # devices and pipes are written directly
        if not os.access(output, os.W_OK):
            raise CompileError.at(Loc(str(output)), "it is not writable", hint=hint)
        return
    folder = Path(os.path.realpath(output)).parent if output.is_symlink() else output.parent
    if not folder.is_dir():
        raise CompileError.at(Loc(str(output)), f"there is no folder {folder}", hint=f"make it, or {hint}")
    if not os.access(folder, os.W_OK):
        raise CompileError.at(Loc(str(output)), f"the folder {folder} is not writable", hint=hint)
