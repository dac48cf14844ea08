"""Decide where a pass over an array costs more than a branch around it, or than small updates."""

from __future__ import annotations

from aotc.ir.dims.algebra import Dim, is_static, product, static
from aotc.ir.opset.dim_attributes import dims_of
from aotc.ir.tensor.ir import Op, Value
from aotc.lowering.cost_model.work import estimated_bytes
from aotc.lowering.threshold import Limit
from aotc.options import Options
from aotc.targets import resolve_targets

BRANCHED_BYTES = Limit(
    1 << 12,
    "bytes of an array, up to which it is read and written in each iteration of a loop rather than in a branch",
    "a pass over 4 KiB takes less time than the commands of a branch",
)
BRANCHED_BYTES_CUDA = Limit(
    1 << 23,
    "the same on a GPU",
    "a conditional node takes some microseconds, as long as copying 8 MiB at 3 TB/s",
)


def is_branch_worthwhile(v: Value, options: Options, times: int = 1) -> bool:
    """Return True if a pass over ``v`` takes longer than a branch around it, or than ``times`` small updates."""
    kinds = {resolve_targets(target)[0].kind for target in (options.target, *options.devices.values())}
    limit = BRANCHED_BYTES_CUDA if "cuda" in kinds else BRANCHED_BYTES
    return not limit.holds(estimated_bytes(v) // times)


PADDED_PART = Limit(
    1,
    "size of an array, in multiples of a padded part (rounded down), up to which the padded array is added whole",
    "updating a half in place reads and writes it twice, which takes as long as the whole once",
)


def is_small_part(pad: Op) -> bool:
    """Return True if the operand of ``pad`` is a small part of its result, at a position known at compile time."""
    part, low, high = pad.operands[0], dims_of(pad.attrs, "low"), dims_of(pad.attrs, "high")
    shapes: tuple[Dim, ...] = (*part.type.shape, *pad.result.type.shape, *low, *high)
    if not is_static(shapes) or any(dims_of(pad.attrs, "interior")) or min(map(static, (*low, *high)), default=0) < 0:
        return False
    return not PADDED_PART.holds(static(product(pad.result.type.shape)) // max(static(product(part.type.shape)), 1))
