"""The dtypes and reductions that NCCL supports."""

from __future__ import annotations

from typing import NamedTuple

_SUM, _PRODUCT, _MAX, _MIN = range(4)  # ncclRedOp_t
BYTES = 1
"""The number of NCCL's type for bytes (``ncclUint8``), as which arrays of any dtype are moved."""

# NCCL's number of each dtype (``ncclDataType_t``), and how many of them an element is.
_TYPES: dict[str, tuple[int, int]] = {
    "i1": (BYTES, 1), "i8": (0, 1), "u8": (BYTES, 1), "i32": (2, 1), "u32": (3, 1), "i64": (4, 1), "u64": (5, 1),
    "f16": (6, 1), "f32": (7, 1), "f64": (8, 1), "bf16": (9, 1), "c64": (7, 2), "c128": (8, 2),
}  # fmt: skip
_REDUCTIONS = {"add": _SUM, "mul": _PRODUCT, "max": _MAX, "min": _MIN}
_OF_BITS = {"and": _MIN, "or": _MAX, "mul": _MIN, "add": _MAX, "max": _MAX, "min": _MIN}  # of bytes that are 0 or 1
_OF_COMPLEX = {"add": _SUM}  # part by part


class GpuReduction(NamedTuple):
    """NCCL's codes of a reduction's dtype and operation, and the NCCL elements in one element of the array."""

    dtype: int
    op: int
    parts: int


def gpu_reduction(reduction: str, dtype: str) -> GpuReduction | None:
    """Return NCCL's codes for a reduction of ``dtype``, or None if NCCL does not support it."""
    if dtype not in _TYPES:
        return None
    ops = _OF_BITS if dtype == "i1" else _OF_COMPLEX if dtype in ("c64", "c128") else _REDUCTIONS
    number, parts = _TYPES[dtype]
    return GpuReduction(number, ops[reduction], parts) if reduction in ops else None
