"""Cholesky factorisation and triangular solve by one worker, in place (see ``in_place``).

Small matrices, and all that one GPU thread processes, are lowered to loops, with one grid item per matrix or per run of
right-hand sides. Large matrices are lowered to calls of LAPACK and BLAS, to which a row-major matrix is its transpose:
sides and triangles are swapped, and nothing is copied. If the size is symbolic, the kernel contains both.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from aotc.ir.dims.algebra import Dim, ceildiv, minimum, product, sym
from aotc.ir.loop.ir import Alloc, Apply, Buffer, Const, For, If, Kernel, Load, Scalar, Stmt, Store
from aotc.ir.loop.ir import Index as IndexScalar
from aotc.ir.opset.linalg_lapack import LETTERS
from aotc.ir.tensor.ir import Op
from aotc.lowering.analysis.index_maps import Index, delinearize
from aotc.lowering.elements.builder import RegionBuilder, grid_item
from aotc.lowering.elements.elements import Elements, constant_scalar, real_and_imaginary
from aotc.lowering.plans.linalg.gpu_triangles import BlockCholeskyPlan, BlockSolvePlan
from aotc.lowering.plans.linalg.triangles import CholeskyPlan, MatrixSolvePlan, PieceSolvePlan, solved_sizes
from aotc.lowering.regions.common.library_call import LibraryCall
from aotc.lowering.regions.linalg.gpu_cholesky_trsm import factor_in_block, solve_in_block
from aotc.vmfb.dtypes import kind_of, real_of, to_numpy

_TRANSPOSES = {"NO_TRANSPOSE": "N", "TRANSPOSE": "T", "ADJOINT": "C"}

Element = Callable[[Dim, Dim], Scalar]


def _conjugate_scalar(x: Scalar) -> Scalar:
    return Apply("conj", (x,), x.dtype) if kind_of(x.dtype) == "c" else x


def _binary_scalar(fn: str, a: Scalar, b: Scalar) -> Scalar:
    return Apply(fn, (a, b), a.dtype)


# --- cholesky ----------------------------------------------------------------


def lower_cholesky(b: RegionBuilder, plan: CholeskyPlan) -> Kernel:
    """Lower ``cholesky``: the other triangle becomes 0, and a matrix with a non-positive pivot becomes NaN."""
    lower, (out,) = b.region_root_op("cholesky").attrs["lower"], b.outputs
    n = out.shape[-1]

    def factor_matrix(head: Index, failed: Buffer) -> list[Stmt]:
        """Return the factorisation of one matrix in place, with zeros in the other triangle, or NaN if it failed."""
        body = _choose_by_matrix_size(
            plan.loop_rows,
            n,
            lambda: _cholesky_factor_loops(b, out, head, failed, lower),
            lambda: _potrf_call(b, out, head, failed, lower),
        )
        r, c = sym("r", 0, n), sym("c", 0, n)
        clear = Store(out, (*head, r, c), constant_scalar(0, out.dtype))
        body.append(For("r", 0, n, (For("c", *((r + 1, n) if lower else (0, r)), (clear,)),)))
        return [*body, _fill_with_nan_if_failed(out, head, failed, 1)]

    return _kernel_per_matrix(b, factor_matrix)


def lower_block_cholesky(b: RegionBuilder, plan: BlockCholeskyPlan) -> Kernel:
    """Lower ``cholesky`` to a block of threads per matrix."""
    lower, (out,) = b.region_root_op("cholesky").attrs["lower"], b.outputs
    threads = plan.block.threads

    def factor_matrix(head: Index, failed: Buffer) -> list[Stmt]:
        body = factor_in_block(b, plan, out, head, failed, lower)
        return [*body, For("t", 0, threads, (_fill_with_nan_if_failed(out, head, failed, threads),), "thread")]

    return _kernel_per_matrix(b, factor_matrix)


def _kernel_per_matrix(b: RegionBuilder, factor: Callable[[Index, Buffer], list[Stmt]]) -> Kernel:
    """Return the kernel with an item per matrix; ``factor`` records in a flag that a pivot is not positive."""
    *batch, n, _ = b.outputs[0].shape
    matrices = product(batch)
    failed = Buffer("failed", "i1", (), "private")
    body = factor(delinearize(grid_item(matrices), batch), failed)
    start = Alloc(failed), Store(failed, (), Const(False, "i1"))
    return b.grid(matrices, [*start, *body], matrices * n * n * n)


def _fill_with_nan_if_failed(out: Buffer, head: Index, failed: Buffer, threads: int) -> Stmt:
    """Return the statement with which ``threads`` threads fill a matrix with NaN if its factorisation failed."""
    n = out.shape[-1]
    nan = complex(np.nan, np.nan) if kind_of(out.dtype) == "c" else np.nan
    at = (*head, sym("r", 0, n), sym("c", 0, n))
    fill = Store(out, at, constant_scalar(to_numpy(out.dtype).type(nan), out.dtype))
    begin = sym("t", 0, threads) if threads > 1 else 0
    return If(Load(failed, ()), (For("r", begin, n, (For("c", 0, n, (fill,)),), step=threads),))


def _choose_by_matrix_size(
    loop_rows: int | None, size: Dim, loops: Callable[[], list[Stmt]], library: Callable[[], list[Stmt]]
) -> list[Stmt]:
    """Return the loops, the library call, or a run-time test of ``size`` between them."""
    if loop_rows is None:
        return loops()
    if loop_rows == 0:
        return library()
    test = Apply("lt", (IndexScalar(size), Const(loop_rows + 1, "i64")), "i1")
    return [If(test, tuple(loops()), tuple(library()))]


def _cholesky_factor_loops(b: RegionBuilder, out: Buffer, head: Index, failed: Buffer, lower: bool) -> list[Stmt]:
    write = _cholesky_lower_column if lower else _cholesky_upper_row
    n = out.shape[-1]
    return [For("j", 0, n, tuple(write(b.elements(), out, head, failed, n)))]


def _potrf_call(b: RegionBuilder, out: Buffer, head: Index, failed: Buffer, lower: bool) -> list[Stmt]:
    """Return the call of LAPACK's Cholesky factorisation; its status sets ``failed``."""
    n = out.shape[-1]
    call = LibraryCall(b)
    call.add_character("U" if lower else "L")
    call.add_integer(n)
    call.args.append((out, (*head, 0, 0)))
    call.add_integer(n)
    status = call.add_status_word()
    call.after.append(Store(failed, (), Apply("ne", (Load(status, ()), Const(0, "i64")), "i1")))
    return call.call_statements(LETTERS[out.dtype] + "potrf")


