"""What ops cost on kinds of devices, and what it costs to move values between them, before there are kernels."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from aotc.ir.opset import CONTROL_FLOW, EXPENSIVE, PRODUCTS, SOURCES
from aotc.ir.tensor_ir import Op, Value
from aotc.lowering.analysis.cost_row import Estimate, Limit, rows_in
from aotc.lowering.analysis.cost_work import (
    DEAR_WORK,
    LAUNCH_NS,
    LOOP_RATE,
    LOOP_TRIPS,
    MOVED_BYTES,
    PRODUCT_RATE,
    guess,
)
from aotc.vmfb.dtypes import size_of

# fmt: off
PLACED_NS = Limit(
    "placed_ns", 19_999, "nanoseconds of an op that is not placed by itself, but goes where its operands are",
    "chosen, not measured: some times what it takes to hand work to another device",
)
GPU_LAUNCH_NS = Estimate("gpu_launch_ns", 4_000, "nanoseconds of a kernel that does nothing", "chosen, not measured")
GPU_PRODUCT_RATE = Estimate(
    "gpu_product_rate", 40_000, "floating-point operations of products in a nanosecond", "chosen: an H200 in f32",
)
GPU_LOOP_RATE = Estimate("gpu_loop_rate", 8_000, "scalar operations in a nanosecond", "chosen: an H200 in f32")
GPU_MOVED_BYTES = Estimate("gpu_moved_bytes", 3_000, "bytes touched in a nanosecond", "chosen: an H200's memory")
WAKE_NS = Estimate("wake_ns", 5_000, "nanoseconds until another CPU device begins", "chosen, not measured")
COPY_WAKE_NS = Estimate("copy_wake_ns", 10_000, "nanoseconds of a copy of nothing to a GPU", "chosen, not measured")
HOST_BYTES = Estimate("host_bytes", 20, "bytes between host and GPU in a nanosecond", "pageable memory, from above")
PEER_BYTES = Estimate("peer_bytes", 150, "bytes between two GPUs in a nanosecond", "chosen, not measured")
# fmt: on

ROWS = rows_in(globals())

_RATES = {
    "cpu": (LAUNCH_NS, PRODUCT_RATE, LOOP_RATE, MOVED_BYTES),
    "cuda": (GPU_LAUNCH_NS, GPU_PRODUCT_RATE, GPU_LOOP_RATE, GPU_MOVED_BYTES),
}
"""By kind: the launch, operations of products, of loops, and bytes in a nanosecond."""


def elements(v: Value) -> int:
    """Return how many elements a value has; dims that only a call knows count as medium ones."""
    return prod(map(guess, v.type.shape))


def size_in_bytes(v: Value) -> int:
    """Return how many bytes it takes to move ``v``."""
    return elements(v) * size_of(v.type.dtype)


def op_nanoseconds(op: Op, kind: str) -> float:
    """Return a rough time of ``op`` by itself on all of a device of ``kind``."""
    if op.name in SOURCES:
        return 0.0
    if op.name in CONTROL_FLOW:
        inner = [sum(op_nanoseconds(i, kind) for i in r.ops) for r in op.regions]
        return LOOP_TRIPS.value * sum(inner) if op.name == "while" else max(inner, default=0.0)
    launch, product, loop, moved = (row.value for row in _RATES[kind])
    bytes_ = sum(map(size_in_bytes, (*op.operands, *op.results)))
    work = _products(op) / product if op.name in PRODUCTS else _scalars(op) / loop
    return launch + max(work, bytes_ / moved)


def move_nanoseconds(bytes_: int, source: str, target: str) -> float:
    """Return a rough time of a transfer between two devices of these kinds."""
    if source == target == "cpu":
        return WAKE_NS.value
    rate = PEER_BYTES if source == target else HOST_BYTES
    return COPY_WAKE_NS.value + bytes_ / rate.value


def _products(op: Op) -> int:
    """Return the operations of a sum of products: each element of the right operand meets rows of the left one."""
    lhs, rhs = op.operands[:2]
    if op.name == "convolution":
        outputs = max(guess(rhs.type.shape[op.attrs["kernel_output"]]), 1)
        return 2 * elements(op.result) * elements(rhs) // outputs
    summed = prod(guess(lhs.type.shape[d]) for d in op.attrs.get("lhs_contract", (-1,)))
    return 2 * elements(op.result) * summed


def _scalars(op: Op) -> int:
    every: Mapping[Value, None] = dict.fromkeys((*op.operands, *op.results))
    return max(map(elements, every), default=0) * (DEAR_WORK.value if op.name in EXPENSIVE else 1)
