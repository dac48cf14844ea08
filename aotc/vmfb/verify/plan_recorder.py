"""Recorder that turns one execution of a host program into a plan, and the test whether a program allows plans.

A program has a plan if its control flow depends on shapes only. It may read memory for assertions: bytes as their
conditions, and integers for their messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aotc.vmfb.dtypes import size_of
from aotc.vmfb.isa import BY_NAME, ISA, In, Ins, Out
from aotc.vmfb.plan import Judgement, Unread
from aotc.vmfb.verify.buffers import Buffers
from aotc.vmfb.verify.call_memory import CallMemory

_ASSERT, _LOAD = (BY_NAME[name].opcode for name in ("assert_true", "load_scalar"))


def is_plan_possible(code: Sequence[Sequence[Any]]) -> bool:
    """Return True if a verified program does the same work in all calls with equal shapes: plans can replay it."""
    first = next((n for n, line in enumerate(code) if line[0] == _LOAD), -1)
    if first < 0:
        return True
    loads = [line for line in code if line[0] == _LOAD]
    read = {line[1] for line in loads}
    conditions = read - {line[1] for line in loads if size_of(line[4]) != 1}
    for line in code[first:]:
        if line[0] == _ASSERT and line[1] in conditions:
            continue
        if _uses_read_register(line, read):
            return False
    return True


def _uses_read_register(line: Sequence[Any], read: set[int]) -> bool:
    """Return True if an instruction uses or overwrites a register of ``read``, whose value was loaded from memory."""
    kinds = ISA[line[0]].kinds[line[0] == _LOAD :]  # the first operand of a load is its output
    return any(
        (kind is Ins and not read.isdisjoint(operand)) or (kind in (In, Out) and operand in read)
        for kind, operand in zip(kinds, line[-len(kinds) :] if kinds else ())
    )


class Recorder:
    """Session of the VM that records and verifies the requested device operations instead of executing them.

    Attributes
    ----------
    shapes : list of tuple of int
        Shapes of the results.
    taken : dict of int to int
        By result, the argument whose memory it shares.
    sizes : list of int
        Bytes of the largest arena in each memory space.
    submissions : list of (int, tuple of int)
        Number and parameters of each submitted command buffer.
    judgements : list of Judgement
    """

    def __init__(self, buffers: Buffers, memory: CallMemory, results: int, where: str, spaces: int = 1) -> None:
        self._buffers = buffers
        self._memory = memory
        self._where = where
        self.shapes: list[tuple[int, ...] | None] = [None] * results
        self.taken: dict[int, int] = {}
        self.sizes = [0] * spaces
        self.submissions: list[tuple[int, tuple[int, ...]]] = []
        self.judgements: list[Judgement] = []

    def allocate_result(self, index: int, dims: tuple[int, ...]) -> None:
        """Record the shape of a result that the host program allocates."""
        self._memory.allocate_result(index, dims)
        self.shapes[index] = dims

    def share_argument_memory(self, index: int, argument: int) -> None:
        """Record that a result shares the memory of an argument."""
        self._memory.share_argument_memory(index, argument)
        self.taken[index] = argument

    def allocate_arena(self, size: int, space: int = 0) -> None:
        """Record the allocation of an arena of ``size`` bytes in memory space ``space``."""
        self._memory.allocate_arena(size, space)
        self.sizes[space] = max(self.sizes[space], size)

    def submit(self, number: int, parameters: list[int]) -> None:
        """Verify and record the submission of command buffer ``number``."""
        self._memory.check_submission(self._buffers.nodes[number], self._buffers.kernels, parameters)
        self.submissions.append((number, tuple(parameters)))

    def load_scalar(self, slot: int, offset: int, dtype: str) -> Unread:
        """Return the location of an integer in memory, because its value is unknown during recording."""
        self._memory.check_access(slot, offset, size_of(dtype))
        return Unread(slot, offset, dtype)

    def check_assertion(self, condition: Unread, message: str, values: list[int | Unread]) -> None:
        """Record an assertion whose condition, and values for its message, are in memory."""
        self.judgements.append(Judgement(self._where, len(self.submissions), condition, message, values))

    def open_debug_block(self, slot: int, offset: int, size: int) -> None:
        """Check that a range that the program opens for debugging is within its slot."""
        self._memory.check_access(slot, offset, size)
