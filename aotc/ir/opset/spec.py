"""Building blocks of the op table: :class:`OpSpec`, size constraints, the error of type rules, helpers for shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from typing import cast as cast_type

import numpy as np

from aotc.ir.dims.algebra import Dim
from aotc.ir.dims.compare import is_possible_relation
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
    """An op violates its type rule; the text has the found and the expected types."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint on the sizes of an op's operands and attributes.

    Parameters
    ----------
    relation : str
        ``eq`` or ``le``.
    left, right : Dim
    message : str
        The error if it does not hold; ``{0}`` and ``{1}`` stand for the sides.
    place : tuple of int or None
        Operand and dim whose size is replaced by the expression ``form`` once the constraint holds.
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
    """Yield no constraints, the default of ``OpSpec.constraints``: operands of all sizes are valid."""
    return ()


def nothing_in_place(attrs: Attrs) -> tuple[int, ...]:
    """Return an empty tuple, the default of ``OpSpec.in_place``: no result overwrites an operand."""
    return ()


def one_term(attrs: Attrs, shapes: Sequence[tuple[int, ...]]) -> int:
    """Return 1, the default of ``OpSpec.terms``: a result element is not a sum."""
    return 1


def first_in_place(attrs: Attrs) -> tuple[int, ...]:
    """Return ``(0,)`` for ``OpSpec.in_place``: result 0 overwrites operand 0."""
    return (0,)


