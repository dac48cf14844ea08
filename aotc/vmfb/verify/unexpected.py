"""Exception boundary of everything that reads a bundle: data that a check lets through by mistake is a BundleError."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aotc.vmfb.errors import BundleError, VmError


@contextmanager
def bundle_errors(source: Any, action: str = "loaded") -> Iterator[None]:
    """Wrap unexpected exceptions of the block in a BundleError that names the bundle ``source``.

    Parameters
    ----------
    source : str, path, bytes or OpenedBundle
    action : str
        What could not be done: ``loaded``, ``checked``, ``shown``.

    Raises
    ------
    BundleError
        In place of any exception but errors of ours, a lack of memory, and a closed pipe that the block writes to.
    """
    try:
        yield
    except (BundleError, VmError, MemoryError, BrokenPipeError):
        raise
    except Exception as error:
        where = getattr(source, "where", None) or (source if isinstance(source, str | os.PathLike) else "<bytes>")
        what = f"the bundle cannot be {action}: {type(error).__name__}: {error}"
        hint = "compile the model again; if that does not help, this is a bug in aotc"
        raise BundleError(os.fspath(where), what, hint=hint) from error
