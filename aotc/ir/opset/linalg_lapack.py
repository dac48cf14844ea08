"""The table of LAPACK routines: operands, results, workspace, and the arguments of the Fortran call.

The op ``lapack`` stores matrices by columns: an ``m`` by ``n`` matrix is an array ``[..., n, m]``. Each row of
:data:`ROUTINES` describes a routine: the types of its results, the operands that results overwrite, and the arguments
of one call as records. Type rule, reference and lowering read the same rows; sizes in them are dims.

Workspaces are large enough for the routine's blocked algorithm. LAPACK's workspace query is not used, as the size of
the allocation must be known before the call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from aotc.ir.dims.algebra import Dim, bounds, maximum, minimum
from aotc.ir.opset.spec import RuleError, Types, dims_may_be_equal, require_rule
from aotc.ir.tensor.ir import TensorType
from aotc.vmfb.dtypes import kind_of, real_of

LETTERS = {"f32": "s", "f64": "d", "c64": "c", "c128": "z"}
SVDS = frozenset({"gesdd", "gesvd"})
BLOCK_ROUTINES = frozenset({"geqrf", "getrf", "orgqr"})
"""Routines that a block of GPU threads also computes, for small matrices."""
JACOBI_ROUTINES = SVDS | {"syevd"}
"""Routines that a block of GPU threads computes by Jacobi's method, for matrices of known size that fit."""
BLOCK = 64
NOT_FINITE = -4
"""The status of a routine that was not called because a matrix has NaN or infinity."""


@dataclass(frozen=True, slots=True)
class Letter:
    """Argument of a LAPACK call: a pointer to one character."""

    value: str


@dataclass(frozen=True, slots=True)
class Number:
    """Argument of a LAPACK call: a pointer to an integer."""

    value: Dim


@dataclass(frozen=True, slots=True)
class Update:
    """Argument of a LAPACK call: a pointer to element ``first`` of a result, which starts as a copy of an operand."""

    result: int
    first: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """Argument of a LAPACK call: a pointer to the memory of the op's result number ``result``.

    LAPACK writes integers of 64 bits, which are converted to the result's dtype afterwards.
    """

    result: int


@dataclass(frozen=True, slots=True)
class Read:
    """Argument of a LAPACK call: a pointer to an operand that the routine only reads."""

    operand: int


@dataclass(frozen=True, slots=True)
class Copied:
    """Argument of a LAPACK call: a pointer to a copy of an operand, because the routine overwrites it."""

    operand: int


@dataclass(frozen=True, slots=True)
class Work:
    """Argument of a LAPACK call: a pointer to a workspace of ``size`` elements of ``dtype``."""

    dtype: str
    size: Dim


Argument: TypeAlias = Letter | Number | Update | Result | Read | Copied | Work


class Problem:
    """The operand types and the options of one ``lapack`` op, from which the table derives results and arguments.

    Attributes
    ----------
    batch : tuple of Dim
        Leading dims of operand 0.
    rows, cols : Dim
        Size of the matrix in operand 0.
    dtype, real : str
        Element type, and the type of its parts.
    """

    def __init__(self, types: Types, options: Mapping[str, Any]) -> None:
        require_rule(
            bool(types) and types[0].dtype in LETTERS, f"lapack: no routines for {types[0] if types else 'nothing'}"
        )
        self.types, self.options = types, options
        self.dtype, self.real = types[0].dtype, real_of(types[0].dtype)
        self.complex = self.dtype != self.real

    @property
    def batch(self) -> tuple[Dim, ...]:
        return self.types[0].shape[:-2]

    @property
    def rows(self) -> Dim:
        return self.types[0].shape[-1]

    @property
    def cols(self) -> Dim:
        return self.types[0].shape[-2]

    @property
    def small(self) -> Dim:
        """Return the smaller of rows and columns."""
        return minimum(self.rows, self.cols)

    def make(self, *shape: Dim, dtype: str = "") -> TensorType:
        """Return the type of a result: arrays of ``shape``, one for each matrix of the batch."""
        return TensorType(dtype or self.dtype, (*self.batch, *shape))

    def status(self) -> TensorType:
        """Return the type of the result ``info``: one status per matrix of the batch."""
        return self.make(dtype="i32")

    def work(self, size: Dim) -> tuple[Argument, ...]:
        """Return two arguments: a workspace of ``size`` elements of the matrix dtype, and its length."""
        size = maximum(size, 1)
        return Work(self.dtype, size), Number(size)

    def real_work(self, size: Dim) -> tuple[Argument, ...]:
        """Return the argument for a workspace of ``size`` real numbers, which only complex routines need."""
        return (Work(self.real, maximum(size, 1)),) if self.complex else ()


