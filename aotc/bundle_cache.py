"""Whole bundles on disk, by what they were compiled from: the same model again is read, not compiled.

The key of a bundle is the model's text or bytes with its path and what jax.export knows of it, the options, the
targets, the sources of this package and the versions of the packages that compile. Only what took long is kept; the
oldest go when the folder grows beyond ``AOTC_CACHE_LIMIT_MB``.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from aotc.diagnostics import UNKNOWN, CompileError
from aotc.kernels.workers.cache import PACKAGES, cache_directory, digest_of, put
from aotc.limits import CHUNK_BYTES, LIMIT_MB
from aotc.options import DROP, Options
from aotc.targets import Target
from aotc.vmfb.custom_calls import any_registered

if TYPE_CHECKING:
    from aotc.frontend.mlir import Raw

_PACKAGES = ("jaxlib", *PACKAGES["cuda"])
_WATCHED = ("dump_ir", "print_after", "stop_after", "timings", "verify_each")
_NOT_IN_KEY = frozenset({"progress", "jobs", "cache", *_WATCHED})  # a new option is part of the key


def applies(options: Options) -> bool:
    """Tell whether a compilation may be answered from disk: nobody watches its steps, all it makes is the bundle."""
    watched = any(getattr(options, name) for name in _WATCHED) or options.bisect >= 0
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


def _folder() -> Path:
    return cache_directory() / "bundles"


def read(key: str) -> bytes | None:
    """Return the bundle of ``key``, or None; what is read becomes the newest."""
    _limit()  # one that cannot be read is told before the model is compiled, not after
    path = _folder() / key
    try:
        data = path.read_bytes()
        os.utime(path)
    except OSError:
        return None
    return data


def write(key: str, data: bytes) -> None:
    """Keep a bundle, and let the oldest go. A folder that cannot be written is no error: it only saves nothing."""
    limit = _limit()
    if len(data) > limit:
        return
    try:
        put(_folder() / key, data)
        _prune(limit)
    except OSError:
        return


def _limit() -> int:
    """Return the bytes that the folder may hold."""
    text = os.environ.get("AOTC_CACHE_LIMIT_MB") or str(LIMIT_MB)
    if not text.isdecimal():
        hint = "unset it, or set it to an integer, 0 to keep no bundles"
        raise CompileError.at(UNKNOWN, f"AOTC_CACHE_LIMIT_MB is {text!r}, no number of megabytes", hint=hint)
    return int(text) << 20


def _prune(limit: int) -> None:
    files = sorted(((p.stat().st_mtime_ns, p.stat().st_size, p) for p in _folder().iterdir()), reverse=True)
    total = 0
    for _, size, path in files:
        total += size
        if total > limit:
            path.unlink(missing_ok=True)
