"""Counter track of a trace: live bytes of the arena at the start of each kernel launch of a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aotc.tools.explain.memory import explain_memory, live_bytes
from aotc.tools.flow import flow_of
from aotc.vmfb.bundle import OpenedBundle
from aotc.vmfb.errors import BundleError
from aotc.vmfb.profile.perfetto import PROCESS
from aotc.vmfb.profile.records import Dispatch, Span


def memory_track(
    opened: OpenedBundle, function: str, sizes: Mapping[str, int], target: str, dispatches: Sequence[Dispatch],
    spans: Sequence[Span],
) -> list[dict[str, Any]]:  # fmt: skip
    """Return counter events with the arena's live bytes for each traced call.

    ``spans`` are the calls in the trace, ``dispatches`` their kernel launches, which correspond to the steps of ``aotc
    explain memory``. The list is empty if the function has loops or branches.
    """
    try:
        flow = flow_of(opened, function, sizes, target)
        report = explain_memory(opened, function, sizes, target)
    except BundleError:
        return []
    steps = [step for step in flow.steps if step.kernel >= 0]
    if any(step.within or step.control for step in flow.steps):
        return []
    names = [flow.name_of(step) for step in steps]
    events = []
    for span in spans:
        mine = [d for d in dispatches if span.start <= d.start < span.start + span.ns]
        place = {name: [n for n, other in enumerate(names) if other == name] for name in names}
        if sorted(d.kernel for d in mine) != sorted(names):
            continue
        for d in mine:
            number = steps[place[d.kernel].pop(0)].number
            events.append(_live_bytes_event(d.start, live_bytes(report.rows, number)))
        events.append(_live_bytes_event(span.start + span.ns, 0))
    return sorted(events, key=lambda e: e["ts"])


def _live_bytes_event(start: int, size: int) -> dict[str, Any]:
    args = {"bytes": size}
    return {"name": "alive in the arena", "cat": "memory", "ph": "C", "pid": PROCESS, "tid": 0, "ts": start / 1e3,
            "args": args}  # fmt: skip
