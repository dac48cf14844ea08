"""PTX instructions of Ampere and later GPUs: asynchronous copies to shared memory (``cp.async``).

Each function also has a meaning in Python, for the simulator of :mod:`aotc.kernels.cuda.block`: there a copy completes
when it is issued.
"""

from __future__ import annotations

import ctypes

import numpy as np

from aotc.kernels.cuda.block import simulated_thread
from aotc.kernels.cuda.ptx import I32, I64, NOTHING, ptx_instruction

# Bytes that a thread copies by one cp.async instruction. PTX ISA, cp.async.cg.
PIECE = 16


@ptx_instruction("cp.async.cg.shared.global [$0], [$1], 16, $2;", NOTHING, I32, I64, I32)
def copy_16_bytes_async(to, source, size):
    """Start an asynchronous copy of ``size`` bytes, padded with zeros to 16, from global to shared memory."""
    data = ctypes.string_at(int(source), int(size)).ljust(PIECE, b"\0")
    simulated_thread().block.memory[int(to) : int(to) + PIECE] = np.frombuffer(data, np.uint8)


@ptx_instruction("cp.async.commit_group;", NOTHING)
def commit_async_copies():
    """Commit the copies that this thread has started as a group, for :func:`wait_for_async_copies`."""


def wait_for_async_copies(left: int):
    """Return the instruction that waits until at most ``left`` groups of this thread's copies are incomplete."""

    @ptx_instruction(f"cp.async.wait_group {left};", NOTHING)
    def cp_async_wait_group():
        pass

    return cp_async_wait_group
