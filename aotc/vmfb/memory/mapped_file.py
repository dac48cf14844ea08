"""Read-only contents of files: small files are copied, large ones are memory-mapped and monitored for changes."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from io import BytesIO
from time import monotonic_ns
from typing import Any

from aotc.vmfb.abi import ALIGNMENT
from aotc.vmfb.errors import BundleError
from aotc.vmfb.host.release import Release
from aotc.vmfb.limits import EAGER_BYTES
from aotc.vmfb.memory.pointers import aligned_bytes

# Minimum nanoseconds between two checks that a mapped file is unchanged; an fstat takes 0.5 us. Within this time a call
# may read what another process has written into the file.
FILE_CHECK_NANOSECONDS = 10_000_000


class MappedFile:
    """Read-only contents of a file.

    A file larger than :data:`~aotc.vmfb.limits.EAGER_BYTES` is mapped, so that processes share its pages. If it is
    truncated, reading a removed page raises SIGBUS; if it is overwritten, readers see the change.
    :meth:`check_unchanged` detects both. A smaller file is copied, and so is one that cannot be mapped, such as a pipe.

    Parameters
    ----------
    path : str
    copy : bool
        Copy large files too.

    Attributes
    ----------
    data : memoryview
        Read-only.
    is_mapped : bool
    identity : tuple of (int, int)
        Device and inode.
    """

    def __init__(self, path: str, copy: bool = False) -> None:
        self.path, self._due = path, 0
        self._mapped: Any = None
        with open(path, "rb") as file:
            info = os.fstat(file.fileno())
            size, self.identity = info.st_size, (info.st_dev, info.st_ino)
            if stat.S_ISFIFO(info.st_mode):
                data = file.read()
                self.data = _aligned_copy_of_file(BytesIO(data), len(data))
            elif copy or size <= EAGER_BYTES:
                self.data = _aligned_copy_of_file(file, size) if size else memoryview(b"")
            else:
                self._map(file.fileno(), info)
        self.is_mapped = self._mapped is not None

    def _map(self, descriptor: int, info: os.stat_result) -> None:
        """Map the open file, and record its size and time of modification."""
        import mmap  # not needed for small bundles

        self._mapped = mmap.mmap(descriptor, info.st_size, access=mmap.ACCESS_READ)
        self.data = memoryview(self._mapped)
        # A file that has been replaced by a rename keeps its contents: this descriptor refers to the old one.
        self._descriptor, self._state = os.dup(descriptor), _file_state(info)
        self._release = Release(os.close, self._descriptor)

    def release_pages(self, address: int, size: int) -> None:
        """Return the whole pages of a range of addresses to the system if they are in this mapping.

        Later reads reload them.
        """
        if self._mapped is None:
            return
        import mmap

        import numpy as np

        from aotc.vmfb.memory.pointers import address_of

        begin = address - address_of(np.frombuffer(self.data, np.uint8))
        first, last = -(-begin // mmap.PAGESIZE), (begin + size) // mmap.PAGESIZE
        if begin >= 0 and begin + size <= len(self.data) and first < last:
            self._mapped.madvise(mmap.MADV_DONTNEED, first * mmap.PAGESIZE, (last - first) * mmap.PAGESIZE)

    def check_unchanged(self) -> None:
        """Raise an error if a mapped file has changed since it was opened; look at most once in 10 ms.

        Raises
        ------
        BundleError
            If the file was truncated, extended or overwritten in place; every later check raises too.
        """
        now = monotonic_ns()
        if now >= self._due:
            self.check_unchanged_now()
            self._due = now + FILE_CHECK_NANOSECONDS

    def check_unchanged_now(self) -> None:
        """Raise an error if a mapped file has changed since it was opened, regardless of the time of the last check."""
        if self._mapped is None:
            return
        self._due = 0
        try:
            now = _file_state(os.fstat(self._descriptor))
        except OSError as error:  # a file system that no longer exists
            found = str(error.strerror)
        else:
            if now == self._state:
                return
            before = self._state[0]
            found = f"{before:,} bytes have become {now[0]:,}" if now[0] != before else "another time of modification"
        raise BundleError(
            self.path,
            "the file was overwritten while it was in use",
            found,
            "a file that stays as it is while it is loaded",
            "load it again. Write new files next to the old one and rename them, as Bundle.save(path) and "
            "`aotc compile -o` do; or aotc.load(..., copy=True)",
        )


def _file_state(info: os.stat_result) -> tuple[int, int]:
    return info.st_size, info.st_mtime_ns


def _aligned_copy_of_file(file: Any, size: int) -> memoryview:
    """Read a file into memory that is aligned as constants require."""
    view = allocate_aligned(size)
    return view[: file.readinto(view)].toreadonly()


def allocate_aligned(size: int) -> memoryview:
    """Allocate ``size`` bytes, aligned as constants require."""
    memory, address = aligned_bytes(size, ALIGNMENT)
    start = address - memory.ctypes.data
    return memory.data[start : start + size]


def check_files_before(call: Callable[..., None], files: Sequence[MappedFile]) -> Callable[..., None]:
    """Wrap ``call`` so that it first checks that ``files`` are unchanged; return ``call`` itself if there are none."""
    if not files:
        return call
    check = mapped_file_check(files)

    def checked(arrays: Sequence[Any], results: Sequence[Any]) -> None:
        check()
        call(arrays, results)

    return checked


def mapped_file_check(files: Sequence[MappedFile]) -> Callable[[], None]:
    """Return a function that raises an error if one of ``files`` has changed since it was opened."""
    if len(files) == 1:
        return files[0].check_unchanged

    def check() -> None:
        for file in files:
            file.check_unchanged()

    return check
