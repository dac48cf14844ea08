"""Content-addressed cache of compiled objects on disk.

The key of an object covers everything that it depends on: its source text, the target, the sources of all modules that
a compiler process can load, and the versions of Python and of the packages that generate machine code.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from aotc.kernels.jobs import store
from aotc.targets import Target

ENTRY = "aotc.kernels.worker"
_FOLDER = "kernels"  # for all entries: creating a folder takes as long as writing a kernel
# Packages whose versions determine an object of each kind of target. numpy and ml_dtypes round its constants.
_BOTH = ("numba", "llvmlite", "numpy", "ml_dtypes")
PACKAGES = {"cpu": _BOTH, "cuda": (*_BOTH, "numba-cuda", "nvidia-nvvm", "nvidia-nvjitlink")}


def digest_of_sources(sources: Mapping[str, bytes], packages: Iterable[str]) -> bytes:
    """Return a digest of source texts by name, of the versions of ``packages``, and of Python's version.

    Numba reads Python's bytecode, so the version matters.
    """
    digest = hashlib.sha256(sys.version.encode())
    for package in packages:
        digest.update(f"{package} {_package_version(package)}\n".encode())
    for name, source in sorted(sources.items()):
        digest.update(f"{name} {len(source)}\n".encode())
        digest.update(source)
    return digest.digest()


def _package_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # libNVVM and nvJitLink may come from the CUDA toolkit
        return "not installed"


@cache
def compiler_digest(kind: str) -> bytes:
    """Return a digest of the compiler's sources and packages for targets of ``kind``."""
    return digest_of_sources(import_closure(ENTRY), PACKAGES[kind])


def object_cache_key(text: str, target: Target) -> str:
    """Return the cache key of the object file that the kernel text ``text`` compiles to for ``target``."""
    digest = hashlib.sha256(compiler_digest(target.kind))
    digest.update(repr(target).encode())
    digest.update(text.encode())
    return digest.hexdigest()


def read_cached_object(key: str) -> bytes | None:
    """Return the object stored under ``key``, or None."""
    return store.read_cache_entry(_FOLDER, key)


def write_cached_object(key: str, data: bytes) -> None:
    """Store the object ``data`` under ``key``."""
    store.write_cache_entry(_FOLDER, key, data)


ROOT = Path(__file__).parents[3]
PACKAGE = "aotc"
# An import statement in a source text. Python's own parser would take ten times as long as a warm cache saves. A match
# in a docstring only adds a module.
_IMPORT = re.compile(
    rb"\n[ \t]*(?:from[ \t]+(aotc(?:\.\w+)*)[ \t]+import[ \t]+(\([^)]*\)|[^\n#]*)|import[ \t]+(aotc(?:\.\w+)*))"
)
_NAME = re.compile(rb"(\w+)(?:[ \t]+as[ \t]+\w+)?")


def imports_in_source(source: bytes) -> Iterator[tuple[str, str]]:
    """Yield module and name (or an empty name) of each import from this package in ``source``, also in functions."""
    for module, names, whole in _IMPORT.findall(b"\n" + source):
        if whole:
            yield whole.decode(), ""
        for name in _NAME.findall(names):
            yield module.decode(), name.decode()


def import_closure(entry: str, root: Path = ROOT) -> dict[str, bytes]:
    """Return the texts of all modules that importing and running ``entry`` can load, with their parent packages.

    Parameters
    ----------
    entry : str
        The full name of a module.
    root : Path
        The folder of the package.
    """
    sources: dict[str, bytes] = {}
    waiting = [entry]
    while waiting:
        name = waiting.pop()
        if name in sources:
            continue
        sources[name] = source = _path_of_module(name, root)[0].read_bytes()
        if name == PACKAGE:  # it imports public names on first use: a compiler process uses none of them
            continue
        waiting.append(name.rpartition(".")[0])
        for module, inner in imports_in_source(source):
            waiting.append(module)
            if inner and _path_of_module(module, root)[1] and _path_of_module(f"{module}.{inner}", root)[0].is_file():
                waiting.append(f"{module}.{inner}")
    return sources


@cache
def _path_of_module(name: str, root: Path) -> tuple[Path, bool]:
    """Return the path that a module would have, and whether it is a package."""
    path = root.joinpath(*name.split("."))
    package = path / "__init__.py"
    return (package, True) if package.is_file() else (path.with_suffix(".py"), False)
