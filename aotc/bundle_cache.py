"""Whole bundles on disk, by what they were compiled from: the same model again is read, not compiled.

The key of a bundle is the model's text or bytes with its path and what jax.export knows of it, the options, the
targets, the sources of this package and the versions of the packages that compile. Only what took long is kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from aotc.kernels.workers import store
from aotc.kernels.workers.cache import PACKAGES, digest_of
from aotc.limits import CHUNK_BYTES
from aotc.options import DROP, OF_THE_RUN, WATCHED, Options
from aotc.targets import Target
from aotc.vmfb.custom_calls import any_registered

if TYPE_CHECKING:
    from aotc.frontend.mlir import Raw

_PACKAGES = ("jaxlib", *PACKAGES["cuda"])
_FOLDER = "bundles"
_NOT_IN_KEY = OF_THE_RUN | {"target"}  # what it means is part of the key


def applies(options: Options) -> bool:
    """Tell whether a compilation may be answered from disk: nobody watches its steps, all it makes is the bundle."""
    watched = any(getattr(options, name) for name in WATCHED) or options.bisect >= 0
    warned = options.callbacks == DROP  # each compilation says what it leaves out
    return options.cache and not (watched or warned) and options.weights == "inline" and not any_registered()


def key_of(raw: Raw, options: Options, targets: Iterable[Target]) -> str:
    """Return the key of the bundle that ``raw`` compiles to."""
    chosen = {f.name: getattr(options, f.name) for f in fields(options) if f.name not in _NOT_IN_KEY}
    facts = [chosen, [repr(t) for t in targets], raw.path, raw.metadata]
    digest = hashlib.sha256(_compiler_digest())
    digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
    for at in range(0, len(raw.data), CHUNK_BYTES):
        part = raw.data[at : at + CHUNK_BYTES]
        digest.update(part.encode() if isinstance(part, str) else part)
    return digest.hexdigest()


@cache
def _compiler_digest() -> bytes:
    root = Path(__file__).parent
    sources = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*.py")}
    return digest_of(sources, _PACKAGES)


def read(key: str) -> bytes | None:
    """Return the bundle of ``key``, or None."""
    return store.read(_FOLDER, key)


def write(key: str, data: bytes) -> None:
    """Keep a bundle."""
    store.write(_FOLDER, key, data)
