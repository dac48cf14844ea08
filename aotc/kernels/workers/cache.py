"""Compiled objects on disk, by content.

The key of an object is everything that it depends on: its source text, the
target, the sources of this package and the versions of Numba and llvmlite. A
file is written beside its place and renamed, so readers never see half of one.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable
from functools import cache
from importlib.metadata import version
from pathlib import Path

from aotc.targets import Target


def cache_directory() -> Path:
    """Return ``$AOTC_CACHE_DIR``, or ``aotc`` in the user's cache directory."""
    given = os.environ.get("AOTC_CACHE_DIR")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "aotc"


def digest_of(sources: Iterable[Path], packages: Iterable[str]) -> bytes:
    """Return a digest of files and of the versions of installed packages."""
    digest = hashlib.sha256()
    for path in sorted(sources):
        digest.update(path.read_bytes())
    for package in packages:
        digest.update(version(package).encode())
    return digest.digest()


def put(path: Path, data: bytes) -> None:
    """Write a file beside its place and rename it.

    Raises
    ------
    OSError
        If the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(data)
    os.replace(file.name, path)


@cache
def _compiler_digest() -> bytes:
    root = Path(__file__).parents[2]
    tables = ("ir/loop_ir.py", "vmfb/abi.py", "vmfb/dtypes.py", "vmfb/float_formats.py")
    return digest_of([*root.glob("kernels/**/*.py"), *(root / name for name in tables)], ("numba", "llvmlite"))


def key_of(text: str, target: Target) -> str:
    """Return the key of what ``text`` compiles to for ``target``."""
    digest = hashlib.sha256(_compiler_digest())
    digest.update(repr(target).encode())
    digest.update(text.encode())
    return digest.hexdigest()


def read(key: str) -> bytes | None:
    """Return the object of ``key``, or None."""
    try:
        return (cache_directory() / key[:2] / key).read_bytes()
    except OSError:
        return None


def write(key: str, data: bytes) -> None:
    """Keep an object. A cache that cannot be written is no error: it only saves nothing."""
    try:
        put(cache_directory() / key[:2] / key, data)
    except OSError:
        return