@dataclass(frozen=True, slots=True)
class OpSpec:
    """One row of the op table.

    Parameters
    ----------
    name : str
        The op's name in the tensor IR.
    infer : callable
        ``infer(operand types, attrs, regions, given result types) -> result types``; raises :class:`RuleError`.
        ``given`` is ``()`` if the caller has none; ops with a free result type (``reshape``, ``broadcast``...) require
        and check it.
    reference : callable
        ``reference(arrays, attrs, region callables, result types) -> arrays``, the NumPy meaning. Dims in attrs and
        types are numbers.
    attrs : tuple of str
        Required names in ``attrs``.
    regions : int
        Number of regions; -1: one or more.
    effect : bool
        The op may have side effects: it runs even if its results are unused, and equal ops are not merged.
    branches : bool
        Control flow: the regions are parts of the program, not scalar functions.
    moves : bool
        Each element of the result is an element of the operand, at an index derived from its own.
    selects : bool
        Each element of the result is an element of one of the operands, at an index that may depend on values.
    writes_part : bool
        Each element of the result that it does not write is the element of the first operand at the same index, or at
        one derived from it.
    folds_state : bool
        The op is a loop, and its operands are the initial values of the loop's state.
    takes_cols : bool
        The op is computed in tiles of ``cols`` columns if it has the attribute ``cols``, else in plain loops.
    permutes : bool
        The op moves each element of the operand to exactly one position.
    inline : bool
        One element of the result is an expression that can be evaluated wherever it is read.
    folds : bool
        The op is evaluated at compile time if its operands are constants.
    sums : bool
        The op is a sum of products: a matmul or a convolution.
    names_kernel : bool
        A kernel with this op is named after it.
    of_format : bool
        The op's meaning depends on the number format of its operands, or is unknown: it cannot be evaluated in 64 bits.
    work : int
        Scalar operations per element, roughly; 0 for ops that only move or create elements.
    tolerance : float or None
        Units in the last place by which two good results may differ; None if there is nothing to compare.
    normwise : bool
        The tolerance is relative to the largest element of the result.
    terms : callable
        ``terms(attrs, shapes of the operands)`` returns the number of terms that are added up for a result element: the
        rounding error grows with its square root.
    constraints : callable
        ``constraints(operand types, attrs, given result types)`` yields size constraints. They are applied before
        ``infer``, so that operands whose sizes must be equal have equal forms there.
    in_place : callable
        ``in_place(attrs)`` returns the operands that results 0, 1... overwrite.
    variadic : bool
        The op takes several arrays, with an initial value for each if it reduces them, and has a result for each. An
        unused result can be removed together with its operands.
    partial : bool
        The op's lowering allocates no array for an unused result.
    views : bool
        The op's lowering reads through movement ops: an operand that is only a moved array is read from that array.
    added_by : str
        The pass that creates the op, which no importer creates.
    removed_by : str
        The pass that removes all ops of this name, so that later passes need not support it.
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
    added_by: str = ""
    removed_by: str = ""


def require_rule(condition: bool, message: str) -> None:
    """Raise :class:`RuleError` with ``message`` unless ``condition`` holds."""
    if not condition:
        raise RuleError(message)


def declared_type(given: Types, name: str) -> TensorType:
    """Return the result type ``given`` by the caller of a type rule; raise RuleError unless there is exactly one."""
    require_rule(len(given) == 1, f"{name}: the result type must be given")
    return given[0]


def dims_may_be_equal(a: Dim, b: Dim) -> bool:
    """Return True if ``a`` and ``b`` are equal for some values of the symbolic sizes."""
    return is_possible_relation("eq", a, b)


def same_shape(a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    """Return True if two shapes are equal for all values of the symbolic sizes."""
    return len(a) == len(b) and all(x == y for x, y in zip(a, b))


def equal_sizes(
    types: Types, one: tuple[int, int], other: tuple[int, int], message: str = SIZES_DIFFER
) -> Iterator[Constraint]:
    """Yield the constraint that two operand sizes, given as (operand number, dim number), are equal.

    If one size is a number and the other symbolic, the number replaces the symbolic size.
    """
    (k, i), (m, j) = one, other
    if not (0 <= i < types[k].rank and 0 <= j < types[m].rank):
        return  # the type rule reports the error
    x, y = types[k].shape[i], types[m].shape[j]
    if x == y:
        return
    if isinstance(x, int) or not isinstance(y, int):
        yield Constraint("eq", y, x, message, other, x)
    else:
        yield Constraint("eq", x, y, message, one, y)


def equal_shapes(types: Types, but: int = -1, operands: Sequence[int] = ()) -> Iterator[Constraint]:
    """Yield the constraints that ``operands`` (by default all) have equal shapes, except in dim ``but``."""
    numbers = operands or range(len(types))
    if len({types[k].shape for k in numbers}) < 2:
        return
    for d in range(min((types[k].rank for k in numbers), default=0)):
        forms = [types[k].shape[d] for k in numbers]
        best = next((n for n in forms if isinstance(n, int)), forms[0])
        for k, size in zip(numbers, forms):
            if d != but and size != best:
                yield Constraint("eq", size, best, SIZES_DIFFER, (k, d), best)


def equal_operand_shapes(types: Types, attrs: Attrs, given: Types) -> Iterator[Constraint]:
    """Yield the constraints that all operands have equal shapes."""
    yield from equal_shapes(types)


def size_within_extent(size: Dim, extent: Dim, what: str) -> Iterator[Constraint]:
    """Yield the constraints that ``size`` is at least 0 and at most ``extent``."""
    yield Constraint("le", size, extent, what)
    yield Constraint("le", 0, size, "a slice of {1} elements")


def positive_values(values: Iterable[Dim], what: str) -> Iterator[Constraint]:
    """Yield the constraints that ``values``, called ``what``, are positive."""
    for v in values:
        yield Constraint("le", 1, v, what + " of {1}, expected at least 1")


def static_sizes(t: TensorType) -> tuple[int, ...]:
    """Return the shape of ``t`` as integers; it must not be symbolic."""
    return cast_type("tuple[int, ...]", t.shape)


def cast_array(array: np.ndarray, dtype: str) -> np.ndarray:
    """Convert ``array`` to ``dtype`` as NumPy does, without its warnings."""
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
    """Round ``x`` to a float type of fewer than 16 bits, with a single rounding.

    ml_dtypes does not convert between all of its types, so the conversion goes through f32. In formats without a NaN,
    NaN becomes -0.
    """
    wanted, row = to_numpy(dtype), SMALL_FLOATS[dtype]
    x = _to_odd_f32(x)
    rounded = x.astype(wanted)
    if row.special == "finite":
        rounded = np.where(np.isnan(x), np.uint8(row.nan), rounded.view(np.uint8)).astype(np.uint8).view(wanted)
    return np.asarray(rounded)


def _to_odd_f32(x: np.ndarray) -> np.ndarray:
    """Convert ``x``, or the real part of a complex ``x``, to f32 so that a second rounding to fewer bits is correct.

    ml_dtypes rounds f64 and integers to nearest first. Rounding to odd makes the second rounding correct (S. Boldo and
    G. Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008).
    """
    if x.dtype.kind == "c":
        x = x.real
    if x.dtype.kind in "iuf" and x.dtype.itemsize >= 4 and x.dtype != np.float32:
        near = x.astype(np.float32)
        exact = np.longdouble(near)
        bits = np.asarray(near).view(np.uint32) - (np.abs(exact) > np.abs(np.longdouble(x))).astype(np.uint32)
        x = np.asarray(bits | (exact != np.longdouble(x)).astype(np.uint32)).view(np.float32)
    return np.asarray(x.astype(np.float32))


def op_spec_table(*specs: OpSpec) -> dict[str, OpSpec]:
    """Return ``{name: spec}``; duplicate names are an error."""
    return merge_op_tables(*({s.name: s} for s in specs))


def merge_op_tables(*tables: Mapping[str, Row]) -> dict[str, Row]:
    """Return the union of tables by op name; duplicate names are an error."""
    rows: dict[str, Row] = {}
    for part in tables:
        for name, row in part.items():
            if name in rows:
                raise ValueError(f"op {name} is defined twice")
            rows[name] = row
    return rows
