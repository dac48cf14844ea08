"""Export of recorded dispatches in Chrome's trace event format, which Perfetto loads.

There is a track for each thread. A slice is a contiguous period in which a thread worked on one dispatch; its arguments
describe the whole dispatch. If a slice has several claims, they are nested in it. On the track of layers, consecutive
dispatches of one name scope are a slice, nested as the scopes are. Times are microseconds since the recording started.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from aotc.vmfb.assumed_sizes import kernel_sizes_text
from aotc.vmfb.profile.model_place import model_place
from aotc.vmfb.profile.records import Dispatch, Part, Span

PROCESS = 1
LAYERS = 1 << 20  # number of the track of name scopes, after those of all threads


def trace_events(dispatches: Sequence[Dispatch], spans: Sequence[Span], name: str) -> list[dict[str, Any]]:
    """Return the events: process and thread names first, then the slices of each thread in order of time."""
    claims: dict[int, list[tuple[Part, int]]] = {0: []} if spans else {}
    for number, d in enumerate(dispatches):
        for claim in d.parts:
            claims.setdefault(claim.thread, []).append((claim, number))
    events = [metadata_event("process_name", 0, f"aotc: {name}")]
    events += [metadata_event("thread_name", t, "the caller" if t == 0 else f"worker {t}") for t in sorted(claims)]
    for thread in sorted(claims):
        rows = [slice_event(s.name, "call", thread, s.start, s.ns, {}) for s in spans] if thread == 0 else []
        for run in _runs_of_claims(sorted(claims[thread])):
            rows += _dispatch_slice(dispatches[run[0][1]], run, thread)
        events += sorted(rows, key=lambda e: (e["ts"], -e["dur"]))
    layers = _name_scope_slices(dispatches, [span.start for span in spans])
    return events + ([metadata_event("thread_name", LAYERS, "layers"), *layers] if layers else [])


def _name_scope_slices(dispatches: Sequence[Dispatch], begins: Sequence[int]) -> list[dict[str, Any]]:
    """Return the slices of the track of layers, one for consecutive dispatches of a scope.

    No slice extends over one of the times ``begins``, at which calls begin.
    """
    rows: list[dict[str, Any]] = []
    stack: list[list[Any]] = []  # name, begin and end of each open scope
    last = 0

    def close(depth: int, until: int) -> None:
        while len(stack) > depth:
            scope = "/".join(row[0] for row in stack)
            name, begin, end = stack.pop()
            rows.append(slice_event(name, "scope", LAYERS, begin, max(min(end, until) - begin, 0), {"scope": scope}))

    for d in sorted(dispatches, key=lambda d: d.start):
        scope = model_place(d.loc).scope
        names = scope.split("/") if scope else []
        common = next((n for n, (row, name) in enumerate(zip(stack, names)) if row[0] != name), None)
        common = min(len(stack), len(names)) if common is None else common
        close(0 if any(last < begin <= d.start for begin in begins) else common, d.start)
        stack += [[name, d.start, 0] for name in names[len(stack) :]]
        for row in stack:
            row[2] = max(row[2], d.start + d.ns)
        last = d.start
    close(0, max((row[2] for row in stack), default=0))
    return sorted(rows, key=lambda e: (e["ts"], -e["dur"]))


def events_text(events: Sequence[Mapping[str, Any]], more: Mapping[str, Any] | None = None) -> str:
    """Format events as JSON, one a line, with the additional keys of ``more``, which trace viewers ignore."""
    lines = ",\n".join(json.dumps(e) for e in events)
    rest = "".join(f",\n{json.dumps(key)}: {_json_lines(value)}" for key, value in (more or {}).items())
    return f'{{"traceEvents": [\n{lines}\n],\n"displayTimeUnit": "ns"{rest}}}\n'


def _json_lines(value: Any) -> str:
    """Format ``value`` as JSON; each item of a list is on its own line."""
    return "[\n" + ",\n".join(map(json.dumps, value)) + "\n]" if isinstance(value, list) else json.dumps(value)


def _runs_of_claims(claims: Sequence[tuple[Part, int]]) -> list[list[tuple[Part, int]]]:
    """Group the claims of one thread, in order of time, into runs of consecutive claims of the same dispatch."""
    runs: list[list[tuple[Part, int]]] = []
    for claim, number in sorted(claims, key=lambda pair: pair[0].began):
        if runs and runs[-1][-1][1] == number:
            runs[-1].append((claim, number))
        else:
            runs.append([(claim, number)])
    return runs


def _dispatch_slice(d: Dispatch, run: Sequence[tuple[Part, int]], thread: int) -> list[dict[str, Any]]:
    """Return the events of a run of claims of dispatch ``d``: a slice, and nested ones if there are several claims."""
    start, end = run[0][0].began, run[-1][0].ended
    facts = {key: value for key, value in d._asdict().items() if key not in ("kernel", "parts", "sizes")}
    place, sizes = model_place(d.loc), kernel_sizes_text(d.sizes)
    facts |= {"dispatch": run[0][1], "sizes": sizes, "scope": place.scope, "line": place.line}
    rows = [slice_event(d.kernel, "dispatch", thread, start, end - start, facts)]
    if len(run) > 1:
        rows += [slice_event(f"{c.first}:{c.last}", "claim", thread, c.began, c.ended - c.began, {}) for c, _ in run]
    return rows


def slice_event(name: str, kind: str, thread: int, start: int, ns: int, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the event of a slice on the track of a thread; ``start`` and ``ns`` are nanoseconds."""
    times = {"ts": start / 1e3, "dur": ns / 1e3}
    return {"name": name, "cat": kind, "ph": "X", "pid": PROCESS, "tid": thread, **times, "args": dict(facts)}


def metadata_event(what: str, thread: int, name: str) -> dict[str, Any]:
    """Return the event that names a track: ``what`` is ``thread_name`` or ``process_name``."""
    return {"name": what, "ph": "M", "pid": PROCESS, "tid": thread, "args": {"name": name}}
