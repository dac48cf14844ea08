"""sha256 of parts of files, and bytes of which it is known: to compare with these is ten times as quick."""

from __future__ import annotations

from typing import Any

_KNOWN: dict[bytes, bytes] = {}  # by their sha256


def sha256_of(*parts: Any) -> bytes:
    """Return the sha256 of buffers, one after the other."""
    from hashlib import sha256  # loads libcrypto: milliseconds that `import aotc` must not pay

    digest = sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()


def has_digest(data: memoryview, digest: bytes) -> bool:
    """Have these bytes this sha256?"""
    known = _KNOWN.get(digest)
    same = known is not None and len(known) == data.nbytes and known.startswith(data)  # == would copy, or be slow
    return same or sha256_of(data) == digest


def remember(data: Any, digest: bytes) -> None:
    """Keep bytes that other bundles have too, and that have this sha256."""
    _KNOWN[digest] = bytes(data)
