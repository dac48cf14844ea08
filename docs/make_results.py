"""Write docs/results.md, and the figures of README.md, from ``benchmarks/results/*.json``.

``python -m benchmarks ... --record`` writes those.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.suites import listing  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- figures: docs/make_results.py -->", "<!-- end of figures -->"
NAMES = {"xla": "XLA", "iree": "IREE", "onnxruntime": "ONNX Runtime", "openvino": "OpenVINO"}
HEAD = """# Results

Written by `python docs/make_results.py` from `benchmarks/results/*.json`; do not edit.

Each section is one run of a suite. `python -m benchmarks` lists the suites, and the command below each title repeats
it; `--record NAME` writes a new record. Engines take turns in every round. A ratio is the median over the rounds, with
the quartiles in brackets; below 1 aotc is faster. A machine counts as quiet if other processes used less than 5 % of
its processor time before and after the run.

## The suites

    python -m benchmarks

prints

```
{listing}
```

All suites have `--only` or options of their own for their cases, `--smoke` (one repetition of the smallest case),
`--format table|markdown|json` and `--record NAME`. A new suite is a module in the folder of its topic. The first line
of its docstring is its line above; the parameters of its function `run` are its options, and `benchmarks/options.py`
has those that suites share. `benchmarks/timing.py` takes its times, and `benchmarks/report.py` prints its tables.
"""


def records() -> dict[str, dict[str, Any]]:
    """Return the records by name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}


def section(name: str, record: dict[str, Any]) -> str:
    """Return the section of a record: machine, command, tables, notes."""
    parts = [f"## {name.replace('_', ' ')}", about(record), f"```\n{record['command']}\n```"]
    for table in record["tables"]:
        parts += [f"### {table['title']}"] if table["title"] else []
        parts.append(lines_of(table))
    if record["notes"]:
        parts.append("\n".join(f"- {text}" for text in record["notes"]))
    return "\n\n".join(parts)


def about(record: dict[str, Any]) -> str:
    """Return a paragraph about the machine."""
    machine = record["machine"]
    cores = f", {machine['cores']} cores" if "cores" in machine else ""
    gpu = f"; {machine['gpu']}" if "gpu" in machine else ""
    versions = ", ".join(f"{package} {version}" for package, version in machine["versions"].items())
    match record["quiet"]:
        case True:
            load = "quiet"
        case False:
            load = f"busy: other processes used {record['load']:.0%} of its processor time"
        case _:
            load = "load not recorded"
    return f"{record['date']}; {machine['processor']}{cores}{gpu}; {load}; {versions}."


def lines_of(table: dict[str, Any]) -> str:
    """Return a table as markdown; columns without values are left out."""
    first, *rest = table["columns"]
    columns = [first, *(c for c in rest if any(row.get(c) is not None for row in table["rows"]))]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    lines += [f"| {' | '.join(cell(row.get(column)) for column in columns)} |" for row in table["rows"]]
    return "\n".join(lines)


def cell(value: Any) -> str:
    """Return a value of a table: three digits, a ratio with its quartiles."""
    match value:
        case None:
            return ""
        case [median, low, high]:
            return f"{median:.2f} ({low:.2f} to {high:.2f})"
        case bool() | str():
            return str(value).replace("|", "\\|")
        case int():
            return f"{value:,}"
        case _:
            return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def page() -> str:
    """Return the text of the page."""
    head = HEAD.replace("{listing}", "\n".join(listing()))
    return "\n".join([head, *(section(name, record) + "\n" for name, record in records().items())])


def figures() -> str:
    """Return the table of the README: aotc next to the fastest other engine, by the time of a call."""
    rows: dict[str, dict[str, Any]] = {}
    for row in records()["engines_threads2"]["tables"][0]["rows"]:
        model, engine = row["model, engine"].split(", ")
        if not engine.endswith("_bf16"):  # the model's own precision only
            rows.setdefault(model, {})[engine] = row
    columns = ["model", "aotc, ms", "fastest other, ms", "aotc / other", "start: aotc, s", "start: other, s"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for model, engines in sorted(rows.items()):
        ours = engines.pop("aotc")
        name, best = min(engines.items(), key=lambda item: item[1]["call ms"])
        ratio = ours["call ms"] / best["call ms"]
        lines.append(
            f"| {model} | {cell(ours['call ms'])} | {cell(best['call ms'])} ({NAMES[name]}) | {ratio:.2f} "
            f"| {ours['cold s']:.2f} | {best['cold s']:.2f} |"
        )
    return "\n".join(lines)


def readme() -> str:
    """Return the text of the README with its figures."""
    text = (ROOT / "README.md").read_text()
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n\n{figures()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    (ROOT / "docs" / "results.md").write_text(page())
    (ROOT / "README.md").write_text(readme())
