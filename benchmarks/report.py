"""The table of a benchmark run, and a plot: ``python benchmarks/report.py benchmarks/results/threads2.json``."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

COLUMNS = ("xla", "aotc", "iree", "onnxruntime", "openvino", "aotc_bf16", "openvino_bf16")


def table(records: list[dict[str, Any]]) -> str:
    """Return a markdown table: latency of each engine, aotc's ratio to XLA, cold starts, compile time, size."""
    engines = [e for e in COLUMNS if any(e in r["engines"] for r in records)]
    head = ["model", "threads", *(f"{e} ms" for e in engines), "aotc / xla"]
    head += ["cold s " + e for e in engines] + ["aotc compile s", "again s", "bundle MB"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for record in records:
        facts = record["engines"]
        ours = facts.get("aotc", {})
        row = [record["model"], str(record["threads"])]
        row += [_cell(facts.get(e, {}), "latency", 1e3) for e in engines]
        row += [_cell(ours, "ratio", 1)] + [_cell(facts.get(e, {}), "cold", 1) for e in engines]
        row += [_cell(ours, "compile", 1), _cell(ours, "compile_warm", 1), _cell(ours, "bytes", 1e-6)]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join([*lines, *_summary(records)])


def _cell(facts: dict[str, Any], key: str, scale: float) -> str:
    if key in facts:
        return f"{facts[key] * scale:.3g}"
    return "failed" if "failed" in facts and key in ("latency", "ratio") else ""


def _summary(records: list[dict[str, Any]]) -> list[str]:
    ratios = [r["engines"]["aotc"]["ratio"] for r in records if "ratio" in r["engines"].get("aotc", {})]
    if len(ratios) < 2:
        return []
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return ["", f"aotc / xla: geometric mean {mean:.2f} over {len(ratios)} models (below 1 is faster)."]


def plot(records: list[dict[str, Any]], path: Path) -> bool:
    """Draw the ratios as bars, if matplotlib is there; say whether it was."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("svg")
    from matplotlib import pyplot

    engines = [e for e in COLUMNS[1:] if any("ratio" in r["engines"].get(e, {}) for r in records)]
    figure, axes = pyplot.subplots(figsize=(10, 4))
    for number, engine in enumerate(engines):
        heights = [r["engines"].get(engine, {}).get("ratio", 0) for r in records]
        axes.bar(
            [i + 0.8 * number / len(engines) for i in range(len(records))], heights, 0.8 / len(engines), label=engine
        )
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(records)), [r["model"] for r in records], rotation=45, ha="right")
    axes.set_ylabel("time / XLA's (lower is better)")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    return True


if __name__ == "__main__":
    source = Path(sys.argv[1])
    found = json.loads(source.read_text())
    print(table(found["records"]))
    plot(found["records"], source.with_suffix(".svg"))
