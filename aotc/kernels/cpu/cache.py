"""Compiled objects on disk, by content.

The key of an object is everything that it depends on: its source text, the
target, the sources of this package and the versions of Numba and llvmlite. A
file is written beside its place and renamed, so readers never see half of one.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
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


@cache
def _compiler_digest() -> bytes:
    digest = hashlib.sha256()
    root = Path(__file__).parents[2]
    sources = [*root.glob("kernels/**/*.py"), root / "lowering" / "loop_ir.py", root / "vmfb" / "abi.py"]
    for path in sorted(sources):
        digest.update(path.read_bytes())
    for package in ("numba", "llvmlite"):
        digest.update(version(package).encode())
    return digest.digest()


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
    folder = cache_directory() / key[:2]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as f:
            f.write(data)
        os.replace(f.name, folder / key)
    except OSError:
        return
