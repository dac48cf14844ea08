"""The page of error bounds, ``docs/accuracy.md``: ``PYTHONPATH=tests python -m conformance.accuracy`` writes it."""

from __future__ import annotations

from pathlib import Path

from conformance.edge_bounds import BOUNDS, functions
from conformance.expanded import DTYPES as EXPANDED_DTYPES
from conformance.expanded import EXPANDED
from conformance.sums import COMPOSED, SUMS

PAGE = Path(__file__).parents[2] / "docs" / "accuracy.md"
DTYPES = ("f16", "bf16", "f32", "f64", "c64", "c128")

HEAD = """# Accuracy

Generated from the tables of the tests: `PYTHONPATH=tests python -m conformance.accuracy`.

## Functions

The largest error of each elementwise function, in units in the last place of the result's type. For a complex result
the unit is that of its larger part. The bounds hold on CPUs with and without fused multiply-add. GPUs compute the same
formulas. `0.51` is a value that is computed in a wider type and rounded once.

They hold for ops: of text, of bytecode, of functions and of `jax.jit(f).lower(...)`. `jax.export` writes other ops in
place of `digamma`, `erfc`, `erf_inv` and `lgamma`, and of functions of complex numbers. The errors of an export are
then those of jaxlib's expansions, as XLA's are. `bessel_i1e`, `zeta` and `polygamma` are such expansions in every form.
JAX writes `sin` and `cos` of complex numbers as real functions of the parts: each then has up to 4 units. Functions
that `aotc.compile` traces itself follow C99's annex G there too.

Tests check the bounds on edge values ([edges.md](edges.md), `tests/whole/test_edges.py`) and on random numbers of every
binade (`tests/kernels/formulas/test_error_bounds.py`), against long double and mpmath. `make test-all` draws other
random numbers every day; a failure names the seed. `pytest -m slow tests/kernels/formulas/test_dense_bounds.py` runs
every unary function on every 257th f32 number. At complex infinities, NaN and poles the results follow C99's annex G
(`tests/conformance/edge_rules.py`).

"""

PEERS = """
Bounds above 4 units, with the largest errors that were found: on f32 numbers 16411 apart and 7 million between 0.3 and
12. The bound covers CPUs without fused multiply-add. XLA is jaxlib 0.10 on a CPU with
it; its results that are subnormal are not counted. erf is the same rational function as XLA's.

| Function | aotc | aotc without FMA | XLA | Bound |
| --- | --- | --- | --- | --- |
| erf f32 | 5.5 | 7.3 | 5.6 | 8 |
| erfc f32 | 5.4 | 6.8 | 65.8 | 7.5 |
| bessel_i1e f32 | 10.4 | 14.5 | 10.4 | 15 |

Largest errors of the ops and of jaxlib's expansions of them, on f32 numbers of every binade and 400,000 between -20 and
20, on f64 numbers 5,000 of these, on a CPU with fused multiply-add. Times are the processor's for an element of
100,000, the median of nine turns of both on an AMD EPYC with AVX-512, between -10 and 30 (`erf_inv` between -1 and 1,
`erfc` between -3 and 6). A quarter of the arguments is negative. `lgamma` of a negative f64 is computed in two words,
as near its zeros no digit would be left; an f32 is, too, where the result is below 0.004.
`PYTHONPATH=tests python -m conformance.expansions` repeats it with fewer arguments.

| Function | Error | Error of the expansion | ns | ns of the expansion |
| --- | --- | --- | --- | --- |
| digamma f32 | 0.50 | 8.4e+06 | 4.7 | 4.1 |
| digamma f64 | 6.5e+03, next to a zero | 2.3e+04 | 4.7 | 9.0 |
| erfc f64 | 3.0 | 235 | 2.5 | 2.6 |
| erf_inv f32 | 2.5 | 62.8 | 0.95 | 0.81 |
| erf_inv f64 | 3.5 | 16.5 | 6.1 | 4.7 |
| lgamma f32 | 0.50 | 3.0e+06 | 3.8 | 4.0 |
| lgamma f32, positive | 0.50 | 3.0e+06 | 2.0 | 2.2 |
| lgamma f32, negative | 0.50 | 3.0e+06 | 2.1 | 2.1 |
| lgamma f64 | 1.8 | 2.0e+04 | 66 | 9.1 |
"""

