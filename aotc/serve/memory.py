"""One budget of memory for all requests: their bodies and answers, whatever protocol they came by."""

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
    """Have glibc's ``malloc`` keep freed memory for the next large message; return False for another C library.

    gRPC copies each message twice with Python's global lock held. In new memory most of that time is page faults.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    mapped, trimmed = mallopt(-3, LARGEST_HEAP_BLOCK), mallopt(-1, RETAINED_BYTES)  # M_MMAP_, M_TRIM_THRESHOLD
    return bool(mapped) and bool(trimmed)


def return_freed_memory() -> None:
    """Have ``malloc`` give all free pages back to the system, if it can."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def anonymous_bytes() -> int:
    """Return the memory of this process that no file has."""
    resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
    return (int(resident) - int(shared)) * resource.getpagesize()


class MemoryBudget:
    """The bytes that requests and answers may have in memory at a time.

    Attributes
    ----------
    total, used : int
        Bytes.
    """

    def __init__(self, total: int) -> None:
        self.total, self.used = total, 0

    def lease(self) -> Lease:
        """Return the share of one request, which is empty; ``with`` it the request releases all of it."""
        return Lease(self)


# Bytes of a request that is admitted even if the memory budget of requests is exhausted. The queue bounds the total of
# small requests: 16 MiB for 256.
FREE_BYTES = 1 << 16


class Lease:
    """The bytes of the budget that one request has."""

    __slots__ = ("_budget", "_bytes")

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget, self._bytes = budget, 0

    def grow(self, count: int) -> None:
        """Reserve more bytes.

        Small requests are always served: the queue bounds their number, and large ones cannot lock them out.

        Raises
        ------
        RequestFault
            If the budget has no room for them.
        """
        budget = self._budget
        if self._bytes + count > FREE_BYTES and budget.used + count > budget.total:
            what, found = "requests hold all memory that they may", f"{budget.used:,} + {count:,} bytes"
            raise RequestFault(CLOSED, "", what, found, f"at most {budget.total:,}", "later, or --memory-mb", retry=1)
        budget.used += count
        self._bytes += count

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def release(self) -> None:
        """Give all of it back."""
        self._budget.used -= self._bytes
        self._bytes = 0
