"""What a block of a GPU's threads takes of its multiprocessor, and what it should leave."""

from __future__ import annotations

from aotc.lowering.threshold import Estimate, rows_in

# fmt: off
BASE_REGISTERS = Estimate(
    "base_registers", 14, "registers of indices, counters and the thread's number", "tests/gpu/test_occupancy.py"
)
BUFFER_REGISTERS = Estimate(
    "buffer_registers", 1, "registers of the address of a buffer",
    "half of its 8 bytes: it is made when it is needed, tests/gpu/test_occupancy.py",
)
MOST_REGISTERS = Estimate("most_registers", 255, "registers of a thread, at most", "by the instruction set")
# fmt: on

ROWS = rows_in(globals())