def _store_cholesky_pivot(e: Elements, out: Buffer, where: Index, reduced: Scalar, failed: Buffer) -> Scalar:
    """Emit the square root of a reduced pivot and return it; a pivot that is not positive sets ``failed``."""
    positive = Apply("gt", (reduced, constant_scalar(0, reduced.dtype)), "i1")
    e.block.append(If(Apply("not", (positive,), "i1"), (Store(failed, (), Const(True, "i1")),)))
    root = e.bind(Apply("sqrt", (reduced,), reduced.dtype))
    whole: Scalar = root
    if kind_of(out.dtype) == "c":
        whole = Apply("complex", (root, constant_scalar(0, root.dtype)), out.dtype)
    e.block.append(Store(out, where, whole))
    return e.bind(whole)


def _cholesky_lower_column(e: Elements, out: Buffer, head: Index, failed: Buffer, n: Dim) -> list[Stmt]:
    """Return the loop that computes column ``j`` of L by dot products of finished parts of rows."""
    j, i, k = sym("j", 0, n), sym("i", 0, n), sym("k", 0, n)
    real = real_of(out.dtype)
    total = Buffer("total", real, (), "private")
    acc = Buffer("acc", out.dtype, (), "private")
    block: list[Stmt] = [Alloc(total), Store(total, (), constant_scalar(0, real))]
    block.append(For("k", 0, j, (Store(total, (), _squared_magnitude(Load(out, (*head, j, k))), "add"),)))
    e.enter(block)
    own = Load(out, (*head, j, j))
    diagonal = own if real == out.dtype else Apply("real", (own,), real)
    root = _store_cholesky_pivot(
        e, out, (*head, j, j), e.bind(_binary_scalar("sub", diagonal, Load(total, ()))), failed
    )
    dot = _binary_scalar("mul", Load(out, (*head, i, k)), _conjugate_scalar(Load(out, (*head, j, k))))
    rest = _binary_scalar("sub", Load(out, (*head, i, j)), Load(acc, ()))
    below: tuple[Stmt, ...] = (
        Alloc(acc),
        Store(acc, (), constant_scalar(0, out.dtype)),
        For("k", 0, j, (Store(acc, (), dot, "add"),)),
        Store(out, (*head, i, j), _binary_scalar("div", rest, root)),
    )
    block.append(For("i", j + 1, n, below))
    return block


