"""Content-addressed cache of compiled objects on disk.

The key of an object covers everything that it depends on: its source text, the target, the sources of all modules that
a compiler process can load, and the versions of Python and of the packages that generate machine code.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from aotc.kernels.jobs import store
from aotc.kernels.jobs.closure import import_closure
from aotc.targets import Target

ENTRY = "aotc.kernels.worker"
_FOLDER = "kernels"  # for all entries: creating a folder takes as long as writing a kernel
# Packages whose versions determine an object of each kind of target. numpy and ml_dtypes round its constants.
_BOTH = ("numba", "llvmlite", "numpy", "ml_dtypes")
PACKAGES = {"cpu": _BOTH, "cuda": (*_BOTH, "numba-cuda", "nvidia-nvvm", "nvidia-nvjitlink")}


def digest_of(sources: Mapping[str, bytes], packages: Iterable[str]) -> bytes:
    """Return a digest of named texts, and of the versions of Python (Numba reads its bytecode) and of packages."""
    digest = hashlib.sha256(sys.version.encode())
    for package in packages:
        digest.update(f"{package} {_version_of(package)}\n".encode())
    for name, source in sorted(sources.items()):
        digest.update(f"{name} {len(source)}\n".encode())
        digest.update(source)
    return digest.digest()


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # libNVVM and nvJitLink may come from the CUDA toolkit
        return "not installed"


@cache
def compiler_digest(kind: str) -> bytes:
    """Return a digest of the compiler for targets of ``kind``."""
    return digest_of(import_closure(ENTRY), PACKAGES[kind])


def key_of(text: str, target: Target) -> str:
    """Return the cache key of the object that ``text`` compiles to for ``target``."""
    digest = hashlib.sha256(compiler_digest(target.kind))
    digest.update(repr(target).encode())
    digest.update(text.encode())
    return digest.hexdigest()


def read(key: str) -> bytes | None:
    """Return the object of ``key``, or None."""
    return store.read(_FOLDER, key)


def write(key: str, data: bytes) -> None:
    """Store an object."""
    store.write(_FOLDER, key, data)
