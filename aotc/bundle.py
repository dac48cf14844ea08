"""The class of compiled bundles: ``bytes`` with methods to save, load and inspect them."""

from __future__ import annotations

import os
from typing import Any

from aotc.source.restore import restore_source
from aotc.vmfb.arguments import Signature, type_text
from aotc.vmfb.bundle import open_bundle, write_bundle_file
from aotc.vmfb.module import LoadedModule, load
from aotc.vmfb.weights.own import weight_places_of


class Bundle(bytes):
    """A compiled bundle: bytes that can be saved, loaded and inspected.

    It is ``bytes`` in every other respect; slices of it are plain ``bytes``.
    """

    __slots__ = ()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the bundle to a file.

        The write is atomic: a temporary file in the same directory replaces the file. Modules that were loaded from an
        old file of that name continue to use the old contents. A symbolic link stays, and its target is replaced.

        Parameters
        ----------
        path : str or path

        Raises
        ------
        BundleError
            If the file cannot be written, for example on a full disk; an existing file is then unchanged.
        """
        write_bundle_file(os.fsdecode(path), [self])

    def load(self, **keywords: Any) -> LoadedModule:
        """Load the bundle with :func:`aotc.load`, which also defines the keywords."""
        return load(self, **keywords)

    @property
    def size(self) -> int:
        """Return the size of the bundle in bytes."""
        return len(self)

    @property
    def targets(self) -> tuple[str, ...]:
        """Return the targets that the bundle has code for, such as ``cpu:x86-64-v3``."""
        return tuple(variant["target"] for variant in open_bundle(self).manifest["variants"])

    @property
    def functions(self) -> dict[str, Signature]:
        """Return the signature of each function."""
        return {name: Signature(name, entry) for name, entry in open_bundle(self).manifest["functions"].items()}

    @property
    def about(self) -> dict[str, str]:
        """Return the facts about the model that ``about=`` stored at compile time, such as its licence."""
        return dict(open_bundle(self).manifest.get("about", {}))

    @property
    def weights(self) -> dict[str, str]:
        """Return the types of the weights that the bundle stores, by path: ``{"params/w": "f32[4, 3]"}``.

        Empty without weights.
        """
        opened = open_bundle(self)
        if not opened.manifest.get("weights"):
            return {}
        types = weight_places_of(opened.manifest, opened.manifest["variants"][0], opened.where).types
        return {path: type_text(*row) for path, row in types.items()}

    @property
    def source(self) -> bytes:
        """Return the model that the bundle was compiled from, as StableHLO for :func:`aotc.compile`.

        Empty if none is stored.

        Raises
        ------
        BundleError
            If the source is damaged.
        """
        opened = open_bundle(self)
        return restore_source(opened).code if opened.manifest.get("source") else b""

    def _repr_html_(self) -> str:
        """Return the summary of ``aotc inspect`` as HTML for notebooks: signatures, sizes and the slowest kernels."""
        import aotc

        return aotc.inspect(self)._repr_html_()

    def __repr__(self) -> str:
        return f"<aotc.Bundle of {len(self):,} bytes>"

    __str__ = __repr__
