"""Exception boundary around each compiler stage: an unexpected exception becomes an InternalError with a reproducer.

Four kinds of exceptions leave a stage. ``CompileError``: the model is wrong, or the machine lacks memory, disk space or
a package. ``BundleError`` and ``CallError``: errors of the runtime, which the compiler uses to write files.
``InternalError``: everything else, with the stage, a folder that holds the traceback and the input of the stage, and
the command that reproduces it. ``KeyboardInterrupt`` and a closed pipe pass unchanged.
"""

from __future__ import annotations

import errno
import shlex
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aotc.diagnostics import UNKNOWN, AotcWarning, CallbackFailed, CompileError, InternalError, Loc
from aotc.ir.tensor.ir import Module
from aotc.ir.tensor.text import print_module
from aotc.options import Options
from aotc.vmfb.errors import BundleError, CallError
from aotc.vmfb.host.files import report_folder
from aotc.vmfb.host.install import install_command

THEIRS = (CompileError, BundleError, CallError, AotcWarning)
"""Errors that are not bugs of aotc; a warning is raised as an error where Python is told so (``-W error``)."""
EXTRAS = {
    **dict.fromkeys(("jax", "jaxlib", "numba", "llvmlite", "scipy", "flatbuffers"), "compile"),
    **dict.fromkeys(("cuda", "numba_cuda", "nvidia"), "cuda-compile"),
}
"""The optional dependencies (extra) of aotc that install a package."""
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EROFS})


@contextmanager
def guard(
    where: str,
    options: Options,
    model: Module | str | bytes | None = None,
    path: str = "",
    passing: tuple[type[Exception], ...] = THEIRS,
) -> Iterator[None]:
    """Convert unexpected exceptions in the ``with`` block to an InternalError.

    Parameters
    ----------
    where : str
        The activity of the block for the message, for example ``in pass 3 inline``.
    options : Options
        Folder for the evidence (``dump_ir``), and the flags of the command that reproduces the failure.
    model : Module, str or bytes, optional
        Input of the stage: a module, or a model as text or bytecode.
    path : str
        The model's file, if any.
    passing : tuple of exception types
        Exceptions that leave the block unchanged.
    """
    try:
        yield
    except (BrokenPipeError, CallbackFailed):  # outer guards must not take the user's error for a bug of aotc
        raise
    except passing:
        raise
    except InternalError as error:
        if error.dump:
            raise
        raise internal_error(error, where, options, model, path) from error
    except Exception as error:
        raise machine_error(error, where) or internal_error(error, where, options, model, path) from error


@contextmanager
def reraise_user_errors() -> Iterator[None]:
    """Decorator for public entry points: re-raise the error of a user's function with its cause and context.

    The decorated function must be the outermost frame that the error passes.
    """
    try:
        yield
    except CallbackFailed as failed:
        context = failed.error.__context__
        try:
            raise failed.error
        finally:
            failed.error.__context__ = context


def machine_error(error: Exception, where: str = "") -> CompileError | None:
    """Return a CompileError if the machine or the installation caused ``error``, else None."""
    match error:
        case MemoryError():
            hint = "a machine with more memory, or a smaller batch"
            return CompileError.at(UNKNOWN, f"out of memory {where}".rstrip(), hint=hint)
        case ModuleNotFoundError() if (package := (error.name or "").partition(".")[0]) in EXTRAS:
            what = f"this needs {package}, which is not installed"
            return CompileError.at(UNKNOWN, what, hint=install_command(EXTRAS[package]))
        case OSError() if error.filename or error.errno in NO_ROOM:
            place = Loc(str(error.filename)) if error.filename else UNKNOWN
            return CompileError.at(place, error.strerror or str(error))
    return None


# Older report folders to retain next to a new one: enough for the failures of one working session.
KEPT_REPORTS = 8


def internal_error(
    error: Exception,
    where: str,
    options: Options,
    model: Module | str | bytes | None = None,
    path: str = "",
    repeat: str = "",
) -> InternalError:
    """Write the evidence for ``error``, a bug of aotc, to a folder, and return the InternalError.

    ``repeat`` is the command that reproduces the failure, by default one that compiles the model; :func:`guard`
    describes the other parameters.
    """
    text = error.message if isinstance(error, InternalError) else f"{type(error).__name__}: {error}"
    message = f"{where}: {text}" if where else text
    try:
        folder = Path(options.dump_ir or report_folder(KEPT_REPORTS))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "traceback.txt").write_text("".join(traceback.format_exception(error)))
        kept = _write_model_as_evidence(model, path, folder)
    except OSError as reason:  # without space for the evidence the error is still reported
        message += f" (and nothing could be written about it: {reason})"
        return InternalError(message, repeat=repeat or _reproducing_command(options, path))
    return InternalError(message, str(folder), repeat or _reproducing_command(options, kept))


def _write_model_as_evidence(model: Module | str | bytes | None, path: str, folder: Path) -> str:
    """Write the model to ``folder`` as evidence; return the file for the reproducing command, or an empty string."""
    if isinstance(model, Module):
        (folder / "before.txt").write_text(_printed_module(model))
        return path or next((f.loc.path for f in model.functions.values() if f.loc.path), "")
    if model is None or path:
        return path
    file = folder / "model.mlir"
    file.write_bytes(model.encode() if isinstance(model, str) else model)
    return str(file)


def _printed_module(module: Module) -> str:
    try:
        return print_module(module)
    except Exception:  # a pass may have left the IR in any state
        return "the IR could not be printed"


def _reproducing_command(options: Options, path: str) -> str:
    """Return the command that compiles the model again and verifies the IR after every pass."""
    plain = Options()
    words = ["aotc", "compile", path or "MODEL", "-o", "model.vmfb"]
    words += [
        f"--{name.replace('_', '-')}={getattr(options, name)}"
        for name in ("target", "opt_level", "weights", "bisect", "stop_after")
        if getattr(options, name) != getattr(plain, name)
    ]
    words += [f"--specialize={name}={','.join(map(str, sizes))}" for name, sizes in options.specialize.items()]
    words += [f"--typical={name}={size}" for name, size in options.typical.items()]
    return shlex.join([*words, "--verify-each", "--no-cache", "--dump-ir=ir"])
