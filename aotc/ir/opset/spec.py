"""What the op table holds: :class:`OpSpec`, the error of type rules, shape helpers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from typing import cast as cast_type

import numpy as np

from aotc.ir.dims.algebra import Dim
from aotc.ir.dims.compare import possible
from aotc.ir.tensor.ir import Region, TensorType
from aotc.vmfb.dtypes import to_numpy
from aotc.vmfb.float_formats import SMALL_FLOATS

Row = TypeVar("Row")
Types = tuple[TensorType, ...]
Attrs = Mapping[str, Any]
Arrays = Sequence[np.ndarray]
RegionCall = Callable[..., list[np.ndarray]]
Infer = Callable[[Types, Attrs, tuple[Region, ...], Types], Types]
Reference = Callable[[Arrays, Attrs, tuple[RegionCall, ...], Types], list[np.ndarray]]
InPlace = Callable[[Attrs], tuple[int, ...]]
Terms = Callable[[Attrs, Sequence[tuple[int, ...]]], int]


SIZES_DIFFER = "sizes must be equal: {0} and {1}"


class RuleError(ValueError):
    """A type rule is broken; the text says what was found and expected."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the specification demands of the sizes of an op's operands and attributes.

    Parameters
    ----------
    relation : str
        ``eq`` or ``le``.
    left, right : Dim
    message : str
        What is wrong where it does not hold; ``{0}`` and ``{1}`` stand for the sides.
    place : tuple of int or None
        Operand and dim whose size is written ``form`` from here on: its own form says the same in other words.
    form : Dim
    """

    relation: str
    left: Dim
    right: Dim
    message: str
    place: tuple[int, int] | None = None
    form: Dim = 0


Constraints = Callable[[Types, Attrs, Types], Iterable[Constraint]]


def unconstrained(types: Types, attrs: Attrs, given: Types) -> Iterable[Constraint]:
    """Return that any sizes will do."""
    return ()


def nothing_in_place(attrs: Attrs) -> tuple[int, ...]:
    """Return that the op writes all its results to memory of their own."""
    return ()


def one_term(attrs: Attrs, shapes: Sequence[tuple[int, ...]]) -> int:
    """Return that no element of the result is a sum."""
    return 1


def first_in_place(attrs: Attrs) -> tuple[int, ...]:
    """Return that the result is written over the first operand."""
    return (0,)


@dataclass(frozen=True, slots=True)
class OpSpec:
    """One row of the op table.

    Parameters
    ----------
    name : str
        The op's name in the tensor IR.
    infer : callable
        ``infer(operand types, attrs, regions, given result types) -> result types``;
        raises :class:`RuleError`. ``given`` is ``()`` when the caller has none; ops
        whose result type is free (``reshape``, ``broadcast``...) demand and check it.
    reference : callable
        ``reference(arrays, attrs, region callables, result types) -> arrays``, the
        NumPy meaning. Dims in attrs and types are numbers by then.
    attrs : tuple of str
        Names that ``attrs`` must hold.
    regions : int
        How many regions the op has; -1: one or more.
    effect : bool
        The op may do more than give results: it runs even though they are unused, and is not merged with its equal.
    branches : bool
        Control flow: the regions are parts of the program, not functions of scalars.
    moves : bool
        Each element of the result is an element of the operand, at an index that follows from its own.
    selects : bool
        Each element of the result is an element of one of the operands, at an index that may depend on their values.
    writes_part : bool
        Each element of the result that it does not write is the element of the first operand at the same place, or at
        one that follows from it.
    folds_state : bool
        Its operands are the initial values of a loop.
    takes_cols : bool
        With the attribute ``cols`` it is computed in tiles of that many columns, without it in plain loops.
    permutes : bool
        It moves each element of the operand to exactly one place.
    inline : bool
        One element of the result can be written as an expression, wherever it is read.
    folds : bool
        It is evaluated at compile time if its operands are constants.
    sums : bool
        A sum of products: a matrix product or a convolution.
    names_kernel : bool
        A kernel with this op in it is called by its name.
    of_format : bool
        Its meaning lies in the format of its operands' type, or is not known: in 64 bits it is something else.
    work : int
        Scalar operations per element, roughly; 0 for what only moves or makes up elements.
    tolerance : float or None
        How many units in the last place two good results differ by; None where there is nothing to compare.
    normwise : bool
        These units are of the largest element.
    terms : callable
        ``terms(attrs, shapes of the operands)`` are those of the sum that an element of the result is: the error of
        rounding grows with their root.
    constraints : callable
        ``constraints(operand types, attrs, given result types)`` are what the op demands of sizes. It is asked before
        ``infer``, so that operands whose sizes must be equal are of one form there.
    in_place : callable
        ``in_place(attrs)`` are the operands that results 0, 1... are written over.
    variadic : bool
        It takes several arrays, and as many more operands if it folds them, and has a result for each: what concerns
        one of them only can go with its result.
    partial : bool
        Its own lowering makes no array of a result that nobody reads.
    views : bool
        Its lowering reads the elements of operands that were only moved where they were before.
    made_by : str
        The pass that makes the op, which no importer does.
    removed_by : str
        The pass that leaves none, so that nothing after it need know the op.
    """

    name: str
    infer: Infer
    reference: Reference
    attrs: tuple[str, ...] = ()
    regions: int = 0
    effect: bool = False
    branches: bool = False
    moves: bool = False
    selects: bool = False
    writes_part: bool = False
    folds_state: bool = False
    takes_cols: bool = False
    permutes: bool = False
    inline: bool = False
    folds: bool = False
    sums: bool = False
    names_kernel: bool = False
    of_format: bool = False
    work: int = 1
    tolerance: float | None = None
    normwise: bool = False
    terms: Terms = one_term
    constraints: Constraints = unconstrained
    in_place: InPlace = nothing_in_place
    variadic: bool = False
    partial: bool = False
    views: bool = False
    made_by: str = ""
    removed_by: str = ""


def need(condition: bool, message: str) -> None:
    """Raise :class:`RuleError` with ``message`` unless ``condition`` holds."""
    if not condition:
        raise RuleError(message)


def given_one(given: Types, name: str) -> TensorType:
    """Return the single given result type, or say that ``name`` needs it."""
    need(len(given) == 1, f"{name}: the result type must be given")
    return given[0]


def may_equal(a: Dim, b: Dim) -> bool:
    """Could the two dims be the same number?"""
    return possible("eq", a, b)


def same_shape(a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    """Are the two shapes proven equal?"""
    return len(a) == len(b) and all(x == y for x, y in zip(a, b))


def tie(
    types: Types, one: tuple[int, int], other: tuple[int, int], message: str = SIZES_DIFFER
) -> Iterator[Constraint]:
    """Yield that two sizes, given as operand and dim, are equal; a number is the form of both."""
    (k, i), (m, j) = one, other
    if not (0 <= i < types[k].rank and 0 <= j < types[m].rank):
        return  # the type rule says what is wrong
    x, y = types[k].shape[i], types[m].shape[j]
    if x == y:
        return
    if isinstance(x, int) or not isinstance(y, int):
        yield Constraint("eq", y, x, message, other, x)
    else:
        yield Constraint("eq", x, y, message, one, y)


def alike(types: Types, but: int = -1, operands: Sequence[int] = ()) -> Iterator[Constraint]:
    """Yield that operands (all, or those of these numbers) are of one shape, except along dim ``but``."""
    numbers = operands or range(len(types))
    if len({types[k].shape for k in numbers}) < 2:
        return
    for d in range(min((types[k].rank for k in numbers), default=0)):
        forms = [types[k].shape[d] for k in numbers]
        best = next((n for n in forms if isinstance(n, int)), forms[0])
        for k, size in zip(numbers, forms):
            if d != but and size != best:
                yield Constraint("eq", size, best, SIZES_DIFFER, (k, d), best)


def all_alike(types: Types, attrs: Attrs, given: Types) -> Iterator[Constraint]:
    """Yield that all operands are of one shape."""
    yield from alike(types)


def within(size: Dim, extent: Dim, what: str) -> Iterator[Constraint]:
    """Yield that ``size`` elements are no more than there are."""
    yield Constraint("le", size, extent, what)
    yield Constraint("le", 0, size, "a slice of {1} elements")


def at_least_one(values: Iterable[Dim], what: str) -> Iterator[Constraint]:
    """Yield that ``values``, which are ``what``, are positive."""
    for v in values:
        yield Constraint("le", 1, v, what + " of {1}, expected at least 1")


def sizes(t: TensorType) -> tuple[int, ...]:
    """Return the dims of a type in which all are numbers, as references see it."""
    return cast_type("tuple[int, ...]", t.shape)


def cast(array: np.ndarray, dtype: str) -> np.ndarray:
    """Return ``array`` as dtype ``dtype`` by NumPy's conversion, without warnings."""
    wanted = to_numpy(dtype)
    if array.dtype == wanted:
        return np.asarray(array)
    with np.errstate(all="ignore"):
        if dtype in SMALL_FLOATS:
            return round_small(np.asarray(array), dtype)
        if dtype == "bf16":
            return np.asarray(_to_odd_f32(np.asarray(array)).astype(wanted))
        return np.asarray(array).astype(wanted)


