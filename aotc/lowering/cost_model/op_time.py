"""Estimate the times of ops on devices, and of transfers between devices, before kernels exist."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from aotc.ir.opset import EXPENSIVE, PRODUCTS, SOURCES
from aotc.ir.tensor.ir import Op, Value
from aotc.lowering.cost_model.machines import machine_of
from aotc.lowering.cost_model.work import DEAR_WORK, estimated_dim
from aotc.lowering.threshold import Estimate
from aotc.targets import Target
from aotc.vmfb.dtypes import size_of

WAKE_NS = Estimate(5_000, "nanoseconds until another CPU device begins its work")
COPY_WAKE_NS = Estimate(10_000, "nanoseconds of an empty copy to a GPU")
HOST_BYTES = Estimate(20, "bytes per nanosecond between host and GPU", "pageable memory, an upper estimate")
PEER_BYTES = Estimate(150, "bytes per nanosecond between two GPUs")


def estimated_element_count(v: Value) -> int:
    """Return the number of elements of ``v``; symbolic dims have their estimated size."""
    return prod(map(estimated_dim, v.type.shape))


def size_in_bytes(v: Value) -> int:
    """Return the bytes of ``v``, with estimates for symbolic dims."""
    return estimated_element_count(v) * size_of(v.type.dtype)


def op_nanoseconds(op: Op, target: Target) -> float:
    """Return the estimated nanoseconds of ``op`` as one kernel on one CPU core or a whole GPU; not for control flow.

    The time is a launch plus the slower of arithmetic and memory.
    """
    if op.name in SOURCES:
        return 0.0
    machine = machine_of(target)
    bytes_ = sum(map(size_in_bytes, (*op.operands, *op.results)))
    if op.name in PRODUCTS:
        work = _contraction_flops(op) / machine.tile
    else:
        work = _scalar_operations_of(op) / machine.vector / max(machine.vector_bytes // _widest_operand_dtype(op), 1)
    return machine.launch + max(work, bytes_ / machine.level_of(bytes_).rate)


def move_nanoseconds(bytes_: int, source: str, target: str) -> float:
    """Return the estimated nanoseconds of a transfer of ``bytes_`` between two devices of these kinds."""
    if source == target == "cpu":
        return WAKE_NS.value
    rate = PEER_BYTES if source == target else HOST_BYTES
    return COPY_WAKE_NS.value + bytes_ / rate.value


def _contraction_flops(op: Op) -> int:
    """Return the floating-point operations of a matmul or convolution: two for each multiplied pair of elements."""
    lhs, rhs = op.operands[:2]
    if op.name == "convolution":
        outputs = max(estimated_dim(rhs.type.shape[op.attrs["kernel_output"]]), 1)
        return 2 * estimated_element_count(op.result) * estimated_element_count(rhs) // outputs
    summed = prod(estimated_dim(lhs.type.shape[d]) for d in op.attrs.get("lhs_contract", (-1,)))
    return 2 * estimated_element_count(op.result) * summed


def _scalar_operations_of(op: Op) -> int:
    every: Mapping[Value, None] = dict.fromkeys((*op.operands, *op.results))
    return max(map(estimated_element_count, every), default=0) * (DEAR_WORK.value if op.name in EXPENSIVE else 1)


def _widest_operand_dtype(op: Op) -> int:
    return max((size_of(v.type.dtype) for v in (*op.operands, *op.results)), default=1)
