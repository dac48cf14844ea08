"""``make fuzz``: how many of each, for how long; what became of them; failures with the numbers that repeat them.

    python tests/fuzz/run.py --bundles=100000 --modules=100000 --calls=100000
    python tests/fuzz/run.py --bundles=1 --first=889                              # one case again
"""

from __future__ import annotations

import argparse
import sys
import time
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
KINDS = ("bundles", "modules", "calls")


def main() -> int:
    """Run what the command line asks for; return 1 if something failed."""
    from fuzz import children

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for kind in KINDS:
        parser.add_argument(f"--{kind}", type=int, default=0, help=f"how many (default 0), tests/fuzz/{kind}.py")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for each kind")
    parser.add_argument("--shown", type=int, default=10, help="failures to print")
    options = parser.parse_args()
    failed = 0
    for kind in KINDS:
        count = getattr(options, kind)
        if not count:
            continue
        module = import_module(f"fuzz.{kind}")
        begin = time.monotonic()
        numbers = range(options.first, options.first + count)
        outcomes, failures = children.run(module.case, numbers, options.seconds, module.may_hang, module.PATIENCE)
        words = ", ".join(f"{n} {word}" for word, n in outcomes.most_common())
        seconds = time.monotonic() - begin
        print(f"{kind}: {sum(outcomes.values())} in {seconds:.0f} s: {words}; {len(failures)} failures", flush=True)
        for text in failures[: options.shown]:
            print(text)
        failed += len(failures)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
