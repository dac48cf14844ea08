"""Resources of a GPU's streaming multiprocessors, and the occupancy that follows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """Resources of a GPU's multiprocessor (CUDA C++ Programming Guide, compute capabilities).

    Attributes
    ----------
    threads, blocks : int
        Maximum number of resident threads and blocks.
    shared : int
        Bytes of shared memory.
    registers : int
        Registers of 4 bytes.
    reserved : int
        Bytes of shared memory that each block occupies besides its kernel's arrays.
    warp, unit : int
        Threads of a warp, and the granularity of register allocation.
    """

    threads: int
    blocks: int
    shared: int
    registers: int = 65_536
    reserved: int = 1 << 10
    warp: int = 32
    unit: int = 256

    def resident_blocks(self, threads: int, registers: int, shared: int) -> int:
        """Return the number of blocks that one multiprocessor can run at the same time.

        Each block has ``threads`` threads with ``registers`` registers each, and ``shared`` bytes of shared memory.
        """
        warps = -(-threads // self.warp)
        each = -(-max(registers, 1) * self.warp // self.unit) * self.unit
        by_threads, by_registers = self.threads // (warps * self.warp), self.registers // (warps * each)
        taken = max(shared + self.reserved, 1)
        return min(self.blocks, by_threads, by_registers, self.shared // taken)

    def occupancy(self, threads: int, registers: int, shared: int) -> int:
        """Return the occupancy: resident threads of such blocks as a percentage of the maximum."""
        return 100 * self.resident_blocks(threads, registers, shared) * threads // self.threads


MULTIPROCESSORS = {
    "sm_75": Multiprocessor(1024, 16, 64 << 10, reserved=0),
    "compute_80": Multiprocessor(1536, 16, 100 << 10),  # the minimum of all from compute capability 8.0
    "sm_80": Multiprocessor(2048, 32, 164 << 10),
    "sm_86": Multiprocessor(1536, 16, 100 << 10),
    "sm_89": Multiprocessor(1536, 24, 100 << 10),
    "sm_90a": Multiprocessor(2048, 32, 228 << 10),
    "sm_100": Multiprocessor(2048, 32, 228 << 10),
    "sm_120": Multiprocessor(1536, 24, 100 << 10),
}
"""Multiprocessors by the architecture of the GPU."""
