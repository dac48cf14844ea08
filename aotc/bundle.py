"""The bundle that compiling returns: its bytes."""

from __future__ import annotations

import os

from aotc.vmfb.bundle import write_file


class Bundle(bytes):
    """A compiled bundle: bytes that :func:`aotc.load` accepts and that can be saved.

    It is ``bytes`` in every other respect; slices of it are plain ``bytes``.
    """

    __slots__ = ()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the bundle to a file.

        The write is atomic: a temporary file in the same directory replaces the file. Modules that were loaded from an
        old file of that name keep it. A symbolic link stays, and its target is replaced.

        Parameters
        ----------
        path : str or path

        Raises
        ------
        BundleError
            If the file cannot be written, for example on a full disk; an existing file is then unchanged.
        """
        write_file(os.fsdecode(path), [self])

    def __repr__(self) -> str:
        return f"<aotc.Bundle of {len(self):,} bytes>"

    __str__ = __repr__
