"""``make fuzz``: numbered cases of each kind, in child processes; a summary with the failing numbers and their inputs.

    python tests/fuzz/run.py --bundles=100000 --modules=10000 --resume=build/fuzz   # goes on where the last run ended
    python tests/fuzz/run.py --bundles=100000 --resume=build/fuzz --first=0         # begins again
    python tests/fuzz/run.py --bundles=1 --first=889                                # one case again
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
KINDS = ("bundles", "modules", "bytecode", "blobs", "tensors", "compiled", "calls")
PORTION = 1000  # cases between two lines about the progress


class Progress:
    """The position of each kind, in a file of a folder; without a folder it lasts for one run.

    Attributes
    ----------
    rows : dict
        By kind: ``next`` is the number of the next case, ``outcomes`` counts words, ``failures`` are numbers.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder) if folder else None
        self.rows: dict[str, dict[str, Any]] = {}
        if self.folder and (file := self.folder / "position.json").exists():
            self.rows = json.loads(file.read_text())

    def row(self, kind: str, first: int | None) -> dict[str, Any]:
        """Return the row of a kind, a new one where a run begins at ``first``."""
        if first is not None or kind not in self.rows:
            self.rows[kind] = {"next": first or 0, "outcomes": {}, "failures": []}
        return self.rows[kind]

    def save(self) -> None:
        """Write the file; a run that is stopped meanwhile leaves the old one."""
        if self.folder:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = self.folder / "position.json"
            (part := file.with_suffix(".part")).write_text(json.dumps(self.rows))
            part.replace(file)

    def keep_input(self, kind: str, module: Any, number: int) -> str:
        """Write the input of a failing case to the folder; return its path, or how to repeat the case."""
        if not self.folder or not hasattr(module, "input_of"):
            return f"python tests/fuzz/run.py --{kind}=1 --first={number}"
        data, suffix = module.input_of(number)
        path = self.folder / "failures" / f"{kind}-{number}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return str(path)


def main() -> int:
    """Run the cases that the command line names; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for kind in KINDS:
        parser.add_argument(f"--{kind}", type=int, default=0, help=f"number of cases (default 0), tests/fuzz/{kind}.py")
    parser.add_argument("--first", type=int, help="number of the first case; default 0, or where the last run ended")
    parser.add_argument("--resume", default="", help="folder of the position and of the inputs of failing cases")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for each kind")
    options = parser.parse_args()
    progress = Progress(options.resume)
    lines = []
    failed = 0
    for kind in KINDS:
        if count := getattr(options, kind):
            row = progress.row(kind, options.first)
            end = count if options.resume else row["next"] + count
            lines.append(fuzz(kind, end, options.seconds, progress, row))
            failed += len(row["failures"])
    print("\n".join(lines), flush=True)
    return 1 if failed else 0


def fuzz(kind: str, end: int, seconds: float, progress: Progress, row: dict[str, Any]) -> str:
    """Run the cases of one kind up to number ``end``; return the summary."""
    from fuzz import children

    module = import_module(f"fuzz.{kind}")
    begin = time.monotonic()
    while row["next"] < end and (rest := seconds - (time.monotonic() - begin)) > 0:
        portion = range(row["next"], min(row["next"] + PORTION, end))
        outcomes, failures = children.run(module.case, portion, rest, module.PATIENCE, partial(print, flush=True))
        row["outcomes"] = dict(Counter(row["outcomes"]) + outcomes)
        row["failures"] += [int(text.split()[1].rstrip(":")) for text in failures]
        row["next"] += sum(outcomes.values())
        progress.save()
        print(
            f"  {kind}: {row['next']} of {end}, {len(row['failures'])} failures, {time.monotonic() - begin:.0f} s",
            file=sys.stderr, flush=True,
        )  # fmt: skip
    counts = Counter(row["outcomes"])
    words = ", ".join(f"{n} {word}" for word, n in counts.most_common())
    text = f"{kind}: {counts.total()} in {time.monotonic() - begin:.0f} s: {words}; {len(row['failures'])} failures"
    for number in row["failures"]:
        text += f"\n  case {number}: {progress.keep_input(kind, module, number)}"
    return text


if __name__ == "__main__":
    sys.exit(main())
