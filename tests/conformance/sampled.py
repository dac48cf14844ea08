"""Elementwise functions on random numbers of every binade, beside long double and mpmath.

One program of a dtype has all its functions. The arguments are random bits: so many of each binade and sign, and more
where functions bend. :data:`conformance.edge_bounds.BOUNDS` holds for these too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import aotc
from aotc.vmfb.dtypes import DTYPES, to_numpy
from conformance.edge_references import OPERATIONS, Operation, counts, growth, reference
from conformance.edges import EdgeCase, bound_of, errors, mlir_type

EXACT = frozenset(("floor", "ceil", "round_even", "round_afz", "abs", "sign", "conj", "real", "imag", "neg"))
BY_MPMATH = frozenset(("erf", "erfc", "erf_inv", "lgamma", "digamma", "bessel_i1e"))
BY_LONG_DOUBLE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "acos": np.arccos, "acosh": np.arccosh, "asin": np.arcsin, "asinh": np.arcsinh, "atan": np.arctan,
    "atanh": np.arctanh,
}  # fmt: skip
SEED = int(os.environ.get("AOTC_ACCURACY_SEED", 1))
"""Of random arguments: the same in each run, so that a checkout passes on any day; ``make test-all`` draws others."""
MPMATH_SHARE = 30  # how many arguments of functions whose reference is mpmath, times the density


def repeat() -> str:
    """Return what a failure says of its arguments."""
    return f"AOTC_ACCURACY_SEED={SEED} repeats this"


@dataclass(frozen=True, slots=True)
class Sampled:
    """The largest error of a function over its bound, and where."""

    name: str
    error: float
    excess: float
    where: tuple[Any, ...]


def functions(dtype: str, arity: int) -> Iterator[Operation]:
    """Return the operations on ``dtype`` that round, but the four of arithmetic."""
    for operation in OPERATIONS:
        plain = operation.result == "bool" or operation.name in EXACT or operation.name.startswith("reduce_precision")
        if dtype in operation.dtypes and operation.arity == arity and not plain and operation.name not in _ROUNDED_ONCE:
            yield operation


_ROUNDED_ONCE = frozenset(("add", "sub", "max", "min", "next_after", "complex"))


def random_floats(dtype: str, per_binade: int, seed: int = 0) -> np.ndarray:
    """Return random bits: ``per_binade`` numbers of each binade, ten times as many between 2**-12 and 2**11."""
    row, random = DTYPES[dtype], np.random.default_rng(seed)
    if row.bits <= 16:
        return np.arange(1 << row.bits, dtype=f"u{row.bits // 8}").view(to_numpy(dtype))
    mantissa, bias = (23, 127) if row.bits == 32 else (52, 1023)
    unsigned = np.dtype(f"u{row.bits // 8}")
    binades = np.concatenate([np.arange(2 * bias + 1), np.repeat(np.arange(bias - 12, bias + 11), 10)])
    exponents = np.repeat(binades, per_binade).astype(unsigned)
    bits = random.integers(0, 1 << mantissa, exponents.size, dtype=unsigned)
    signs = random.integers(0, 2, exponents.size).astype(unsigned)
    bits |= (signs << unsigned.type(row.bits - 1)) | (exponents << unsigned.type(mantissa))
    return bits.view(to_numpy(dtype))


def random_complex(dtype: str, count: int, seed: int = 0) -> np.ndarray:
    """Return numbers with parts of moderate size, a quarter of any size, an eighth near the unit circle.

    Another eighth is next to 1, i, -1 and -i, and of a sixteenth one part is 0 or -0: there are cuts and poles.
    """
    random = np.random.default_rng(seed)
    limits = np.finfo(f"f{DTYPES[dtype].bits // 16}")
    found = np.empty(count, to_numpy(dtype))
    for part in (found.real, found.imag):
        wide = np.ldexp(random.uniform(1, 2, count), random.integers(limits.minexp, limits.maxexp, count))
        near = np.exp2(random.uniform(-12, 7, count))
        part[:] = np.where(random.random(count) < 0.25, wide, near) * random.choice([-1, 1], count)
    circle = count // 8
    size = 1 + random.normal(size=circle) * 10.0 ** random.uniform(-8, 0, circle)
    found[:circle] = size * np.exp(1j * random.uniform(-np.pi, np.pi, circle))
    ends = random.choice(np.array([1, 1j, -1, -1j]), circle)
    offsets = [random.normal(size=circle) * 10.0 ** random.uniform(-16, 0, circle) for _ in range(2)]
    found[circle : 2 * circle] = ends + (offsets[0] + 1j * offsets[1])
    zeros, half = random.choice([0.0, -0.0], circle // 2), circle // 4
    found.real[2 * circle : 2 * circle + half] = zeros[:half]
    found.imag[2 * circle + half : 2 * circle + 2 * half] = zeros[half : 2 * half]
    return found


def arguments(dtype: str, arity: int, density: int) -> list[np.ndarray]:
    """Return the operands of all functions of a dtype; exponents of powers are moderate."""
    if DTYPES[dtype].kind == "c":
        found = [random_complex(dtype, 40 * density, SEED + n) for n in range(arity)]
        if arity == 2:
            sizes = np.exp2(np.linspace(-10, 6, found[1].size))
            found[1] = (found[1] / np.abs(found[1]) * sizes).astype(found[1].dtype)
        return found
    found = [random_floats(dtype, density, SEED + n) for n in range(arity)]
    if arity == 2 and DTYPES[dtype].bits > 16:
        random = np.random.default_rng(SEED + arity)
        moderate = random.permutation(found[1].size) % 2 == 0
        small = random.uniform(-30, 30, found[1].size)
        found[1] = np.where(moderate, small, random.permutation(found[1])).astype(found[1].dtype)
    return found


def program(operations: list[Operation], dtype: str, count: int) -> str:
    """Return a StableHLO function with a result for each of the operations."""
    given = mlir_type(dtype, count)
    names = [f"%a{n}" for n in range(operations[0].arity)]
    kinds = [mlir_type(o.result_of(dtype), count) for o in operations]
    rows = [
        f"  %r{n} = {o.mlir.format(', '.join(names))} : ({', '.join([given] * o.arity)}) -> {kind}"
        for n, (o, kind) in enumerate(zip(operations, kinds, strict=True))
    ]
    results = ", ".join(f"%r{n}" for n in range(len(operations)))
    signature = ", ".join(f"{name}: {given}" for name in names)
    body = "\n".join([*rows, f"  return {results} : {', '.join(kinds)}"])
    return f"func.func @main({signature}) -> ({', '.join(kinds)}) {{\n{body}\n}}"


def measure(dtype: str, arity: int, density: int, target: str = "cpu") -> list[Sampled]:
    """Run all functions of a dtype and measure their errors."""
    operations, args = list(functions(dtype, arity)), arguments(dtype, arity, density)
    source = program(operations, dtype, args[0].size)
    results = aotc.load(aotc.compile(source, target=target)).invoke("main", *args)
    return [_measure(o, dtype, args, np.asarray(r), density) for o, r in zip(operations, results, strict=True)]


def _measure(operation: Operation, dtype: str, args: list[np.ndarray], got: np.ndarray, density: int) -> Sampled:
    if operation.name in BY_MPMATH and DTYPES[dtype].bits > 16:
        chosen = np.random.default_rng(SEED).permutation(got.size)[: MPMATH_SHARE * density]
        args, got = [a[chosen] for a in args], got[chosen]
    with np.errstate(all="ignore"):
        if operation.name in BY_LONG_DOUBLE and DTYPES[dtype].kind == "f":
            want = BY_LONG_DOUBLE[operation.name](args[0].astype(np.longdouble))
        else:
            want = reference(operation, args)
    bound, found = bound_of(EdgeCase(operation, dtype)), errors(got, want)
    allowed = np.full(found.shape, float(bound.ulp))
    if DTYPES[dtype].kind == "c":
        known = np.isfinite(want) & counts(operation, args)
        found = np.where(known, found, 0.0)
        if bound.growing:
            allowed[known] += bound.growing * growth(operation.name, [a[known] for a in args])
    elif bound.growing:
        allowed += bound.growing * growth(operation.name, args)
    at = int(np.argmax(found - allowed if (found > allowed).any() else found))
    return Sampled(operation.name, float(found[at]), float((found - allowed).max()), tuple(a[at] for a in args))