EXPANDED_HEAD = """
### Functions without an op

jaxlib expands `chlo.zeta` and `chlo.polygamma` into ops, jax writes `bessel_i0e` as a polynomial. The bounds hold for
these arguments (`tests/kernels/formulas/test_expanded_bounds.py`, against mpmath). `polygamma` has no digits where
`zeta(n + 1, x)` underflows. The test also requires a row of these tables for each float type of each op that rounds,
and for each op of CHLO. Floats of 8 bits and fewer are computed in f32 and rounded once
(`tests/kernels/test_small_floats.py` has every code).

"""

SUMS_HEAD = """
## Sums

The error of a sum of `n` terms is at most `height * u * sum(abs(x))` to first order. `u` is half a unit in the last
place of 1: `2**-24` in f32, `2**-53` in f64. The height is the largest number of additions that a term goes through
(N. Higham, "Accuracy and Stability of Numerical Algorithms", 4.2).

- Floats of 16 bits and fewer: the last column has the type in which they are added. Sums in `f32` are rounded once at
  the end. In their `own` type each addition is rounded, as in XLA: `u` is `2**-11` in f16, `2**-8` in bf16. A scatter
  that counts ones stops at `2**11` and `2**8`. `jnp.sum` and `jnp.mean` of 16 bits convert to f32 first.
- Complex sums are those of their parts. Their products have two terms a part: the height of `dot_general` is `2 n`. JAX
  writes a complex convolution as three real ones, so the sum of sizes is that of both parts.
- Integers are exact modulo `2**bits`.
- A contraction rounds no product by itself where the CPU has a fused multiply-add.

`tests/kernels/test_sum_bounds.py` measures the heights on the CPU: next to a 1, a number below `u` is lost, so a sum of
a 1 and many such numbers lacks one for each addition that the 1 goes through. It measures errors on random, sorted,
alternating and constant terms against long double.

| Sum of `n` terms | Height at most | Floats of 16 bits |
|---|---|---|
"""

COMPOSED_HEAD = """
### Functions of sums

The largest error of functions of rows of `n` elements, in units of `u`. `h` is `n / 8 + 16`, the height of the sum, and
`y` is the result.

| Function | Error at most |
|---|---|
"""

DATA = """
### StableHLO's test data

StableHLO's own test data has sums in XLA's order of their time. `cumsum` of c64 and `reduce_window` add of f64 are up
to 8 units in the last place away from it, where terms cancel. Neither is nearer to the exact sums: in units of
`u * sum(abs(x))` the largest errors are these (`tests/whole/test_testdata.py`).

| File | aotc | Data |
|---|---|---|
| cumsum_complex64_8_9 | 1.0 | 1.0 |
| cumsum_complex128_8_9 | 1.7 | 1.3 |
| cumsum_float64_8_9 | 1.3 | 1.2 |
| reduce_window_add_float64_4_6 | 0.97 | 0.64 |
"""


def page() -> str:
    """Return the page."""
    lines = [_row("Function", *DTYPES), _row(*["---"] * (len(DTYPES) + 1))]
    lines += [_row(name, *(_bound(name, dtype) for dtype in DTYPES)) for name in functions()]
    reasons = (
        (name, BOUNDS[name, dtype].reason) for name in functions() for dtype in DTYPES if (name, dtype) in BOUNDS
    )
    notes = {f"- {name}: {reason}." for name, reason in reasons if reason}
    sums = {s.name.partition(",")[0] if "window" in s.name else s.name: (s.formula, s.narrow) for s in SUMS}
    rows = "\n".join(_row(name, *cells) for name, cells in sums.items())
    composed = "\n".join(_row(row.name, f"`{row.formula}`") for row in COMPOSED)
    functions_part = HEAD + "\n".join([*lines, "", *sorted(notes)]) + "\n"
    expanded = [_row("Function", "Arguments", *EXPANDED_DTYPES), _row(*["---"] * (len(EXPANDED_DTYPES) + 2))]
    expanded += [_row(row.name, row.domain, *map(row.bound, EXPANDED_DTYPES)) for row in EXPANDED]
    without_op = EXPANDED_HEAD + "\n".join(expanded) + "\n"
    return f"{functions_part}{PEERS}{without_op}{SUMS_HEAD}{rows}\n{COMPOSED_HEAD}{composed}\n{DATA}"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _bound(name: str, dtype: str) -> str:
    bound = BOUNDS.get((name, dtype))
    return "" if bound is None else "none" if bound.ulp == float("inf") else str(bound)


if __name__ == "__main__":
    PAGE.write_text(page())