def round_small(x: np.ndarray, dtype: str) -> np.ndarray:
    """Return ``x`` rounded once to a float of fewer than 16 bits.

    ml_dtypes does not convert between all of its types: the step over f32 is made here. NaN becomes the
    format's NaN; where it has none, -0.
    """
    wanted, row = to_numpy(dtype), SMALL_FLOATS[dtype]
    x = _to_odd_f32(x)
    rounded = x.astype(wanted)
    if row.special == "finite":
        rounded = np.where(np.isnan(x), np.uint8(row.nan), rounded.view(np.uint8)).astype(np.uint8).view(wanted)
    return np.asarray(rounded)


def _to_odd_f32(x: np.ndarray) -> np.ndarray:
    """Return ``x`` as f32 so that a further rounding is right; of complex numbers the real parts.

    ml_dtypes rounds f64 and integers to nearest on this way; to odd leaves the second rounding right (S. Boldo
    and G. Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008).
    """
    if x.dtype.kind == "c":
        x = x.real
    if x.dtype.kind in "iuf" and x.dtype.itemsize >= 4 and x.dtype != np.float32:
        near = x.astype(np.float32)
        exact = np.longdouble(near)
        bits = np.asarray(near).view(np.uint32) - (np.abs(exact) > np.abs(np.longdouble(x))).astype(np.uint32)
        x = np.asarray(bits | (exact != np.longdouble(x)).astype(np.uint32)).view(np.float32)
    return np.asarray(x.astype(np.float32))


def table(*specs: OpSpec) -> dict[str, OpSpec]:
    """Return ``{name: spec}``; two specs of one name are refused."""
    return merge(*({s.name: s} for s in specs))


def merge(*tables: Mapping[str, Row]) -> dict[str, Row]:
    """Return the union of tables by op name; two rows of one name are refused."""
    rows: dict[str, Row] = {}
    for part in tables:
        for name, row in part.items():
            if name in rows:
                raise ValueError(f"op {name} is defined twice")
            rows[name] = row
    return rows
