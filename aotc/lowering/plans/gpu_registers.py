"""Estimate the registers of a GPU thread for a region before it is compiled.

Registers, threads and shared memory of a block determine how many blocks a multiprocessor holds
(``Multiprocessor.resident_blocks``). A multiprocessor hides memory latency behind its other threads, so every value
that a block stores on chip costs occupancy. The bundle records the exact count, which the linker reports.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from aotc.ir.opset import FREE
from aotc.ir.tensor.ir import Op, Value
from aotc.lowering.threshold import Estimate
from aotc.vmfb.dtypes import size_of

BASE_REGISTERS = Estimate(
    14,
    "registers of a thread for indices, loop counters and its own number",
    "tests/gpu/test_occupancy.py",
)
BUFFER_REGISTERS = Estimate(
    1,
    "registers of a thread for the address of one buffer",
    "half of the 8 bytes of an address, which is computed when it is needed; tests/gpu/test_occupancy.py",
)
MOST_REGISTERS = Estimate(255, "registers of a thread, at most", "limit of the instruction set")


def estimate_registers(ops: Mapping[Value, Op], results: Sequence[Value]) -> int:
    """Return the estimated registers of a thread that computes a region one element at a time.

    The estimate is the sum of a base, the addresses of the buffers, and the maximal number of 32-bit words that are
    live at once if the ops run in the order of ``ops``.
    """
    order = [op for op in dict.fromkeys(ops.values()) if op.name not in FREE]
    outside = {v for op in order for v in op.operands if v not in ops}
    last: dict[Value, int] = {}
    for n, op in enumerate(order):
        last.update(dict.fromkeys(_movement_sources(op.operands, ops), n))
    last.update(dict.fromkeys(results, len(order)))
    alive, most = 0, 0
    ends: dict[int, int] = {}
    for n, op in enumerate(order):
        for v in op.results:
            words = max(size_of(v.type.dtype) // 4, 1)
            alive += words
            ends[last.get(v, n)] = ends.get(last.get(v, n), 0) + words
        most = max(most, alive)
        alive -= ends.get(n, 0)
    buffers = len(outside) + len(results)
    return min(BASE_REGISTERS.value + BUFFER_REGISTERS.value * buffers + most, MOST_REGISTERS.value)


def _movement_sources(values: Iterable[Value], ops: Mapping[Value, Op]) -> Iterable[Value]:
    """Yield the values behind ``values``, looking through movement ops."""
    stack = list(values)
    while stack:
        v = stack.pop()
        op = ops.get(v)
        if op is not None and op.name in FREE:
            stack += op.operands
        else:
            yield v
