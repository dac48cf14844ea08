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
`tests/conformance/agreement.py` gives for sums, factorizations and iterations. Eigenvectors and singular vectors, of
which those of another sign or phase are as good, satisfy what they must (`tests/conformance/decompositions.py`).

Elementwise ops on edge values (`tests/whole/test_edges.py`; a run of all of it has them in rows `edges.*`) are judged
by long double and mpmath within the bounds of `tests/conformance/edge_bounds.py`, not by XLA, conversions, `clamp` and
`select` (`tests/whole/test_edge_conversions.py`) by exact arithmetic: [edges.md](edges.md).

StableHLO's own test data (`stablehlo/testdata`, XLA's results of the time) wants 3 units in each part of a complex
number. `power` and `sine` of c64 do not hold that and are judged by mpmath (`tests/whole/test_testdata.py`): of
`pow_complex64_20_30_complex64_20_30` 377 of 600 elements lie farther than that from the data, and each of the 377 is
nearer to mpmath than the data is (largest error 0.5 units, the data's 9107); of `sin_complex64_20_20` 3 of 400 (2.0
units, the data's 3.5). `cumprod_complex64_8_9`, and products of complex numbers, have XLA's bits; only where the
rounded products of an imaginary part cancel it is 0, so that a number times its conjugate is real.

`lgamma`: what `jax.export` writes, and so also `aotc.compile(f, ...)`, has XLA's expansion in place of `chlo.lgamma`,
with its error next to negative zeros (f32 1.5e8 units at -2.4570248, 2e-6 near -2.597); a `jax.jit(f).lower(...)` or
its text keeps the op, and the result is right to a unit.

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
        properties = dict(getattr(report, "user_properties", ()))  # a module that is skipped whole has none
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
