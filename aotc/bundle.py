"""The bytes of a bundle, as compiling returns them."""

from __future__ import annotations

import os

from aotc.vmfb.bundle import write_file


class Bundle(bytes):
    """A compiled bundle: its bytes, which :func:`aotc.load` takes and which can be saved.

    It is ``bytes`` in every other respect; slices of it are plain ``bytes``.
    """

    __slots__ = ()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the bundle to a file.

        The file appears whole or not at all, and a file of that name that a module was loaded from stays that module's:
        a temporary file in the same directory replaces it. A symbolic link stays, and its target is replaced.

        Parameters
        ----------
        path : str or path

        Raises
        ------
        BundleError
            If the file cannot be written, as on a full disk; one that was there before is unchanged.
        """
        write_file(os.fsdecode(path), [self])

    def __repr__(self) -> str:
        return f"<aotc.Bundle of {len(self):,} bytes>"

    __str__ = __repr__
