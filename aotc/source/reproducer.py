"""Reproducer: one file that repeats a compilation, with the model as read, options, targets and versions.

A zip archive of ``model`` (text, bytecode or the program of a blob), ``reproducer.json`` and, after an internal error,
``traceback.txt``. ``aotc compile`` accepts it in place of a model, with its options.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, BadZipFile, ZipFile

from aotc.diagnostics import CompileError, InternalError, Loc
from aotc.options import Options
from aotc.source.limits import MOST_SOURCE_BYTES
from aotc.source.record import (
    KNOWN,
    MEASURED,
    measured_target,
    recorded_options,
    recorded_targets,
    refused_option,
)
from aotc.targets import Target
from aotc.vmfb.host.files import write_atomically
from aotc.vmfb.manifest import ANY, problems

NAME = "reproducer.zip"
_MODEL, _FACTS, _TRACE = "model", "reproducer.json", "traceback.txt"
_VERSION = 1
_PACKAGES = ("aotc", "jax", "jaxlib", "numpy", "ml_dtypes", "numba", "llvmlite", "numba-cuda", "nvidia-nvvm")
_OF_WORK = ("jobs", "verify_each", "stop_after")  # do not affect a bundle, but may break the compiler
_ALLOWED = (*_OF_WORK, "target", "source", "costs")  # besides those of a record; an untrusted file sets no path
_SCHEMA = {
    "reproducer": int, "path": str, "metadata": {**KNOWN, "entries?": {str: KNOWN}}, "options": {str: ANY},
    "versions": {str: str}, "text": bool, "targets?": [MEASURED],
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reproducer:
    """The contents of a reproducer file: a model as in :class:`aotc.frontend.mlir.RawModel`, and options as data.

    ``targets`` have the measurements of the compiling machine; older files have none.
    """

    data: str | bytes
    path: str
    metadata: Mapping[str, Any]
    options: Mapping[str, Any]
    targets: tuple[Target, ...]


def repeating_command(path: str) -> str:
    """Return the command line that compiles the reproducer file ``path`` again."""
    return f"aotc compile {path} -o model.vmfb --verify-each --no-cache --dump-ir=ir"


def write_reproducer(path: str, raw: Any, options: Options, targets: tuple[Target, ...], trace: str = "") -> None:
    """Write a reproducer of the compilation of a fetched model.

    Raises
    ------
    CompileError
        If the file cannot be written.
    """
    chosen = {**recorded_options(options, targets), **{name: getattr(options, name) for name in _OF_WORK}}
    names = ",".join(t.for_device("").name for t in targets)
    chosen |= {"target": names, "source": options.source, "costs": options.costs}
    facts = {
        "reproducer": _VERSION,
        "path": raw.path,
        "text": isinstance(raw.data, str),
        "versions": {"python": platform.python_version(), "machine": platform.machine(), **dict(_versions())},
        "options": chosen,
        "targets": recorded_targets(targets),
        "metadata": dict(raw.metadata),
    }
    held = BytesIO()
    with ZipFile(held, "w", ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr(_FACTS, json.dumps(facts, indent=1, default=dict))
        archive.writestr(_MODEL, raw.data.encode(errors="surrogateescape") if isinstance(raw.data, str) else raw.data)
        if trace:
            archive.writestr(_TRACE, trace)
    try:
        write_atomically(path, [held.getbuffer()])
    except OSError as error:
        raise CompileError.at(Loc(path), f"cannot write the reproducer: {error.strerror or error}") from None


def read_reproducer(path: str) -> Reproducer | None:
    """Read a reproducer file; return None if ``path`` is another kind of file.

    Raises
    ------
    CompileError
        If the reproducer is damaged or of another version.
    """
    try:
        with ZipFile(path) as archive:
            if _FACTS not in archive.namelist():
                return None
            if sum(entry.file_size for entry in archive.infolist()) > MOST_SOURCE_BYTES:
                raise ValueError("it is too large")
            facts, data = json.loads(archive.read(_FACTS)), archive.read(_MODEL)
        if isinstance(facts, dict) and facts.get("reproducer", _VERSION) != _VERSION:
            raise ValueError(f"it has version {facts['reproducer']}, expected {_VERSION}")
        if problem := next(problems(facts, _SCHEMA, "reproducer"), None):
            raise ValueError(problem)
        if name := refused_option(facts["options"], _ALLOWED):
            raise ValueError(f"it sets the option {name!r}, which only a caller may set or this aotc does not know")
        targets = tuple(map(measured_target, facts.get("targets", ())))
        model = data.decode(errors="surrogateescape") if facts["text"] else data
        return Reproducer(model, facts["path"], facts["metadata"], facts["options"], targets)
    except (BadZipFile, OSError):
        return None
    except Exception as error:  # zipfile, zlib and json raise many types on bad input
        raise CompileError.at(Loc(path), f"the reproducer is damaged: {error}") from None


@contextmanager
def reproducible(
    options: Options, targets: tuple[Target, ...], fetch: Callable[..., Any], *given: Any
) -> Iterator[list[Any]]:
    """Fetch a model by ``fetch(*given)`` and yield a list with the model as its only element.

    The function writes a reproducer file if the options request it, or after an internal error in the ``with`` block.
    The block may remove the model from the list to free its memory; after an internal error it is fetched again.
    """
    raws = [fetch(*given)]
    if options.reproducer:
        write_reproducer(str(options.reproducer), raws[0], options, targets)
    try:
        yield raws
    except InternalError as error:
        with suppress(Exception):  # the error itself must be raised
            error.reproducer = _write_reproducer_once(error, fetch(*given), options, targets)
        raise


def _write_reproducer_once(error: InternalError, raw: Any, options: Options, targets: tuple[Target, ...]) -> str:
    """Write the reproducer file unless it exists, add the reproducing command to ``error``, and return the path."""
    path = str(options.reproducer)
    if error.dump and not path:
        path = str(Path(error.dump) / NAME)
        write_reproducer(path, raw, options, targets, (Path(error.dump) / _TRACE).read_text())
    if path and not Path(raw.path).is_file():
        error.repeat = repeating_command(path)
    return path


def _versions() -> Iterator[tuple[str, str]]:
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            yield package, metadata.version(package)