def _squared_magnitude(x: Scalar) -> Scalar:
    """Return the square of the absolute value."""
    if kind_of(x.dtype) != "c":
        return _binary_scalar("mul", x, x)
    parts = real_and_imaginary(x)
    return _binary_scalar("add", *(_binary_scalar("mul", p, p) for p in parts))


def _cholesky_upper_row(e: Elements, out: Buffer, head: Index, failed: Buffer, n: Dim) -> list[Stmt]:
    """Return the loop that computes row ``j`` of U and subtracts its outer product from the rows below."""
    j, i, k = sym("j", 0, n), sym("i", 0, n), sym("k", 0, n)
    real = real_of(out.dtype)
    block = e.new_block()
    own = Load(out, (*head, j, j))
    diagonal = e.bind(own if real == out.dtype else Apply("real", (own,), real))
    root = _store_cholesky_pivot(e, out, (*head, j, j), diagonal, failed)
    at = (*head, j, k)
    block.append(For("k", j + 1, n, (Store(out, at, _binary_scalar("div", Load(out, at), root)),)))
    rows = e.new_block()
    factor = e.bind(_conjugate_scalar(Load(out, (*head, j, i))))
    at = (*head, i, k)
    update = _binary_scalar("sub", Load(out, at), _binary_scalar("mul", factor, Load(out, (*head, j, k))))
    rows.append(For("k", i, n, (Store(out, at, update),)))
    block.append(For("i", j + 1, n, tuple(rows)))
    return block


# --- triangular_solve --------------------------------------------------------


def lower_piece_solve(b: RegionBuilder, plan: PieceSolvePlan) -> Kernel:
    """Lower ``triangular_solve`` to items that substitute for some right-hand sides, which the solution overwrites."""
    op, out = b.region_root_op("triangular_solve"), b.outputs[0]
    _, _, others = solved_sizes(b)
    shape = (*out.shape[:-2], ceildiv(others, plan.columns))
    items = product(shape)
    *head, piece = delinearize(grid_item(items), shape)
    solve = _solve_transposed_rows if plan.transposed else _solve_right_hand_sides
    return b.grid(items, solve(b, op, plan.columns, tuple(head), piece), _solve_work(b))


def lower_matrix_solve(b: RegionBuilder, plan: MatrixSolvePlan) -> Kernel:
    """Lower ``triangular_solve`` to items that solve for all right-hand sides of a matrix, in loops or by BLAS."""
    op, out = b.region_root_op("triangular_solve"), b.outputs[0]
    batch, (_, n, others) = out.shape[:-2], solved_sizes(b)
    pieces = ceildiv(others, plan.columns)
    items = product(batch)
    at = delinearize(grid_item(items), batch)
    piece = sym("c0", 0, pieces) if pieces != 1 else 0

    def solve_in_loops() -> list[Stmt]:
        body = _solve_right_hand_sides(b, op, plan.columns, at, piece)
        return body if pieces == 1 else [For("c0", 0, pieces, tuple(body))]

    body = _choose_by_matrix_size(
        plan.loop_rows, minimum(n, others), solve_in_loops, lambda: _trsm_call(b, op, out, at)
    )
    return b.grid(items, body, _solve_work(b))