@dataclass(frozen=True, slots=True)
class Routine:
    """One row of the table: a LAPACK routine.

    Parameters
    ----------
    ranks : tuple of int
        Dims of each operand after the batch dims.
    results : callable
        ``results(problem) -> types``.
    arguments : callable
        ``arguments(problem) -> arguments`` of the Fortran call.
    updates : tuple of int
        The operands that results 0, 1... overwrite.
    status : bool
        The last result is the routine's status (``info``).
    complex_name : str
        The name for complex types, if it differs.
    finite : bool
        NaN or infinity in operand 0 gives status :data:`NOT_FINITE` without a call, as in XLA; the other routines check
        it themselves, or propagate NaN.
    square : bool
        Operand 0 must be square.
    options : tuple of str
        Options that a call must have.
    cost : int
        Operations per rows * cols * min(rows, cols), roughly.
    """

    ranks: tuple[int, ...]
    results: Callable[[Problem], Types]
    arguments: Callable[[Problem], tuple[Argument, ...]]
    updates: tuple[int, ...] = (0,)
    status: bool = False
    complex_name: str = ""
    finite: bool = False
    square: bool = False
    options: tuple[str, ...] = ()
    cost: int = 2


def _leading_dimension(rows: Dim) -> Number:
    return Number(maximum(rows, 1))


def _getrf_arguments(p: Problem) -> tuple[Argument, ...]:
    return Number(p.rows), Number(p.cols), Update(0), _leading_dimension(p.rows), Result(1), Result(2)


def _geqrf_arguments(p: Problem) -> tuple[Argument, ...]:
    matrix = Number(p.rows), Number(p.cols), Update(0), _leading_dimension(p.rows)
    return *matrix, Result(1), *p.work(p.cols * BLOCK), Work("i64", 1)


def _orgqr_arguments(p: Problem) -> tuple[Argument, ...]:
    count = p.types[1].shape[-1]
    sizes = Number(p.rows), Number(p.cols), Number(count)
    return *sizes, Update(0), _leading_dimension(p.rows), Read(1), *p.work(p.cols * BLOCK), Work("i64", 1)


def _ormqr_arguments(p: Problem) -> tuple[Argument, ...]:
    count, c = p.types[1].shape[-1], p.types[2].shape
    transpose = ("C" if p.complex else "T") if p.options["transpose"] else "N"
    left = p.options["left"]
    work = p.work((c[-2] if left else c[-1]) * BLOCK + (BLOCK + 1) * BLOCK)
    sizes = Letter("L" if left else "R"), Letter(transpose), Number(c[-1]), Number(c[-2]), Number(count)
    return (
        *sizes,
        Copied(0),
        _leading_dimension(p.rows),
        Read(1),
        Update(0),
        _leading_dimension(c[-1]),
        *work,
        Work("i64", 1),
    )


def _geqp3_arguments(p: Problem) -> tuple[Argument, ...]:
    work = p.work(2 * p.cols + (p.cols + 1) * BLOCK)
    sizes = Number(p.rows), Number(p.cols), Update(0), _leading_dimension(p.rows)
    return *sizes, Update(1), Result(2), *work, *p.real_work(2 * p.cols), Work("i64", 1)


def _svd_results(p: Problem) -> Types:
    full = p.options["mode"] == "A"
    u, v = (p.rows, p.cols) if full else (p.small, p.small)
    s = p.make(p.small, dtype=p.real)
    return p.types[0], s, p.make(u, p.rows), p.make(p.cols, v), p.status()


def _svd_leading(p: Problem) -> tuple[Number, Number]:
    return _leading_dimension(p.rows), _leading_dimension(p.cols if p.options["mode"] == "A" else p.small)


def _gesdd_arguments(p: Problem) -> tuple[Argument, ...]:
    k, large = p.small, maximum(p.rows, p.cols)
    ldu, ldv = _svd_leading(p)
    work = p.work(4 * k * k + 7 * k + large + (large + 3 * k) * BLOCK)
    real = p.real_work(maximum(5 * k * k + 7 * k, 2 * large * k + 2 * k * k + k))
    matrix = Letter(p.options["mode"]), Number(p.rows), Number(p.cols), Update(0), _leading_dimension(p.rows)
    return *matrix, Result(1), Result(2), ldu, Result(3), ldv, *work, *real, Work("i64", 8 * k), Result(4)


def _gesvd_arguments(p: Problem) -> tuple[Argument, ...]:
    k, large, mode = p.small, maximum(p.rows, p.cols), Letter(p.options["mode"])
    ldu, ldv = _svd_leading(p)
    work = p.work(3 * k * k + 5 * k + large + (large + 3 * k) * BLOCK)
    matrix = mode, mode, Number(p.rows), Number(p.cols), Update(0), _leading_dimension(p.rows)
    return *matrix, Result(1), Result(2), ldu, Result(3), ldv, *work, *p.real_work(5 * k), Result(4)


