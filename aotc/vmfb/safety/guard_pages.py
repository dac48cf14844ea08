"""Memory that ends at a page nobody may touch: what reads or writes beyond it stops there, and not somewhere later.

For debugging: with ``AOTC_GUARD=1`` in the environment every argument, result and arena of a call lies so.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from math import prod

import numpy as np

from aotc.vmfb.errors import VmError


def guarded_bytes(size: int, alignment: int) -> np.ndarray:
    """Return ``size`` bytes that end as near to a guard page as ``alignment`` lets their start; one is before them too.

    Raises
    ------
    VmError
        If the system has no such pages.
    """
    page = mmap.PAGESIZE
    inside = -(-max(size, 1) // page) * page
    whole = mmap.mmap(-1, inside + 2 * page)
    memory = np.frombuffer(whole, np.uint8)
    start = memory.ctypes.data
    try:
        protect = ctypes.CDLL(None, use_errno=True).mprotect
    except (AttributeError, TypeError):
        raise VmError("", "AOTC_GUARD needs mprotect, which this system has not", hint="unset AOTC_GUARD") from None
    protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for fence in (start, start + page + inside):
        if protect(fence, page, 0):  # PROT_NONE
            raise VmError("", f"AOTC_GUARD: mprotect failed: {os.strerror(ctypes.get_errno())}")
    first = page + (inside - size) // alignment * alignment
    found = memory[first : first + size]
    found.fill(0xFF)  # not yet written: NaN as floats of any size, -1 as integers
    return found


def guarded_array(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an array before a guard page; its elements are not yet written."""
    size = prod(shape) * dtype.itemsize
    alignment = dtype.alignment if size % dtype.alignment == 0 else 1
    return guarded_bytes(size, alignment).view(dtype).reshape(shape)


def guarded_copy(x: np.ndarray) -> np.ndarray:
    """Return a copy of ``x`` before a guard page."""
    found = guarded_array(x.shape, x.dtype)
    found[...] = x
    return found
