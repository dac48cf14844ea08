"""Memory that ends at an inaccessible page, so that an access beyond its end faults at once.

For debugging: with ``AOTC_GUARD=1`` in the environment all arguments, results and arenas of a call have such memory,
and so do the blocks of arena and constants of a bundle compiled with it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import cache
from math import prod
from typing import Any

import numpy as np

from aotc.vmfb.abi import ALIGNMENT
from aotc.vmfb.errors import CallError


@cache
def _mprotect() -> Any:
    """Return the C library's ``mprotect``; raise a CallError on systems without it."""
    try:
        function = ctypes.CDLL(None, use_errno=True).mprotect
    except (AttributeError, TypeError):
        raise CallError("", "AOTC_GUARD needs mprotect, which this system has not", hint="unset AOTC_GUARD") from None
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


def _protect_pages(begin: int, end: int, rights: int = 0) -> None:
    """Set the protection of the pages between two addresses to ``rights``; ``end`` is exclusive."""
    page = mmap.PAGESIZE
    first, last = begin // page * page, -(-end // page) * page
    if last > first and _mprotect()(first, last - first, rights):
        raise CallError("", f"AOTC_GUARD: mprotect failed: {os.strerror(ctypes.get_errno())}")


def guarded_bytes(size: int, alignment: int) -> np.ndarray:
    """Allocate ``size`` bytes between two guard pages; they end as close to the second as ``alignment`` allows.

    Raises
    ------
    CallError
        If the system does not support protected pages.
    """
    page = mmap.PAGESIZE
    inside = -(-max(size, 1) // page) * page
    whole = mmap.mmap(-1, inside + 2 * page)
    memory = np.frombuffer(whole, np.uint8)
    start = memory.ctypes.data
    for fence in (start, start + page + inside):
        _protect_pages(fence, fence + page)
    first = page + (inside - size) // alignment * alignment
    found = memory[first : first + size]
    found.fill(0xFF)  # uninitialised: NaN as floats of any size, -1 as integers
    return found


def guarded_array(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an uninitialised array that ends at a guard page."""
    size = prod(shape) * dtype.itemsize
    alignment = dtype.alignment if size % dtype.alignment == 0 else 1
    return guarded_bytes(size, alignment).view(dtype).reshape(shape)


def guarded_copy(x: np.ndarray) -> np.ndarray:
    """Return a copy of ``x`` that ends at a guard page."""
    found = guarded_array(x.shape, x.dtype)
    found[...] = x
    return found


def make_inaccessible(memory: np.ndarray) -> np.ndarray:
    """Protect ``memory``, allocated by :func:`guarded_bytes`, until :func:`make_accessible`; return it."""
    _protect_pages(memory.ctypes.data, memory.ctypes.data + memory.nbytes)
    return memory


def inaccessible_copy(address: int, size: int) -> np.ndarray:
    """Copy ``size`` bytes at ``address``, plus one, to memory that is inaccessible until :func:`make_accessible`."""
    memory = guarded_bytes(size + 1, ALIGNMENT)
    ctypes.memmove(memory.ctypes.data, address, size)
    return make_inaccessible(memory)


def make_accessible(memory: np.ndarray, offset: int, size: int, writable: bool) -> None:
    """Make ``size`` bytes at ``offset`` of inaccessible memory readable, or writable too."""
    begin = memory.ctypes.data + offset
    _protect_pages(begin, begin + size, mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ)


def make_all_accessible(memory: np.ndarray | None) -> None:
    """Make inaccessible memory accessible again, before it is freed; None is ignored."""
    if memory is not None:
        _protect_pages(memory.ctypes.data, memory.ctypes.data + memory.nbytes, mmap.PROT_READ | mmap.PROT_WRITE)
