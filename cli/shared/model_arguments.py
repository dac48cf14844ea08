"""Model arguments of commands that compile: one model, or several by name, each a function of one bundle."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

MODEL_HELP = (
    "StableHLO text or bytecode, a portable artifact, a jax.export blob; - is stdin. "
    "Several with names, prefill=a.mlir decode=b.mlir, are the functions of one bundle."
)
METAVAR = "[NAME=]MODEL"


def read_models(words: Sequence[str]) -> Any:
    """Convert the command's model arguments for :func:`aotc.compile`: a path, bytes from stdin, or several by name.

    A word that is an existing file is a path. Otherwise the part before its first ``=`` is a name, unless it contains a
    slash.
    """
    named = [_name_and_path(word) for word in words]
    if len(named) == 1 and not named[0][0]:
        return _read_model(named[0][1])
    models: dict[str, str] = {}
    for name, path in named:
        if not name:
            raise _wrong_model_argument(f"{path[:60]!r} has no name: several models are NAME=MODEL each")
        if not path:
            raise _wrong_model_argument(f"{name[:60]!r} has no model: expected NAME=MODEL")
        if not name.isidentifier():
            raise _wrong_model_argument(
                f"{name[:60]!r} is not a function name: expected letters, digits and _; or ./{name}={path}"
            )
        if name in models:
            raise _wrong_model_argument(f"function {name} is given twice, as {models[name]} and as {path}")
        models[name] = path
    if list(models.values()).count("-") > 1:
        raise _wrong_model_argument("stdin (-) is one model, it is given to several functions")
    return {name: _read_model(path) for name, path in models.items()}


def _name_and_path(word: str) -> tuple[str, str]:
    """Split a word into name and path; the name is empty for a path alone."""
    name, equals, path = word.partition("=")
    if not name or not equals or "/" in name or (os.path.isfile(word) and not os.path.isfile(path)):
        return "", word
    if os.path.isfile(word):
        hint = f"./{word} is the first, {name}=./{path} the second"
        raise _wrong_model_argument(f"{word[:60]!r} is a file, and so is {path[:60]!r}: {hint}")
    return name, path


def _read_model(path: str) -> Any:
    return sys.stdin.buffer.read() if path == "-" else Path(path)


def _wrong_model_argument(message: str) -> typer.BadParameter:
    return typer.BadParameter(message, param_hint=METAVAR)