def lower_block_solve(b: RegionBuilder, plan: BlockSolvePlan) -> Kernel:
    """Lower ``triangular_solve`` to a GPU block of threads per run of right-hand sides."""
    op, out = b.region_root_op("triangular_solve"), b.outputs[0]
    left, _, others = solved_sizes(b)
    shape = (*out.shape[:-2], ceildiv(others, plan.columns))
    items = product(shape)
    *head, piece = delinearize(grid_item(items), shape)
    begin = piece * plan.columns
    plain = _triangle_element_loader(b, op, tuple(head))
    matrix = plain if left else (lambda i, k: plain(k, i))
    ends = begin, minimum(begin + plan.columns, others)
    return b.grid(
        items, solve_in_block(b, plan, tuple(head), matrix, _is_forward_substitution(op), ends), _solve_work(b)
    )


def _solve_work(b: RegionBuilder) -> Dim:
    _, n, others = solved_sizes(b)
    return product(b.outputs[0].shape[:-2]) * others * n * n


def _solve_right_hand_sides(b: RegionBuilder, op: Op, count: int, head: Index, piece: Dim) -> list[Stmt]:
    """Return the substitution for ``count`` columns of right-hand sides, or for one vector."""
    out = b.outputs[0]
    *_, rows, columns = out.shape
    matrix = _triangle_element_loader(b, op, head)
    e = b.elements()
    if not op.attrs["left_side"]:
        return _substitute_vector(e, op, matrix, out, lambda k: (*head, piece, k), columns)
    if columns == 1:
        return _substitute_vector(e, op, matrix, out, lambda k: (*head, k, 0), rows)
    begin = piece * count
    return _substitute_rows(e, op, matrix, out, head, rows, begin, minimum(begin + count, columns))


def _solve_transposed_rows(b: RegionBuilder, op: Op, count: int, head: Index, piece: Dim) -> list[Stmt]:
    """Return the solve for ``count`` right-hand sides in rows, transposed to make inner loops contiguous."""
    out = b.outputs[0]
    *_, others, n = out.shape
    begin = piece * count
    size = minimum(count, others - begin)
    columns = Buffer(b.fresh("columns"), out.dtype, (n, count), "scratch")
    matrix, c, k = _triangle_element_loader(b, op, head), sym("c", 0, count), sym("k", 0, n)
    row, column = (*head, begin + c, k), (k, c)

    def solve_transposed_columns(statement: Stmt) -> For:
        return For("k", 0, n, (For("c", 0, size, (statement,)),))

    return [
        Alloc(columns),
        solve_transposed_columns(Store(columns, column, Load(out, row))),
        *_substitute_rows(b.elements(), op, lambda i, k: matrix(k, i), columns, (), n, 0, size),
        solve_transposed_columns(Store(out, row, Load(columns, column))),
    ]


def _trsm_call(b: RegionBuilder, op: Op, out: Buffer, head: Index) -> list[Stmt]:
    """Return the call of BLAS' triangular solve; sides and triangles are swapped for row-major matrices."""
    a = b.buffers[op.operands[0]]
    call = LibraryCall(b)
    call.add_character("R" if op.attrs["left_side"] else "L")
    call.add_character("U" if op.attrs["lower"] else "L")
    call.add_character(_TRANSPOSES[op.attrs["transpose_a"]])
    call.add_character("U" if op.attrs["unit_diagonal"] else "N")
    call.add_integer(out.shape[-1])
    call.add_integer(out.shape[-2])
    call.add_element_constant(constant_scalar(1, out.dtype))
    call.args.append((a, (*head, 0, 0)))
    call.add_integer(a.shape[-1])
    call.args.append((out, (*head, 0, 0)))
    call.add_integer(out.shape[-1])
    return call.call_statements(LETTERS[out.dtype] + "trsm")


