"""Instructions of Ampere and later: asynchronous copies to shared memory.

Each function also has a meaning in Python, for the simulator of :mod:`aotc.kernels.cuda.block`: there a copy completes
when it is issued.
"""

from __future__ import annotations

import ctypes

import numpy as np

from aotc.kernels.cuda.block import simulated_thread
from aotc.kernels.cuda.ptx import I32, I64, NOTHING, ptx

# Bytes that a thread copies by one cp.async instruction. PTX ISA, cp.async.cg.
PIECE = 16


@ptx("cp.async.cg.shared.global [$0], [$1], 16, $2;", NOTHING, I32, I64, I32)
def copy_piece(to, source, size):
    """Start an asynchronous copy of ``size`` bytes, padded with zeros to 16, from global to shared memory."""
    data = ctypes.string_at(int(source), int(size)).ljust(PIECE, b"\0")
    simulated_thread().block.memory[int(to) : int(to) + PIECE] = np.frombuffer(data, np.uint8)


@ptx("cp.async.commit_group;", NOTHING)
def copies_commit():
    """Commit the copies that this thread started as one group, for :func:`copies_wait`."""


def copies_wait(left: int):
    """Return the instruction that waits until at most ``left`` of the thread's groups of copies are incomplete."""

    @ptx(f"cp.async.wait_group {left};", NOTHING)
    def wait():
        pass

    return wait
