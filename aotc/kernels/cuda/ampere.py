"""Instructions of Ampere and of what came after it: copies to shared memory in the background.

What they mean is said for the machine of :mod:`aotc.kernels.cuda.block`, where a copy is done when it is begun.
"""

from __future__ import annotations

import ctypes

import numpy as np

from aotc.kernels.cuda.block import here
from aotc.kernels.cuda.ptx import I32, I64, NOTHING, ptx

# Bytes that a thread copies by one cp.async instruction. PTX ISA, cp.async.cg.
PIECE = 16


@ptx("cp.async.cg.shared.global [$0], [$1], 16, $2;", NOTHING, I32, I64, I32)
def copy_piece(to, source, size):
    """Begin to copy ``size`` bytes, and zeros for what 16 lack of them."""
    data = ctypes.string_at(int(source), int(size)).ljust(PIECE, b"\0")
    here().block.memory[int(to) : int(to) + PIECE] = np.frombuffer(data, np.uint8)


@ptx("cp.async.commit_group;", NOTHING)
def copies_commit():
    """Make a group of the copies that this thread began."""


def copies_wait(left: int):
    """Return the instruction that waits until at most ``left`` of the thread's groups of copies are not done."""

    @ptx(f"cp.async.wait_group {left};", NOTHING)
    def wait():
        pass

    return wait