def _triangle_element_loader(b: RegionBuilder, op: Op, head: Index) -> Element:
    """Return the function that loads element ``(i, k)`` of ``op(a)``."""
    a = b.buffers[op.operands[0]]
    match op.attrs["transpose_a"]:
        case "TRANSPOSE":
            return lambda i, k: Load(a, (*head, k, i))
        case "ADJOINT":
            return lambda i, k: _conjugate_scalar(Load(a, (*head, k, i)))
    return lambda i, k: Load(a, (*head, i, k))


def _substitution_order(op: Op, n: Dim) -> tuple[Dim, tuple[Dim, Dim], tuple[Dim, Dim]]:
    """Return the unknown of step ``s``, and the ranges of unknowns that other steps compute before and after it.

    ``x M = b`` is solved in the order of ``M`` transposed.
    """
    s = sym("s", 0, n)
    if _is_forward_substitution(op):
        return s, (0, s), (s + 1, n)
    i = n - 1 - s
    return i, (i + 1, n), (0, i)


def _is_forward_substitution(op: Op) -> bool:
    """Return True for forward substitution: the first unknown is computed first."""
    flipped = (op.attrs["transpose_a"] != "NO_TRANSPOSE") != (not op.attrs["left_side"])
    return op.attrs["lower"] != flipped


def _substitute_rows(
    e: Elements, op: Op, matrix: Element, out: Buffer, head: Index, n: Dim, begin: Dim, end: Dim
) -> list[Stmt]:
    """Return the loop that subtracts multiples of finished rows from row ``i``, along the right-hand sides."""
    i, before, _ = _substitution_order(op, n)
    k, c = sym("k", 0, n), sym("c", 0, out.shape[-1])
    at = (*head, i, c)
    inner = e.new_block()
    factor = e.bind(matrix(i, k))
    less = _binary_scalar("sub", Load(out, at), _binary_scalar("mul", factor, Load(out, (*head, k, c))))
    inner.append(For("c", begin, end, (Store(out, at, less),)))
    step: list[Stmt] = [For("k", *before, tuple(inner))]
    if not op.attrs["unit_diagonal"]:
        e.enter(step)
        diagonal = e.bind(matrix(i, i))
        step.append(For("c", begin, end, (Store(out, at, _binary_scalar("div", Load(out, at), diagonal)),)))
    return [For("s", 0, n, tuple(step))]


def _substitute_vector(
    e: Elements, op: Op, matrix: Element, out: Buffer, at: Callable[[Dim], Index], n: Dim
) -> list[Stmt]:
    """Return the substitution for one vector; the inner loop runs along the rows of ``a``."""
    i, before, after = _substitution_order(op, n)
    k = sym("k", 0, n)
    left = op.attrs["left_side"]
    coefficient = matrix if left else (lambda i, k: matrix(k, i))
    by_dots = (op.attrs["transpose_a"] == "NO_TRANSPOSE") == left
    step = e.new_block()
    value: Scalar = Load(out, at(i))
    if by_dots:
        acc = Buffer("acc", out.dtype, (), "private")
        dot = _binary_scalar("mul", coefficient(i, k), Load(out, at(k)))
        step += [Alloc(acc), Store(acc, (), constant_scalar(0, out.dtype))]
        step.append(For("k", *before, (Store(acc, (), dot, "add"),)))
        value = _binary_scalar("sub", value, Load(acc, ()))
    if not op.attrs["unit_diagonal"]:
        value = _binary_scalar("div", value, coefficient(i, i))
    unknown = e.bind(value)
    step.append(Store(out, at(i), unknown))
    if not by_dots:
        less = _binary_scalar("sub", Load(out, at(k)), _binary_scalar("mul", coefficient(k, i), unknown))
        step.append(For("k", *after, (Store(out, at(k), less),)))
    return [For("s", 0, n, tuple(step))]
