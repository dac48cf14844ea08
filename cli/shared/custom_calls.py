"""Python files that register custom calls, for the commands that compile models or load bundles."""

from __future__ import annotations

import os
from collections.abc import Sequence

HELP = "A Python file to run first, which calls aotc.register_custom_call; may be given more than once."


def register_custom_calls_from(paths: Sequence[str]) -> None:
    """Run Python files that register custom calls.

    Raises
    ------
    CompileError
        If a file cannot be read, is not Python, or raises; the error names the line of the file.
    """
    if not paths:
        return
    import runpy  # only needed with such files

    for path in paths:
        try:
            runpy.run_path(path)
        except Exception as error:
            raise _registration_failure(path, error) from error


def _registration_failure(path: str, error: Exception) -> Exception:
    """Return the error for an exception in a file of custom calls, with the line in the file."""
    import traceback

    from aotc.diagnostics import CompileError, Loc

    if isinstance(error, CompileError):
        return error
    if isinstance(error, OSError) and error.filename in (path, os.path.abspath(path)):
        return CompileError.at(Loc(path), f"cannot read the file of custom calls: {error.strerror}")
    lines = [frame.lineno or 0 for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    line = lines[-1] if lines else getattr(error, "lineno", None) or 0
    hint = "a Python file that calls aotc.register_custom_call"
    return CompileError.at(Loc(path, line), f"the file raises {type(error).__name__}: {error}", hint=hint)
