"""What the compiler knows about the multiprocessors of GPUs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """What a multiprocessor of a GPU holds at once (CUDA C++ Programming Guide, compute capabilities).

    Attributes
    ----------
    threads, blocks : int
        The most that it runs.
    shared : int
        Bytes of shared memory.
    registers : int
        Of 4 bytes.
    reserved : int
        Bytes of shared memory that each block takes besides its kernel's arrays.
    warp, unit : int
        Threads that run together, and how many registers they are given at a time.
    """

    threads: int
    blocks: int
    shared: int
    registers: int = 65_536
    reserved: int = 1 << 10
    warp: int = 32
    unit: int = 256

    def held_blocks(self, threads: int, registers: int, shared: int) -> int:
        """Return how many blocks of so many threads it holds, each thread with registers, each block with memory."""
        warps = -(-threads // self.warp)
        each = -(-max(registers, 1) * self.warp // self.unit) * self.unit
        by_threads, by_registers = self.threads // (warps * self.warp), self.registers // (warps * each)
        taken = max(shared + self.reserved, 1)
        return min(self.blocks, by_threads, by_registers, self.shared // taken)

    def occupancy(self, threads: int, registers: int, shared: int) -> int:
        """Return the percentage of the threads which it holds at most that such blocks fill."""
        return 100 * self.held_blocks(threads, registers, shared) * threads // self.threads


MULTIPROCESSORS = {
    "sm_75": Multiprocessor(1024, 16, 64 << 10, reserved=0),
    "compute_80": Multiprocessor(1536, 16, 100 << 10),  # the least of all
    "sm_80": Multiprocessor(2048, 32, 164 << 10),
    "sm_86": Multiprocessor(1536, 16, 100 << 10),
    "sm_89": Multiprocessor(1536, 24, 100 << 10),
    "sm_90a": Multiprocessor(2048, 32, 228 << 10),
    "sm_100": Multiprocessor(2048, 32, 228 << 10),
    "sm_120": Multiprocessor(1536, 24, 100 << 10),
}
"""By the architecture of the GPU."""
