"""The page of error bounds, ``docs/accuracy.md``: ``PYTHONPATH=tests python -m conformance.accuracy`` writes it."""

from __future__ import annotations

from pathlib import Path

from conformance.edge_bounds import BOUNDS, functions
from conformance.sums import SUMS

PAGE = Path(__file__).parents[2] / "docs" / "accuracy.md"
DTYPES = ("f16", "bf16", "f32", "f64", "c64", "c128")

HEAD = """# Accuracy

Generated from the tables of the tests: `PYTHONPATH=tests python -m conformance.accuracy`.

## Functions

The largest error of each elementwise function, in units in the last place of the result's type. For a complex result
the unit is that of its larger part. The bounds hold on CPUs with and without fused multiply-add. GPUs compute the same
formulas. `0.51` is a value that is computed in a wider type and rounded once. `none` means that no bound is known; the
reason follows the table.

Tests check the bounds on edge values ([edges.md](edges.md), `tests/whole/test_edges.py`) and on random numbers of every
binade (`tests/kernels/formulas/test_error_bounds.py`), against long double and mpmath. At complex infinities, NaN and
poles the results follow C99's annex G (`tests/conformance/edge_rules.py`).

"""

SUMS_HEAD = """
## Sums

The error of a sum of `n` terms is at most `height * u * sum(abs(x))` to first order. `u` is half a unit in the last
place of 1: `2**-24` in f32, `2**-53` in f64. The height is the largest number of additions that a term goes through
(N. Higham, "Accuracy and Stability of Numerical Algorithms", 4.2). Floats of 16 bits and fewer are summed in f32 and
rounded once; complex sums are those of their parts. A contraction rounds no product by itself where the CPU has a fused
multiply-add.

`tests/kernels/test_sum_bounds.py` measures the heights on the CPU: next to a 1, a number below `u` is lost, so a sum of
a 1 and many such numbers lacks one for each addition that the 1 goes through.

| Sum of `n` terms | Height at most |
|---|---|
"""


def page() -> str:
    """Return the page."""
    lines = [_row("Function", *DTYPES), _row(*["---"] * (len(DTYPES) + 1))]
    lines += [_row(name, *(_bound(name, dtype) for dtype in DTYPES)) for name in functions()]
    reasons = (
        (name, BOUNDS[name, dtype].reason) for name in functions() for dtype in DTYPES if (name, dtype) in BOUNDS
    )
    notes = {f"- {name}: {reason}." for name, reason in reasons if reason}
    sums = {s.name.partition(",")[0] if "window" in s.name else s.name: s.formula for s in SUMS}
    rows = [_row(name, formula) for name, formula in sums.items()]
    return HEAD + "\n".join([*lines, "", *sorted(notes)]) + "\n" + SUMS_HEAD + "\n".join(rows) + "\n"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _bound(name: str, dtype: str) -> str:
    bound = BOUNDS.get((name, dtype))
    return "" if bound is None else "none" if bound.ulp == float("inf") else str(bound)


if __name__ == "__main__":
    PAGE.write_text(page())
