"""Calls of LAPACK: one grid item per matrix, with the arguments that the routine's table row lists."""

from __future__ import annotations

from collections.abc import Callable

from aotc.ir.dims.algebra import Dim, product
from aotc.ir.loop.ir import Alloc, Apply, Buffer, Const, If, Kernel, Load, Scalar, Stmt, Store
from aotc.ir.opset.linalg_lapack import (
    NOT_FINITE,
    ROUTINES,
    Argument,
    Copied,
    Letter,
    Number,
    Problem,
    Read,
    Result,
    Update,
    Work,
    lapack_symbol,
)
from aotc.ir.tensor.ir import Op
from aotc.lowering.analysis.index_maps import Index, delinearize
from aotc.lowering.elements.builder import RegionBuilder, grid_item
from aotc.lowering.elements.elements import real_and_imaginary
from aotc.lowering.plans.single_ops import LapackCallPlan
from aotc.lowering.regions.common.library_call import LibraryCall, loops_over
from aotc.vmfb.dtypes import kind_of


def lower_lapack_call(b: RegionBuilder, plan: LapackCallPlan) -> Kernel:
    """Lower a LAPACK routine to one library call per matrix of the batch, on the CPU."""
    op = b.region_root_op("lapack")
    name, options = op.attrs["routine"], op.attrs["options"]
    problem = Problem(tuple(v.type for v in op.operands), options)

    def call_for_matrix(head: Index) -> list[Stmt]:
        """Return the call for one matrix; some routines are called only for finite matrices."""
        call = LibraryCall(b)
        for argument in ROUTINES[name].arguments(problem):
            _pass_lapack_argument(call, argument, op, b, head)
        body = call.call_statements(lapack_symbol(name, problem.dtype))
        return _call_if_matrix_is_finite(b, op, head, body) if ROUTINES[name].finite else body

    return kernel_per_matrix(b, call_for_matrix)


def kernel_per_matrix(b: RegionBuilder, routine: Callable[[Index], list[Stmt]]) -> Kernel:
    """Return the kernel with a grid item per matrix; ``routine`` writes the statements of one."""
    op = b.region_root_op("lapack")
    row = ROUTINES[op.attrs["routine"]]
    batch = op.operands[0].type.shape[: op.operands[0].type.rank - row.ranks[0]]
    matrices = product(batch)
    body = routine(delinearize(grid_item(matrices), batch))
    return b.grid(matrices, body, matrices * _lapack_work(op, len(batch)) * row.cost)


def _lapack_work(op: Op, batch: int) -> Dim:
    """Return the operation estimate rows * columns * min(rows, columns) of the largest operand, times ``batch``."""
    shape = max((v.type.shape[batch:] for v in op.operands), key=len)
    if len(shape) < 2:
        return product(shape)
    return product(shape) * (shape[0] if shape[0] == shape[1] else sum(shape))


def _pass_lapack_argument(call: LibraryCall, argument: Argument, op: Op, b: RegionBuilder, head: Index) -> None:
    """Append one argument of a LAPACK routine, as its table row describes: a letter, a size, workspace or a matrix."""
    match argument:
        case Letter(value):
            call.add_character(value)
        case Number(value):
            call.add_integer(value)
        case Work(dtype, size):
            call.args.append((call.allocate_workspace(dtype, (size,)), (0,)))
        case Read(operand):
            source = b.buffers[op.operands[operand]]
            call.args.append((source, _first_element_index(source, head)))
        case Copied(operand):
            shape = op.operands[operand].type.shape[len(head) :]
            call.add_matrix_copy(b.buffers[op.operands[operand]], head, shape)
        case Update(result, first):
            _pass_lapack_result(call, b.outputs[result], head, first, is_input=True)
        case Result(result):
            _pass_lapack_result(call, b.outputs[result], head, 0, is_input=False)


def _pass_lapack_result(call: LibraryCall, out: Buffer, head: Index, first: int, is_input: bool) -> None:
    """Append a result to the arguments; integers are converted between i32 and i64."""
    if out.dtype == "i32":
        call.add_i32_array(out, head, is_input)
    else:
        call.args.append((out, _first_element_index(out, head, first)))


def _first_element_index(buffer: Buffer, head: Index, first: int = 0) -> Index:
    """Return the index of the first element of ``buffer[head]``, or of a later one in its last dim."""
    rest = len(buffer.shape) - len(head)
    return (*head, *(0,) * (rest - 1), first) if rest else head


def _call_if_matrix_is_finite(b: RegionBuilder, op: Op, head: Index, body: list[Stmt]) -> list[Stmt]:
    """Return the call guarded by a test that the matrix is finite; otherwise the status reports the failure."""
    row = ROUTINES[op.attrs["routine"]]
    source = b.outputs[0] if row.updates else b.buffers[op.operands[0]]
    finite = Buffer(b.fresh("finite"), "i1", (), "private")
    shape = source.shape[len(head) :]

    def test_element(at: Index) -> Stmt:
        good = Apply("and", (Load(finite, ()), _is_finite_scalar(Load(source, (*head, *at)))), "i1")
        return Store(finite, (), good)

    loops = loops_over(b, shape, test_element)
    status = b.outputs[-1]
    failed = Store(status, head, Const(NOT_FINITE, status.dtype))
    return [Alloc(finite), Store(finite, (), Const(True, "i1")), *loops, If(Load(finite, ()), tuple(body), (failed,))]


def _is_finite_scalar(x: Scalar) -> Scalar:
    if kind_of(x.dtype) != "c":
        return Apply("is_finite", (x,), "i1")
    return Apply("and", tuple(Apply("is_finite", (part,), "i1") for part in real_and_imaginary(x)), "i1")
