"""Cost records: measured times of kernels, for a second compilation; their schema, and the digest of a kernel.

A record is plain data, stored as JSON, as a segment of a bundle, or in the options that a bundle's source was compiled
with. The field ``ns`` of a kernel has the times of one run on one core of a CPU or on a whole GPU. Its keys are the
kind of the device, the name of a device of the model, or the target if CPU devices have several targets.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any

from aotc.vmfb.verify.schema import problems, schema_acceptor

FORMAT = 1
DRAWN = ("traceEvents", "displayTimeUnit")  # of the keys of a record, those for Perfetto alone

SCHEMA: dict[Any, Any] = {
    "format": int,
    "producer": str,
    "program": str,
    "target": str,
    "function": str,
    "machine": {str: (str, int)},
    "versions": {str: str},
    "kernels": [
        {
            "digest": str,
            "name": str,
            "loc": str,
            "ops": int,
            "sizes": {str: int},
            "runs": int,
            "places?": {str: int},  # the runs at each location in the model
            "bytes": int,
            "flops?": int,
            "ns": {str: (int, float)},
        }
    ],
}

_ESTIMATES = re.compile(r', (?:flops|bytes): "[^"]*"')
_accepts = schema_acceptor(SCHEMA)


def kernel_text_digest(text: str) -> str:
    """Return the digest of a kernel's text, without its name and its estimated work.

    Kernels of two bundles with equal code have the same digest.
    """
    return sha256(_ESTIMATES.sub("", text[text.index("(") :], count=2).encode()).hexdigest()[:32]


def record_problem(record: Any) -> str:
    """Describe the first place where ``record`` is invalid; an empty string if it is valid."""
    if isinstance(record, Mapping) and record.get("format") not in (None, FORMAT):
        return f"its format is {record['format']}, expected {FORMAT}"
    if not _accepts(record):
        return next(problems(record, SCHEMA, "record"), "it has another form")
    times = [ns for row in record["kernels"] for ns in row["ns"].values()]
    return "" if all(0 < ns < float("inf") for ns in times) else "a time is not positive"


def read_record(text: str | bytes) -> dict[str, Any]:
    """Parse and validate a cost record from JSON.

    Raises
    ------
    ValueError
        If the text is not a record; the message has the reason.
    """
    return {key: value for key, value in parse_record(text, record_problem).items() if key not in DRAWN}


def parse_record(text: str | bytes, problem_of: Callable[[object], str]) -> dict[str, Any]:
    """Parse a record of any schema from JSON; ``problem_of`` describes what is wrong with it.

    Raises
    ------
    ValueError
        If the text is not JSON, or ``problem_of`` returns a text.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}") from None
    if problem := problem_of(found):
        raise ValueError(problem)
    return dict(found)


def record_text(record: Mapping[str, Any], key: str = "kernels") -> str:
    """Format a record as JSON, with a line for each row of the list ``key``."""
    rows = ",\n".join("  " + json.dumps(row) for row in record[key])
    head = json.dumps({**record, key: []}, indent=1)
    return head.replace(f'"{key}": []', f'"{key}": [\n{rows}\n ]') + "\n"
