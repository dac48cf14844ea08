"""Limits of rewrites that replace a pass over an array by a branch around it, or by small updates."""

from __future__ import annotations

from aotc.ir.tensor.ir import Value
from aotc.lowering.cost_model.work import estimated_bytes
from aotc.lowering.threshold import Limit
from aotc.options import Options
from aotc.targets import resolve

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


def pays_a_branch(v: Value, options: Options, times: int = 1) -> bool:
    """Return True if a pass over ``v`` takes longer than a branch around it, or than ``times`` small updates."""
    kinds = {resolve(target)[0].kind for target in (options.target, *options.devices.values())}
    limit = BRANCHED_BYTES_CUDA if "cuda" in kinds else BRANCHED_BYTES
    return not limit.holds(estimated_bytes(v) // times)