def _syevd_arguments(p: Problem) -> tuple[Argument, ...]:
    n = p.rows
    parts = 2 * n * n + 5 * n + 1
    work = p.work(2 * n * n + 6 * n + 1 + n * BLOCK)
    real = (Work(p.real, parts), Number(parts)) if p.complex else ()
    integers = Work("i64", 5 * n + 3), Number(5 * n + 3)
    matrix = Letter(p.options["mode"]), Letter(p.options["uplo"]), Number(n), Update(0), _leading_dimension(n)
    return *matrix, Result(1), *work, *real, *integers, Result(2)


def _eigenvalues(p: Problem) -> Types:
    """Return the types of the eigenvalues; LAPACK returns two arrays for real matrices, real and imaginary parts."""
    return (p.make(p.rows),) if p.complex else (p.make(p.rows), p.make(p.rows))


def _geev_results(p: Problem) -> Types:
    return *_eigenvalues(p), p.types[0], p.types[0], p.status()


def _geev_arguments(p: Problem) -> tuple[Argument, ...]:
    n, first = p.rows, len(_eigenvalues(p))
    letters = Letter(p.options["compute_left"]), Letter(p.options["compute_right"])
    values = tuple(Result(k) for k in range(first))
    vectors = Result(first), _leading_dimension(n), Result(first + 1), _leading_dimension(n)
    work = *p.work(n * (4 * BLOCK + 10) + 2 * BLOCK * BLOCK), *p.real_work(2 * n)
    return *letters, Number(n), Copied(0), _leading_dimension(n), *values, *vectors, *work, Result(first + 2)


def _gees_results(p: Problem) -> Types:
    return p.types[0], p.types[0], *_eigenvalues(p), p.status(), p.status()


def _gees_arguments(p: Problem) -> tuple[Argument, ...]:
    n, count = p.rows, len(_eigenvalues(p))
    values = tuple(Result(2 + k) for k in range(count))
    head = Letter(p.options["mode"]), Letter("N"), Work("i64", 1), Number(n), Update(0), _leading_dimension(n)
    work = *p.work(n * (3 * BLOCK + 10) + 2 * BLOCK * BLOCK), *p.real_work(n), Work("i64", maximum(n, 1))
    return *head, Result(2 + count), *values, Result(1), _leading_dimension(n), *work, Result(3 + count)


def _gehrd_arguments(p: Problem) -> tuple[Argument, ...]:
    n = p.rows
    bounds = Number(p.options["low"]), Number(p.options["high"])
    work = p.work(n * BLOCK + (BLOCK + 1) * BLOCK)
    return Number(n), *bounds, Update(0), _leading_dimension(n), Result(1), *work, Result(2)


def _sytrd_arguments(p: Problem) -> tuple[Argument, ...]:
    n = p.rows
    parts = Result(1), Result(2), Result(3)
    return Letter(p.options["uplo"]), Number(n), Update(0), _leading_dimension(n), *parts, *p.work(n * BLOCK), Result(4)


def _gtsv_arguments(p: Problem) -> tuple[Argument, ...]:
    """Return the arguments of gtsv; the lower diagonal is passed from element 1, because element 0 is padding."""
    b = p.types[3].shape
    return (
        Number(b[-1]),
        Number(b[-2]),
        Update(0, first=1),
        Update(1),
        Update(2),
        Update(3),
        _leading_dimension(b[-1]),
        Result(4),
    )


