"""Size constraints of contractions, transforms and solvers."""

from __future__ import annotations

from collections.abc import Iterator

from aotc.ir.dims.algebra import minimum, mod
from aotc.ir.opset.linalg_lapack import ROUTINES
from aotc.ir.opset.spec import Attrs, Constraint, Types, equal_shapes, equal_sizes, positive_values


def dot_constraints(types: Types, attrs: Attrs, given: Types) -> Iterator[Constraint]:
    """Yield the constraints that batch and contracted dims are equal."""
    for side in ("batch", "contract"):
        for i, j in zip(attrs[f"lhs_{side}"], attrs[f"rhs_{side}"]):
            yield from equal_sizes(types, (0, i), (1, j))


def convolution_constraints(types: Types, attrs: Attrs, given: Types) -> Iterator[Constraint]:
    """Yield the constraints that features match the groups, and that the window has elements."""
    lhs, rhs = types
    groups, batch_groups = attrs["feature_groups"], attrs["batch_groups"]
    features, own = lhs.shape[attrs["input_feature"]], rhs.shape[attrs["kernel_input"]]
    if features != own * groups:
        what = f"{{0}} input features of the kernel in {groups} groups for {{1}} of the input"
        if isinstance(features, int):
            place, form = (1, attrs["kernel_input"]), features // groups
            yield Constraint("eq", own * groups, features, what, place, form)
        else:
            yield Constraint("eq", own * groups, features, what, (0, attrs["input_feature"]), own * groups)
    outputs = rhs.shape[attrs["kernel_output"]]
    for size, parts, what in (
        (outputs, groups, "output features"),
        (outputs, batch_groups, "output features"),
        (lhs.shape[attrs["input_batch"]], batch_groups, "batches"),
    ):
        yield Constraint("eq", mod(size, parts), 0, f"{what} do not divide into {parts} groups: {{0}} are left")
    yield from positive_values((rhs.shape[d] for d in attrs["kernel_spatial"]), "a window")


def fft_constraints(types: Types, attrs: Attrs, given: Types) -> Iterator[Constraint]:
    """Yield the constraints that the last dims have the transform's sizes; irfft reads ``n // 2 + 1`` elements."""
    (x,), length = types, attrs["length"]
    for k, size in enumerate(length):
        d = x.rank - len(length) + k
        halved = attrs["kind"] == "IRFFT" and k == len(length) - 1
        if d >= 0 and not (halved and size == 0):
            wanted = size // 2 + 1 if halved else size
            yield Constraint("eq", x.shape[d], wanted, "a transform of {1} elements on {0}", (0, d), wanted)


def square_constraints(types: Types, attrs: Attrs, given: Types) -> Iterator[Constraint]:
    """Yield the constraint that operand 0 is square."""
    rank = types[0].rank
    if rank >= 2:
        yield from equal_sizes(types, (0, rank - 2), (0, rank - 1), "a square matrix with {0} and {1} rows and columns")


def triangular_solve_constraints(types: Types, attrs: Attrs, given: Types) -> Iterator[Constraint]:
    """Yield the constraints that matrices are square, and have the size and the batch dims of the right sides."""
    a, b = types
    yield from square_constraints(types, attrs, given)
    yield from equal_sizes(types, (0, a.rank - 2), (1, b.rank - 2 if attrs["left_side"] else b.rank - 1))
    for d in range(a.rank - 2):
        yield from equal_sizes(types, (0, d), (1, d))


def csr_dot_constraints(types: Types, attrs: Attrs, given: Types) -> Iterator[Constraint]:
    """Yield the constraints that each CSR value has a column index, and the dense operand a row if there are values."""
    yield from equal_shapes(types, operands=(0, 2))
    if types[3].rank:
        what = "columns of values, of which there is {0}, name rows of {1}"
        yield Constraint("le", minimum(types[0].shape[0], 1), types[3].shape[0], what)


def tridiagonal_constraints(types: Types, attrs: Attrs, given: Types) -> Iterator[Constraint]:
    """Yield the constraints that the three diagonals have equal shapes, and the right sides as many rows."""
    yield from equal_shapes(types, operands=range(3))
    for k in range(3):
        for d in range(types[k].rank):
            yield from equal_sizes(types, (k, d), (3, d))


def lapack_constraints(types: Types, attrs: Attrs, given: Types) -> Iterator[Constraint]:
    """Yield the constraints under which a LAPACK routine stays inside its operands, stored as ``[..., cols, rows]``."""
    last = [t.rank - 1 for t in types]
    match attrs["routine"]:
        case "gtsv":
            for k in range(1, len(types)):
                yield from equal_sizes(types, (0, last[0]), (k, last[k]))
            batch = last[0]
        case "geqp3":
            yield from equal_sizes(types, (0, last[0] - 1), (1, last[1]))
            batch = last[0] - 1
        case "orgqr" | "ormqr" as name:
            rows, columns = types[0].shape[-1], types[0].shape[-2]
            yield Constraint("le", types[1].shape[-1], columns, "{0} reflectors in {1} columns")
            if name == "ormqr":
                side = last[2] if attrs["options"]["left"] else last[2] - 1
                yield from equal_sizes(types, (0, last[0]), (2, side))
            else:
                yield Constraint("le", columns, rows, "{0} columns of {1} rows")
            batch = last[0] - 1
        case name:
            if name in ROUTINES and ROUTINES[name].square:
                yield from square_constraints(types, attrs, given)
            batch = last[0] - 1
    for d in range(batch):
        for k in range(1, len(types)):
            yield from equal_sizes(types, (0, d), (k, d))

