"""Error for a call that needs more memory than a GPU has: planned peak, free memory, and the largest buffers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from aotc.vmfb.bundle import OpenedBundle
from aotc.vmfb.devices.cuda.driver import memory_info
from aotc.vmfb.errors import CallError
from aotc.vmfb.isa import BY_NAME
from aotc.vmfb.manifest import signatures_and_programs
from aotc.vmfb.plan import Plan

# Number of arrays, the largest first, that the error for an exhausted GPU lists.
LARGEST_SHOWN = 4


def out_of_memory_error(
    bundle: OpenedBundle, variant: Mapping[str, Any], plan: Plan, own: Sequence[int], arrays: Sequence[tuple[int, str]]
) -> CallError:
    """Return the error for a call that needs more memory than a GPU has.

    Parameters
    ----------
    bundle : OpenedBundle
    variant : dict
        The variant's entry in the manifest.
    plan : Plan
        The plan of the call.
    own : sequence of int
        Numbers of the memory spaces that are on GPUs.
    arrays : sequence of (int, str)
        Bytes and description of each argument and result on a GPU.
    """
    arenas = [size for space, size in enumerate((plan.arena, *plan.others)) if space in own]
    known = list(_gpu_working_buffers(bundle, variant, plan))
    working = known or [(size, "working memory") for size in arenas]
    peak = sum(arenas) + sum(size for size, _ in arrays)
    free, total = memory_info()
    rows = sorted((*arrays, *working), reverse=True)[:LARGEST_SHOWN]
    largest = "; ".join(f"{size:,} of {name}" for size, name in rows)
    what = f"a GPU has no memory for a call with a planned peak of {peak:,} bytes"
    hint = f"pass smaller arrays, or free arrays on the GPU; the largest: {largest}"
    return CallError(bundle.where, what, f"{free:,} bytes free of {total:,}", hint=hint)


def _gpu_working_buffers(bundle: OpenedBundle, variant: Mapping[str, Any], plan: Plan) -> Iterator[tuple[int, str]]:
    """Yield size and description of the buffers in GPU working memory: the writing kernel and its source line.

    Yields nothing without debug information, or if a size depends on the call.
    """
    debug = bundle.manifest.get("debug") or {}
    found = json.loads(debug.get("buffers", "{}")).get(variant["target"], {}).get("functions", {})
    rows = found.get(_function_of_plan(bundle, variant, plan), ())
    alone = "spaces" not in variant  # all memory is the GPU's
    for name, space, size, *_ in rows:
        if not space.startswith("arena" if alone else "arena of "):
            continue
        if not isinstance(size, int):
            return
        line = debug["kernels"].get(f"{variant['target']}/{name}", {}).get("loc", "")
        yield size, f"what {name or 'nobody'} makes" + (f" ({line})" if line else "")


def _function_of_plan(bundle: OpenedBundle, variant: Mapping[str, Any], plan: Plan) -> str:
    """Return the name of the function that submits the command buffers of a plan."""
    submit = BY_NAME["submit"].opcode
    wanted = {number for number, _ in plan.submissions}
    for name, (_, program) in signatures_and_programs(bundle.manifest, variant).items():
        if wanted and wanted.issubset({line[1] for line in program["code"] if line[0] == submit}):
            return str(name)
    return ""
