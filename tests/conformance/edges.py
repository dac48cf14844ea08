"""Elementwise ops on edge values, beside many digits and beside XLA.

Every op of :data:`OPERATIONS` runs on every dtype that it takes: on infinities, NaN, zeros, subnormals, the extremes
of the type, numbers next to where functions vanish, overflow, change sign or branch, and pairs of all these. The
reference is long double or mpmath; of complex infinities, NaN and poles it is :mod:`conformance.edge_rules`.
``python -m conformance.edges`` (with ``tests`` in the path) writes ``docs/edges.md``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import numpy as np

import aotc
from aotc.vmfb.dtypes import DTYPES
from conformance.edge_bounds import BOUNDS, Bound
from conformance.edge_references import (
    EXACT,
    OPERATIONS,
    PRECISIONS,
    Operation,
    counts,
    growth,
    integer_power,
    reference,
)
from conformance.edge_values import values_of

Arrays = list[np.ndarray]


@dataclass(frozen=True, slots=True)
class EdgeCase:
    """An op on a dtype."""

    operation: Operation
    dtype: str

    @property
    def name(self) -> str:
        """Return how tests and the table call it."""
        return f"{self.operation.name}-{self.dtype}"


@dataclass(frozen=True, slots=True)
class Deviation:
    """The largest errors, in units in the last place, and the arguments of aotc's; XLA's is None if it has no such op.

    ``count`` results exceed the bound; ``odd`` ones at complex infinities, NaN and poles are not by
    :mod:`conformance.edge_rules`, nor XLA's ``odd_xla``.
    """

    own: float
    where: tuple[Any, ...]
    got: Any
    want: Any
    xla: float | None
    count: int
    odd: int = 0
    odd_xla: int = 0


def cases() -> Iterator[EdgeCase]:
    """Return every op with every dtype that it takes."""
    for operation in OPERATIONS:
        for dtype in operation.dtypes:
            yield EdgeCase(operation, dtype)


def bound_of(case: EdgeCase) -> Bound:
    """Return what ``BOUNDS`` allows: by op and dtype, by op, or by the kind of the dtype."""
    name, kind = case.operation.name, DTYPES[case.dtype].kind
    for key in ((name, case.dtype), (name, kind), (name, ""), ("", kind)):
        if key in BOUNDS:
            return BOUNDS[key]
    return Bound(0)


def mlir_type(dtype: str, count: int) -> str:
    """Return the type of a vector in StableHLO."""
    row = DTYPES[dtype]
    element = {"c": f"complex<f{row.bits // 2}>", "u": f"ui{row.bits}"}.get(row.kind, dtype)
    return f"tensor<{count}x{element}>"


def text(case: EdgeCase, count: int) -> str:
    """Return the StableHLO of one op on vectors of ``count``."""
    op = case.operation
    given, result = mlir_type(case.dtype, count), mlir_type(op.result_of(case.dtype), count)
    names = [f"%a{n}" for n in range(op.arity)]
    signature = ", ".join(f"{n}: {given}" for n in names)
    body = op.mlir.format(", ".join(names))
    return (
        f"func.func @main({signature}) -> {result} {{\n"
        f"  %r = {body} : ({', '.join([given] * op.arity)}) -> {result}\n  return %r : {result}\n}}"
    )


@cache
def _device() -> Any:
    return jax.devices("cpu")[0]


def run_xla(source: str, args: Arrays) -> np.ndarray | None:
    """Return XLA's result; None if it refuses the program."""
    with jax.enable_x64(True):
        try:
            program = _device().client.compile_and_load(source, [_device()])
            return np.asarray(program.execute([jax.device_put(a, _device()) for a in args])[0])
        except Exception:  # whatever XLA raises of ops and types that it does not have
            return None


def measure(case: EdgeCase, target: str = "cpu") -> Deviation:
    """Run a case on both sides and measure both."""
    args = values_of(case.dtype, case.operation)
    source = text(case, args[0].size)
    got = np.asarray(aotc.load(aotc.compile(source, target=target)).invoke("main", *args)[0])
    xla = run_xla(source, args)
    exact, whole = EXACT.get(case.operation.name), DTYPES[case.dtype].kind in "iu"
    if whole or exact or case.operation.name in PRECISIONS:
        with np.errstate(all="ignore"):
            want = exact(*args) if exact and not whole else xla
        want = integer_power(*args) if whole and case.operation.name == "pow" else want
        assert want is not None, f"XLA has no {case.name}"
        return _exact(got, want, args)
    want = reference(case.operation, args)
    worth = counts(case.operation, args)
    known = _has_reference(want, args) & worth
    own = np.where(known, errors(got, want), 0.0)
    theirs = None if xla is None else float(np.where(known, errors(xla, want), 0.0).max(initial=0.0))
    bound, usual = bound_of(case), np.full(own.shape, float(bound_of(case).ulp))
    if bound.growing:
        usual[known] += bound.growing * growth(case.operation.name, [a[known] for a in args])
    at = int(np.argmax(own - usual if (own > usual).any() else own))
    arguments = tuple(a[at] for a in args)
    compare = _by_size if case.operation.name == "pow" else _by_parts
    odd = [0 if v is None else int((worth & ~known & (compare(v, want) > usual)).sum()) for v in (got, xla)]
    return Deviation(float(own[at]), arguments, got[at], want[at], theirs, int((own > usual).sum()), *odd)