ROUTINES: dict[str, Routine] = {
    "getrf": Routine(
        (2,), lambda p: (p.types[0], p.make(p.small, dtype="i32"), p.status()), _getrf_arguments, status=True
    ),
    "geqrf": Routine((2,), lambda p: (p.types[0], p.make(p.small)), _geqrf_arguments),
    "orgqr": Routine((2, 1), lambda p: (p.types[0],), _orgqr_arguments, complex_name="ungqr"),
    "ormqr": Routine(
        (2, 1, 2), lambda p: (p.types[2],), _ormqr_arguments, (2,), complex_name="unmqr", options=("left", "transpose")
    ),
    "geqp3": Routine((2, 1), lambda p: (p.types[0], p.types[1], p.make(p.small)), _geqp3_arguments, (0, 1)),
    "gesdd": Routine((2,), _svd_results, _gesdd_arguments, status=True, cost=20, options=("mode",)),
    "gesvd": Routine((2,), _svd_results, _gesvd_arguments, status=True, cost=20, options=("mode",)),
    "syevd": Routine(
        (2,),
        lambda p: (p.types[0], p.make(p.rows, dtype=p.real), p.status()),
        _syevd_arguments,
        status=True,
        complex_name="heevd",
        square=True,
        cost=10,
        options=("mode", "uplo"),
    ),
    "geev": Routine(
        (2,),
        _geev_results,
        _geev_arguments,
        (),
        status=True,
        finite=True,
        square=True,
        cost=25,
        options=("compute_left", "compute_right"),
    ),
    "gees": Routine((2,), _gees_results, _gees_arguments, status=True, square=True, cost=25, options=("mode",)),
    "gehrd": Routine(
        (2,),
        lambda p: (p.types[0], p.make(maximum(p.rows - 1, 0)), p.status()),
        _gehrd_arguments,
        status=True,
        square=True,
        cost=4,
        options=("low", "high"),
    ),
    "sytrd": Routine(
        (2,),
        lambda p: (
            p.types[0],
            p.make(p.rows, dtype=p.real),
            p.make(maximum(p.rows - 1, 0), dtype=p.real),
            p.make(maximum(p.rows - 1, 0)),
            p.status(),
        ),
        _sytrd_arguments,
        status=True,
        complex_name="hetrd",
        square=True,
        options=("uplo",),
    ),
    "gtsv": Routine(
        (1, 1, 1, 2),
        lambda p: (*p.types, TensorType("i32", p.types[0].shape[:-1])),
        _gtsv_arguments,
        (0, 1, 2, 3),
        status=True,
        cost=1,
    ),
}


def lapack_symbol(routine: str, dtype: str) -> str:
    """Return the name of a routine for an element type, e.g. ``dgetrf``."""
    row = ROUTINES[routine]
    complex_ = kind_of(dtype) == "c"
    return LETTERS[dtype] + (row.complex_name if complex_ and row.complex_name else routine)


def infer_lapack(types: Types, attrs: Mapping[str, Any], regions: tuple, given: Types) -> Types:
    """Return the result types of a ``lapack`` op, for ``OpSpec.infer``."""
    name = attrs["routine"]
    row = ROUTINES.get(name)
    if row is None:
        raise RuleError(f"lapack: no routine {name!r}; there are {', '.join(ROUTINES)}")
    require_rule(len(types) == len(row.ranks), f"{name} takes {len(row.ranks)} operands, found {len(types)}")
    missing = [o for o in row.options if o not in attrs["options"]]
    require_rule(not missing, f"{name}: option {', '.join(missing)} is missing")
    problem = Problem(types, attrs["options"])
    batch = types[0].shape[: types[0].rank - row.ranks[0]]
    for t, rank in zip(types, row.ranks):
        require_rule(t.rank == len(batch) + rank and t.shape[: len(batch)] == batch,
             f"{name}: {t} is not a batch {tuple(map(str, batch))} of arrays of rank {rank}")  # fmt: skip
    if row.square:
        require_rule(problem.rows == problem.cols, f"{name}: {types[0]} is not square")
    _check_shapes(name, problem)
    return row.results(problem)


def _check_shapes(name: str, p: Problem) -> None:
    """Raise RuleError for operands that are too small for the routine, and for unsupported options."""
    mode = p.options.get("mode", "N")
    require_rule(mode in ("A", "S", "N", "V"), f"{name}: no mode {mode!r}")
    last = [t.shape[-1] for t in p.types]
    match name:
        case "orgqr" | "ormqr":
            require_rule(
                may_be_at_most(last[1], p.cols), f"{name}: {p.types[1]} has more reflectors than {p.types[0]} columns"
            )
            if name == "ormqr":
                side = p.types[2].shape[-1 if p.options["left"] else -2]
                require_rule(dims_may_be_equal(side, p.rows), f"ormqr: {p.types[0]} cannot be applied to {p.types[2]}")
        case "geqp3":
            require_rule(
                dims_may_be_equal(last[1], p.cols) and p.types[1].dtype == "i32", f"geqp3: {p.types[1]} are no pivots"
            )
        case "gtsv":
            require_rule(
                all(dims_may_be_equal(d, last[0]) for d in last),
                f"gtsv: diagonals {p.types[0]} do not fit {p.types[3]}",
            )
        case "gees":
            require_rule(p.options.get("sort", "N") == "N", "gees: sorting is not supported")


def may_be_at_most(count: Dim, limit: Dim) -> bool:
    """Return True if ``count <= limit`` for some values of the symbolic sizes."""
    low, _ = bounds(count - limit)
    return low is None or low <= 0


def lapack_in_place_operands(attrs: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the numbers of the operands that results 0, 1... of a ``lapack`` op overwrite, for ``OpSpec.in_place``."""
    return ROUTINES[attrs["routine"]].updates
