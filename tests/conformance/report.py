"""The table of a whole run, from pytest's reports: ``docs/conformance.md``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

HEAD = """# Conformance

Written by `{command}` (jax {jax}): every case of `jax._src.internal_test_util.test_harnesses`, with and
without 64-bit types, and calls of the public functions of `jax.lax`, `jax.numpy`, `jax.numpy.linalg`,
`jax.numpy.fft`, `jax.scipy`, `jax.nn`, `jax.random`, `jax.image` and `jax.ops`, compiled for `{target}` and
compared with XLA on the CPU. Integers, booleans and moved data are equal; floats lie within 4 units in the last
place of XLA's, or are no farther from the same program in float64 than XLA is, or within the bound that
`tests/conformance/agreement.py` gives for sums, factorizations and iterations.

{passed} of {run} cases agree; {skipped} are not run, for the reasons at the end.
"""


@dataclass(slots=True)
class Row:
    """The counts of one group, its largest error in ulp, and why cases were not run."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    worst: float = 0.0
    reasons: set[str] = field(default_factory=set)


def rows(reports: Iterable[Any]) -> dict[str, Row]:
    """Count pytest's reports by group."""
    table: dict[str, Row] = defaultdict(Row)
    for report in reports:
        properties = dict(report.user_properties)
        if report.when != "call" or "group" not in properties:
            continue
        row = table[properties["group"]]
        match report.outcome:
            case "passed":
                row.passed += 1
                row.worst = max(row.worst, properties.get("worst", 0.0))
            case "failed":
                row.failed += 1
            case _:
                row.skipped += 1
                row.reasons.add(report.longrepr[2].removeprefix("Skipped: "))
    return dict(sorted(table.items()))


def text(table: dict[str, Row], jax_version: str, target: str) -> str:
    """Return the page."""
    passed, failed = sum(r.passed for r in table.values()), sum(r.failed for r in table.values())
    skipped = sum(r.skipped for r in table.values())
    command = "pytest -m conformance" + (f" --target {target}" if target != "cpu" else "")
    counts = {"passed": passed, "run": passed + failed, "skipped": skipped}
    lines = [HEAD.format(command=command, jax=jax_version, target=target, **counts)]
    lines += ["| Group | Agree | Differ | Not run | Largest error, ulp |", "|---|---|---|---|---|"]
    lines += [f"| {g} | {r.passed} | {r.failed or ''} | {r.skipped or ''} | {r.worst:.1f} |" for g, r in table.items()]
    why = [(g, reason) for g, r in table.items() for reason in sorted(r.reasons)]
    if why:
        lines += ["", "Not run", "", *(f"- {group}: {reason}" for group, reason in why)]
    return "\n".join(lines) + "\n"