def _exact(got: np.ndarray, want: np.ndarray, args: Arrays) -> Deviation:
    assert got.dtype == want.dtype
    wrong = (got != want) & ~((got != got) & (want != want))
    at = int(np.argmax(wrong))
    return Deviation(
        float("inf") if wrong.any() else 0.0, tuple(a[at] for a in args), got[at], want[at], 0.0, int(wrong.sum())
    )


# ---------------------------------------------------------------- errors


def errors(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Return the error of each element in units in the last place of the result's type.

    Of complex results the unit is that of the larger part. ``want`` is long double; its NaN stands for what has no
    value.
    """
    if got.dtype.kind != "c" and got.dtype.itemsize == 1:  # what overflows is infinite, NaN or neither: by the format
        want = want.astype(np.float64).astype(got.dtype).astype(np.longdouble)
    if got.dtype.kind != "c":
        return _apart(got, want, _step(_size(want), got.dtype))
    step = _step(np.maximum(_size(want.real), _size(want.imag)), got.real.dtype)
    return np.maximum(_apart(got.real, want.real, step), _apart(got.imag, want.imag, step))


def _by_parts(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Return the errors where infinities may be; beside NaN the sign of an infinity is not specified."""
    if got.dtype.kind != "c":
        return errors(got, want)
    got, want = got.copy(), want.copy()
    for v in (got, want):
        for part, other in ((v.real, v.imag), (v.imag, v.real)):
            part[np.isnan(other)] = np.abs(part[np.isnan(other)])
    return errors(got, want)


def _by_size(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Return the errors of the sizes: the direction of an infinite power is that of a rounded phase."""
    return errors(np.abs(got), np.abs(want))


def _has_reference(want: np.ndarray, args: Arrays) -> np.ndarray:
    """Tell where the reference counts: of complex arguments where they are finite and so is the exact result."""
    if args[0].dtype.kind != "c":
        return np.ones(want.shape, bool)
    found = np.isfinite(want)
    for a in args:
        found &= np.isfinite(a)
    return found


def _size(x: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(x), np.abs(x), 0)


def _step(size: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return the unit in the last place at a size, that of the largest number beyond it."""
    info = _info(dtype)
    inside = np.clip(size, np.longdouble(info.smallest_normal), np.longdouble(info.max))
    exponent = np.floor(np.log2(inside))
    exponent = np.where(np.exp2(exponent) > inside, exponent - 1, exponent)
    return np.exp2(exponent) * np.longdouble(info.eps)


def _info(dtype: np.dtype) -> Any:
    import ml_dtypes

    return np.finfo(dtype) if dtype.kind == "f" and dtype.isbuiltin == 1 else ml_dtypes.finfo(dtype)


def _apart(got: np.ndarray, want: np.ndarray, step: np.ndarray) -> np.ndarray:
    """Return ``|got - want|`` in steps; infinity lies one step beyond the largest number, NaN equals NaN only."""
    top = np.longdouble(_info(got.dtype).max)
    ours = got.astype(np.longdouble)
    edge = top + np.longdouble(_step(np.array(top), got.dtype))
    with np.errstate(all="ignore"):
        left, right = (np.clip(v, -edge, edge) for v in (ours, want))
        apart = np.abs(left - right) / step
    both = np.isnan(ours) & np.isnan(want)
    one = np.isnan(ours) != np.isnan(want)
    return np.where(both, 0.0, np.where(one, np.inf, apart)).astype(np.float64)


# ---------------------------------------------------------------- the table

HEAD = """# Elementwise ops on edge values

Written by `PYTHONPATH=tests python -m conformance.edges` (jax {jax}): the largest error of each op and dtype on
infinities, NaN, zeros, subnormals, extremes, and numbers next to where functions vanish, overflow or branch, and pairs
of them, in units in the last place against long double and mpmath (`inf`: a NaN or an infinity where there is
none, or the reverse). `tests/whole/test_edges.py` holds aotc to the bounds of `tests/conformance/edge_bounds.py`.
Floats of 8 bits and fewer, here two, are in `tests/kernels/test_small_floats.py` all, every code and every pair.
Integers are equal to XLA's (powers, where XLA looks at few bits of the exponent, to Python's), comparisons and other
bits to NumPy's. Complex infinities, NaN and poles are not in the largest errors. There the rule is C99's annex G, and
what `tests/conformance/edge_rules.py` derives from it; the last two columns count results that differ. Finite complex
powers count where they are in range and their phase is below 700, products where none of the four products overflows.

| Op | dtype | aotc | XLA | Bound | Why it is above the usual {usual:g} | Not by the rule | XLA not by the rule |
|---|---|---|---|---|---|---|---|
"""


def table(found: dict[str, tuple[EdgeCase, Deviation]]) -> str:
    """Return the page."""
    rows = []
    for case, d in found.values():
        bound = bound_of(case)
        xla = "none" if d.xla is None else f"{d.xla:.3g}"
        odd = [str(n or "") for n in (d.odd, d.odd_xla)]
        cells = (case.operation.name, case.dtype, f"{d.own:.3g}", xla, str(bound), bound.reason, *odd)
        rows.append(f"| {' | '.join(cells)} |")
    usual = max(BOUNDS["", "f"].ulp, BOUNDS["", "c"].ulp)
    return HEAD.format(jax=jax.__version__, usual=usual) + "\n".join(rows) + "\n"


def main() -> None:
    """Measure every case and write the page."""
    from pathlib import Path

    from conformance.edge_conversions import section

    found = {case.name: (case, measure(case)) for case in cases() if DTYPES[case.dtype].kind in "fc"}
    (Path(__file__).parents[2] / "docs" / "edges.md").write_text(table(found) + section())


if __name__ == "__main__":
    main()


