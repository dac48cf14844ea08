"""Disk cache of whole bundles: compiling the same model again reads the bundle.

The key covers the model, the options, the targets, the sources of this package and the versions of the packages that
compile. For a file the model is its bytes and path; for a function it is the program with the metadata of
``jax.export``. So :func:`cached_bundle` finds the bundle of a file before the compiler is imported; that import would
be the slowest part of the call. Only bundles that took long to compile are stored.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aotc.kernels.jobs import store
from aotc.kernels.jobs.cache import PACKAGES, digest_of_sources
from aotc.options import DROP, OF_THE_RUN, WATCHED, Options
from aotc.targets import Target, resolve_targets, variant_targets
from aotc.vmfb.custom_calls import any_registered

if TYPE_CHECKING:
    from aotc.frontend.mlir import RawModel

_PACKAGES = ("jax", "jaxlib", *PACKAGES["cuda"])
_FOLDER = "bundles"
_NOT_IN_KEY = OF_THE_RUN | {"target"}  # the target's features are part of the key, not its name


def is_cache_usable(options: Options) -> bool:
    """Return True if ``options`` allow a cached bundle: the compilation has no other output than the bundle."""
    watched = any(getattr(options, name) for name in WATCHED) or options.bisect >= 0
    warned = options.callbacks == DROP  # every compilation warns about the calls that it drops
    own = bool(options.replace) or any_registered()  # the user's functions, which may call others
    return options.cache and not (watched or warned or own) and options.weights == "inline"


def cached_bundle(path: Path, options: Options) -> bytes | None:
    """Return the cached bundle for the model file ``path``, or None if the model must be compiled.

    An unreadable file also returns None: the compiler then reports the error.
    """
    if not is_cache_usable(options) or options.reproducer or options.host_target:
        return None
    try:
        data = path.read_bytes()
    except OSError:
        return None
    targets = variant_targets(resolve_targets(options.target), options.devices)
    return read_cached_bundle(_cache_key_of_digests(_model_digest(data), os.fspath(path), {}, options, targets))


def bundle_cache_key(raw: RawModel, options: Options, targets: Iterable[Target]) -> str:
    """Return the key of the model ``raw`` in the bundle cache."""
    if raw.digest:
        return _cache_key_of_digests(raw.digest, raw.path, {}, options, targets)
    return _cache_key_of_digests(_model_digest(raw.data), raw.path, raw.metadata, options, targets)


# Bytes, or characters, of a model's text that are hashed at a time. Encoding a large model at once would double its
# memory.
CHUNK_BYTES = 1 << 20


def _model_digest(data: str | bytes) -> bytes:
    """Compute the SHA-256 digest of a model in chunks, without a copy of the model."""
    digest = hashlib.sha256()
    for at in range(0, len(data), CHUNK_BYTES):
        part = data[at : at + CHUNK_BYTES]
        digest.update(part.encode() if isinstance(part, str) else part)
    return digest.digest()


def _cache_key_of_digests(
    model: bytes, path: str, metadata: Mapping[str, Any], options: Options, targets: Iterable[Target]
) -> str:  # fmt: skip
    """Return the cache key for the model with digest ``model``, its path and metadata, options and targets."""
    chosen = {f.name: getattr(options, f.name) for f in fields(options) if f.name not in _NOT_IN_KEY}
    facts = [chosen, [repr(t) for t in targets], path, metadata]
    digest = hashlib.sha256(_compiler_digest())
    digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
    digest.update(model)
    return digest.hexdigest()


@cache
def _compiler_digest() -> bytes:
    root = Path(__file__).parents[1]
    sources = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*.py")}
    return digest_of_sources(sources, _PACKAGES)


def read_cached_bundle(key: str) -> bytes | None:
    """Return the bundle stored under ``key``, or None if there is none."""
    return store.read_cache_entry(_FOLDER, key)


def write_cached_bundle(key: str, data: bytes) -> None:
    """Store the bundle ``data`` under ``key``."""
    store.write_cache_entry(_FOLDER, key, data)
