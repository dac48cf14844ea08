"""The cache directory on disk; entries are verified whenever they are read.

An entry is a header (magic, length, key, sha256 of the contents) and the contents. An entry that does not match its
header, or that another user could have written, is ignored. Kernels and bundles share one limit, with eviction of the
least recently read entries. The cache never fails a compilation: if it is unusable, nothing is cached.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from aotc.diagnostics import UNKNOWN, CompileError, warn_user
from aotc.vmfb.host.files import ensure_private_folder, other_writers, remove_stale_temporaries, replace_file

_HEADER = struct.Struct("<8sQ32s32s")
_MAGIC = b"AOTCKEPT"
_FOLDER, _KEY = re.compile(r"kernels|bundles|partitioners"), re.compile(r"[0-9a-f]{64}")
_TEMPORARY, _SWEPT = "tmp", "swept"

_seen: set[str] = set()
"""Folders that this process has checked for stale temporary files."""
_reported: set[str] = set()
"""Warnings that this process has issued."""
_written: dict[str, int] = {}
"""Bytes that this process has written to a folder since its last sweep."""


def cache_directory() -> Path:
    """Return ``$AOTC_CACHE_DIR``, or ``aotc`` in the user's cache directory.

    Raises
    ------
    OSError
        If the user has no cache directory.
    """
    given = os.environ.get("AOTC_CACHE_DIR")
    if given:
        return Path(given)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "aotc"
    except RuntimeError as error:
        raise OSError(str(error)) from error


# Megabytes of the cache folder. Above this size, the least recently read kernels and bundles are evicted.
# AOTC_CACHE_LIMIT_MB overrides it. About ten models with their weights fit.
LIMIT_MB = 4096


def cache_size_limit() -> int:
    """Return the size limit of the cache in bytes.

    Raises
    ------
    CompileError
        If ``AOTC_CACHE_LIMIT_MB`` is not a number.
    """
    text = os.environ.get("AOTC_CACHE_LIMIT_MB") or str(LIMIT_MB)
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        hint = "unset it, or set it to an integer; 0 stores nothing"
        found = f"AOTC_CACHE_LIMIT_MB is {text[:40]!r}, expected a number of megabytes"
        raise CompileError.at(UNKNOWN, found, hint=hint)
    return int(text) << 20


def read_cache_entry(folder: str, key: str) -> bytes | None:
    """Return the contents of an entry, or None if it is missing or invalid; reading makes it the most recent one."""
    if not cache_size_limit():
        return None
    try:
        return _read_entry_file(os.path.join(_cache_home(), folder, key), key)
    except OSError:
        return None


# Divisor of the cache limit: the folder is scanned for eviction once limit / 64 was written, and not after every
# compilation. A scan of 20,000 entries took 0.37 s on a busy machine.
SWEEP_SHARE = 64
# Seconds after which the folder is scanned in any case: many processes may each write less than limit / SWEEP_SHARE.
SWEEP_SECONDS = 600


def write_cache_entry(folder: str, key: str, data: bytes) -> None:
    """Store an entry; errors are ignored."""
    most = cache_size_limit()
    if len(data) + _HEADER.size > most:
        return
    try:
        with suppress(FileExistsError):  # it is not a folder: the next step reports that
            ensure_private_folder(str(cache_directory()))
        home = _cache_home()
        place = ensure_private_folder(os.path.join(home, folder))
        temporary = os.path.join(ensure_private_folder(os.path.join(home, _TEMPORARY)), "entry-")
        header = _HEADER.pack(_MAGIC, len(data), bytes.fromhex(key), sha256(data).digest())
        replace_file(os.path.join(place, key), [header, data], temporary, mode=0o600)
        _written[home] = _written.get(home, 0) + len(data)
        if _written[home] * SWEEP_SHARE > most or _last_read_time(os.path.join(home, _SWEPT)) > SWEEP_SECONDS:
            evict_old_entries(home, most)
    except OSError as error:
        _warn_unusable_cache_folder(error)


def _cache_home() -> str:
    """Return the cache directory.

    Raises
    ------
    OSError
        If the directory is unusable or unsafe; the user is warned if it is unsafe.
    """
    home = str(cache_directory())
    info = os.stat(home)
    if not stat.S_ISDIR(info.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), home)
    reason = other_writers(info)
    if reason:
        error = PermissionError(f"{home} {reason}")
        _warn_unusable_cache_folder(error)
        raise error
    if home not in _seen:
        _seen.add(home)
        remove_stale_temporaries(os.path.join(home, _TEMPORARY), "entry-")
    return home


def _warn_unusable_cache_folder(error: OSError) -> None:
    """Warn the user, once, that others could write to the cache folder, or that the configured folder is unusable."""
    danger = isinstance(error, PermissionError) and error.errno is None  # an error of this module, not of the system
    if not danger and not os.environ.get("AOTC_CACHE_DIR"):
        return  # a user without a home, as in a container, did not ask for a cache
    what = f"not used: {error}" if danger else f"not written to: {error}"
    hint = ("chmod go-w it if all in it is yours, or " if danger else "") + "set AOTC_CACHE_DIR to a folder of your own"
    if what not in _reported:
        _reported.add(what)
        warn_user(f"the cache is {what}\n  try: {hint}")


def _read_entry_file(path: str, key: str) -> bytes | None:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(path, flags), "rb", buffering=0) as file:
        info = os.fstat(file.fileno())
        if not stat.S_ISREG(info.st_mode):
            return None
        if reason := other_writers(info):
            _warn_unusable_cache_folder(PermissionError(f"{path} {reason}"))
            return None
        header = file.read(_HEADER.size)
        if info.st_size < _HEADER.size or len(header) < _HEADER.size:
            return None
        magic, length, found, digest = _HEADER.unpack(header)
        if magic != _MAGIC or found != bytes.fromhex(key) or length != info.st_size - _HEADER.size:
            return None
        data = file.readall()
        if len(data) != length or sha256(data).digest() != digest:
            return None
        with suppress(OSError):
            os.utime(file.fileno())
        return data


def _last_read_time(path: str) -> float:
    try:
        return abs(time.time() - os.stat(path).st_mtime)
    except OSError:
        return float("inf")


def evict_old_entries(home: str, most: int) -> None:
    """Evict the least recently read entries until the remaining ones have at most ``most`` bytes."""
    _written[home] = 0
    with suppress(OSError), open(os.path.join(home, _SWEPT), "wb"):
        pass  # its modification time is the last sweep
    total = 0
    for _, size, path in sorted(_cache_entries(home), reverse=True):
        total += size
        if total > most:
            with suppress(OSError):
                os.unlink(path)


def _cache_entries(home: str) -> Iterator[tuple[int, int, str]]:
    """Yield last read time, size and path of each entry of this user."""
    with os.scandir(home) as folders:
        for folder in folders:
            if not _FOLDER.fullmatch(folder.name) or not folder.is_dir(follow_symlinks=False):
                continue
            with suppress(OSError), os.scandir(folder.path) as files:
                for file in files:
                    if _KEY.fullmatch(file.name):
                        with suppress(FileNotFoundError):  # another process may sweep at the same time
                            info = file.stat(follow_symlinks=False)
                            yield info.st_mtime_ns, info.st_size, file.path
