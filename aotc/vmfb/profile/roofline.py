"""Roofline of one core of this machine: peak f32 operations and peak bytes per nanosecond, measured on demand.

The operations are those of a loop of multiply-adds on whole registers, the bytes those of a copy of the same size,
which includes the effect of caches. Instructions with more operations (bf16 or i8 matmuls) may exceed this roof.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from functools import cache
from time import perf_counter_ns
from typing import NamedTuple

import numpy as np

from aotc.vmfb.host.machine import cpu_features
from aotc.vmfb.profile.thunks import map_executable_memory

# Repetitions of a measurement; the fastest counts, because other programs can only slow it down.
ROOF_ROUNDS = 5


class Peak(NamedTuple):
    """Micro-benchmark of peak arithmetic: a loop of multiply-adds, ``void (int64_t iterations)``, in assembly.

    ``clear`` is applied to each register, ``add`` to each but the last two in every iteration, then ``end``.
    """

    machine: str
    features: frozenset[str]
    registers: tuple[str, ...]
    clear: str
    add: str
    end: tuple[str, ...]
    lanes: int
    code: str

    def assembly(self) -> str:
        """Return the text of the function in assembly, which a test assembles."""
        *sums, a, b = self.registers
        adds = [self.add.format(x, a, b) for x in sums]
        adds[0] = f"again: {adds[0]}"
        return "\n".join([*(self.clear.format(x) for x in self.registers), *adds, *self.end]) + "\n"

    @property
    def operations(self) -> int:
        """Return the operations of an iteration: a multiplication and an addition per lane of each accumulator."""
        return 2 * self.lanes * (len(self.registers) - 2)


_X86_END = ("dec rdi", "jnz again", "vzeroupper", "ret")
_CLEAR, _ADD = "vxorps {0}, {0}, {0}", "vfmadd231ps {0}, {1}, {2}"
_NEON = tuple(f"v{n}.4s" for n in (*range(8), *range(16, 26)))  # the registers between are callee-saved
PEAKS = (
    Peak(
        "x86_64", frozenset({"avx512f", "avx512dq"}), tuple(f"zmm{n}" for n in range(14)), _CLEAR, _ADD, _X86_END, 16,
        "62f17c4857c062f1744857c962f16c4857d262f1644857db62f15c4857e462f1544857ed62f14c4857f662f1444857ff62513c4857c0"
        "6251344857c962512c4857d26251244857db62511c4857e46251144857ed62d21d48b8c562d21d48b8cd62d21d48b8d562d21d48b8dd"
        "62d21d48b8e562d21d48b8ed62d21d48b8f562d21d48b8fd62521d48b8c562521d48b8cd62521d48b8d562521d48b8dd48ffcf75b3c5"
        "f877c3",
    ),
    Peak(
        "x86_64", frozenset({"avx2", "fma"}), tuple(f"ymm{n}" for n in range(14)), _CLEAR, _ADD, _X86_END, 8,
        "c5fc57c0c5f457c9c5ec57d2c5e457dbc5dc57e4c5d457edc5cc57f6c5c457ffc4413c57c0c4413457c9c4412c57d2c4412457dbc4411c"
        "57e4c4411457edc4c21db8c5c4c21db8cdc4c21db8d5c4c21db8ddc4c21db8e5c4c21db8edc4c21db8f5c4c21db8fdc4421db8c5c4421d"
        "b8cdc4421db8d5c4421db8dd48ffcf75bfc5f877c3",
    ),
    Peak(
        "aarch64", frozenset(), _NEON, "movi {0}, #0", "fmla {0}, {1}, {2}", ("subs x0, x0, #1", "b.ne again", "ret"),
        4,
        "0004004f0104004f0204004f0304004f0404004f0504004f0604004f0704004f1004004f1104004f1204004f1304004f1404004f1504"
        "004f1604004f1704004f1804004f1904004f00cf394e01cf394e02cf394e03cf394e04cf394e05cf394e06cf394e07cf394e10cf394e"
        "11cf394e12cf394e13cf394e14cf394e15cf394e16cf394e17cf394e000400f1e1fdff54c0035fd6",
    ),
)  # fmt: skip


class Roof(NamedTuple):
    """Peak f32 operations and peak bytes per nanosecond of one core."""

    flops: float
    bytes: float

    def nanoseconds(self, flops: int, size: int) -> float:
        """Return the minimum nanoseconds for this many operations and bytes."""
        return max(flops / self.flops, size / self.bytes)


def roof_of(size: int) -> Roof:
    """Return the peak rates for work on ``size`` bytes of memory."""
    return Roof(_measured_flops(), _measured_copy_bytes(1 << max(size - 1, 0).bit_length()))


def peak_loop_of_machine() -> Peak | None:
    """Return the micro-benchmark for the widest registers of this machine; None if there is none for its CPU."""
    have, linux = cpu_features(), sys.platform.startswith("linux")
    rows = [p for p in PEAKS if p.machine == platform.machine() and p.features <= have]
    return rows[0] if rows and linux else None


# Rows and columns of the matmul that measures a core's peak rate: large enough for BLAS to reach its peak, small enough
# to take only 20 ms.
ROOF_SIDE = 1024
# Iterations of the multiply-add loop that measures a core's peak rate: 50 us, in which the system rarely interrupts it.
# An iteration has 12 to 16 instructions, two a cycle.
ROOF_TURNS = 1 << 14


@cache
def _measured_flops() -> float:
    """Measure peak f32 operations per nanosecond: by the machine's micro-benchmark, else by NumPy's matmul."""
    peak = peak_loop_of_machine()
    best = float("inf")
    if peak is None:
        a = np.ones((ROOF_SIDE, ROOF_SIDE), np.float32)
        for _ in range(ROOF_ROUNDS):
            begin = perf_counter_ns()
            a @ a
            best = min(best, perf_counter_ns() - begin)
        return 2 * ROOF_SIDE**3 / max(best, 1)
    memory, address = map_executable_memory(bytes.fromhex(peak.code))
    loop = ctypes.CFUNCTYPE(None, ctypes.c_int64)(address)
    for _ in range(4 * ROOF_ROUNDS):
        begin = perf_counter_ns()
        loop(ROOF_TURNS)
        best = min(best, perf_counter_ns() - begin)
    del memory
    return peak.operations * ROOF_TURNS / max(best, 1)


# Bytes of the smallest copy in the measurement of memory bandwidth: the size of most first-level caches. Smaller copies
# would measure the call.
ROOF_LEAST_BYTES = 32 << 10
# Bytes of the largest copy in the measurement of memory bandwidth: more than a core's share of most caches.
ROOF_MOST_BYTES = 128 << 20


@cache
def _measured_copy_bytes(size: int) -> float:
    """Measure bytes per nanosecond of copies that access ``size`` bytes, a power of two."""
    half = min(max(size, ROOF_LEAST_BYTES), ROOF_MOST_BYTES) // 2
    source, target = np.zeros(half, np.uint8), np.zeros(half, np.uint8)
    source[:], times = 1, max(1, ROOF_LEAST_BYTES * 64 // half)
    best = float("inf")
    for _ in range(ROOF_ROUNDS):
        begin = perf_counter_ns()
        for _ in range(times):
            np.copyto(target, source)
        best = min(best, (perf_counter_ns() - begin) / times)
    return 2 * half / max(best, 1.0)
