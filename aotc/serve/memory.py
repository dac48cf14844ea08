"""Memory budget for the bodies and responses of all requests of all protocols."""

from __future__ import annotations

import ctypes
import resource
from contextlib import suppress
from pathlib import Path

from aotc.serve.errors import CLOSED, RequestFault
from aotc.serve.limits import RETAINED_BYTES

# Block size in bytes above which malloc maps the block separately, so that all its pages are new in each message. The
# maximum that glibc accepts for M_MMAP_THRESHOLD.
LARGEST_HEAP_BLOCK = 32 << 20


def retain_freed_memory() -> bool:
    """Configure glibc's ``malloc`` to retain freed memory for the next message; return False with other C libraries.

    gRPC copies each message twice while holding the GIL. In new memory most of that time is page faults.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    mapped, trimmed = mallopt(-3, LARGEST_HEAP_BLOCK), mallopt(-1, RETAINED_BYTES)  # M_MMAP_, M_TRIM_THRESHOLD
    return bool(mapped) and bool(trimmed)


def return_freed_memory() -> None:
    """Return all free pages of ``malloc`` to the system, if the C library supports that."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def anonymous_bytes() -> int:
    """Return the anonymous memory of this process in bytes."""
    resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
    return (int(resident) - int(shared)) * resource.getpagesize()


class MemoryBudget:
    """Memory limit for all requests and responses together.

    Attributes
    ----------
    total, used : int
        Limit and current use in bytes.
    """

    def __init__(self, total: int) -> None:
        self.total, self.used = total, 0

    def lease(self) -> Lease:
        """Return a new lease for one request, a context manager that releases its bytes at the end."""
        return Lease(self)


# Bytes of a request that is admitted even if the memory budget of requests is exhausted. The queue bounds the total of
# small requests: 16 MiB for 256.
FREE_BYTES = 1 << 16


class Lease:
    """The bytes of the memory budget that one request has reserved."""

    __slots__ = ("_budget", "_bytes")

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget, self._bytes = budget, 0

    def grow(self, count: int) -> None:
        """Reserve ``count`` more bytes.

        Small requests never fail here, even if large requests have exhausted the budget: the queue limits their number.

        Raises
        ------
        RequestFault
            If the budget is exhausted.
        """
        budget = self._budget
        if self._bytes + count > FREE_BYTES and budget.used + count > budget.total:
            what, found = "running requests use all memory of the limit", f"{budget.used:,} + {count:,} bytes"
            raise RequestFault(CLOSED, "", what, found, f"at most {budget.total:,}", "later, or --memory-mb", retry=1)
        budget.used += count
        self._bytes += count

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def release(self) -> None:
        """Release all bytes."""
        self._budget.used -= self._bytes
        self._bytes = 0
