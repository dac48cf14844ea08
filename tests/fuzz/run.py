"""``make fuzz``: how many of each, for how long; what became of them; failures with the numbers that repeat them.

    python tests/fuzz/run.py --bundles=100000 --modules=100000 --compiled=3500 --calls=100000
    python tests/fuzz/run.py --bundles=1 --first=889                              # one case again, or where to go on
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from functools import partial
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
KINDS = ("bundles", "modules", "compiled", "calls")
PORTION = 5000  # cases between two lines about how far it is


def main() -> int:
    """Run what the command line asks for; return 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for kind in KINDS:
        parser.add_argument(f"--{kind}", type=int, default=0, help=f"how many (default 0), tests/fuzz/{kind}.py")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for each kind")
    options = parser.parse_args()
    failed = 0
    for kind in KINDS:
        if count := getattr(options, kind):
            failed += fuzz(kind, range(options.first, options.first + count), options.seconds)
    return 1 if failed else 0


def fuzz(kind: str, numbers: range, seconds: float) -> int:
    """Run cases of one kind; return how many failed."""
    from fuzz import children

    module = import_module(f"fuzz.{kind}")
    begin = time.monotonic()
    total: Counter[str] = Counter()
    failed = 0
    for first in range(numbers.start, numbers.stop, PORTION):
        rest = seconds - (time.monotonic() - begin)
        portion = range(first, min(first + PORTION, numbers.stop))
        outcomes, failures = children.run(module.case, portion, rest, module.PATIENCE, partial(print, flush=True))
        total += outcomes
        failed += len(failures)
        if portion.stop < numbers.stop and rest > 0:
            print(f"  {kind}: {sum(total.values())} in {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    words = ", ".join(f"{n} {word}" for word, n in total.most_common())
    print(f"{kind}: {sum(total.values())} in {time.monotonic() - begin:.0f} s: {words}; {failed} failures", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
