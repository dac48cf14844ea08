"""Records of measured kernels: their form, and the digest by which a kernel is known again.

A record is plain data, which is kept as JSON, as a segment of a bundle, or among the options that a bundle's source
was compiled with. ``ns`` is the time of one run on one core of a CPU, or on a whole GPU, by the kind of the device, by
the name of one that the model names, or by its target where CPU devices have several.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from aotc.vmfb.verify.schema import acceptor, problems

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
            "bytes": int,
            "flops?": int,
            "ns": {str: (int, float)},
        }
    ],
}

_ESTIMATES = re.compile(r', (?:flops|bytes): "[^"]*"')
_accepts = acceptor(SCHEMA)


def digest_of(text: str) -> str:
    """Return the digest of a kernel's text, its name and what its work was thought to be left out.

    Equal code of two bundles has one.
    """
    return sha256(_ESTIMATES.sub("", text[text.index("(") :], count=2).encode()).hexdigest()[:32]


def problem(record: Any) -> str:
    """Return a sentence about the first place where ``record`` is no record, or an empty string."""
    if isinstance(record, Mapping) and record.get("format") not in (None, FORMAT):
        return f"its format is {record['format']}, expected {FORMAT}"
    if not _accepts(record):
        return next(problems(record, SCHEMA, "record"), "it has another form")
    times = [ns for row in record["kernels"] for ns in row["ns"].values()]
    return "" if all(0 < ns < float("inf") for ns in times) else "a time is not positive"


def read_record(text: str | bytes) -> dict[str, Any]:
    """Return the record that ``text`` is as JSON.

    Raises
    ------
    ValueError
        If it is none; the message says why.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no JSON: {error}") from None
    if said := problem(found):
        raise ValueError(said)
    return {key: value for key, value in found.items() if key not in DRAWN}


def record_text(record: Mapping[str, Any]) -> str:
    """Return a record as JSON, a kernel to a line."""
    rows = ",\n".join("  " + json.dumps(row) for row in record["kernels"])
    head = json.dumps({**record, "kernels": []}, indent=1)
    return head.replace('"kernels": []', f'"kernels": [\n{rows}\n ]') + "\n"
