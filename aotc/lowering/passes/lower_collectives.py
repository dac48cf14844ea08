"""Replace collectives by their results in a program of a single process, by calls of the runtime in that of a rank.

Before: ``%1 = all_reduce %x {groups = ((0,),), ...}`` and ``%2 = partition_id``. After: ``%x`` and the constant 0. The
program of one of several ranks: see :mod:`aotc.lowering.passes.rank_calls`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aotc.diagnostics import CompileError, Finding
from aotc.ir.opset.collective import COLLECTIVES, multiprocess_reason
from aotc.ir.tensor.ir import Module, Op, TensorType, Value, walk
from aotc.lowering.passes.rank_calls import with_rank_calls
from aotc.lowering.passes.rewrite import Builder, rewrite_module
from aotc.options import Options


def lower_collectives(module: Module, options: Options) -> Module:
    """Return ``module`` without collectives.

    Raises
    ------
    CompileError
        If collectives need more than one process; the message names all of them. In the program of a rank: as
        :func:`~aotc.lowering.passes.rank_calls.with_rank_calls`.
    """
    if not module.has(*COLLECTIVES):
        return module
    if any("ranks" in function.attrs for function in module.functions.values()):
        changed, serial = {}, 0
        for name, function in module.functions.items():
            changed[name], serial = with_rank_calls(function, serial)
        return module.with_functions(changed)
    refused = [
        f for function in module.functions.values() for op in walk(function.body) for f in _collective_refusal(op)
    ]
    if refused:
        raise CompileError(refused)
    return rewrite_module(module, _lower_collective_rule, COLLECTIVES)


def _collective_refusal(op: Op) -> list[Finding]:
    """Return the error for a collective of several processes; an empty list for another op."""
    reason = multiprocess_reason(op.attrs) if op.name in COLLECTIVES else ""
    if not reason:
        return []
    message = f"{op.name} {reason}, and the program is compiled for one"
    hint = "export the function for one device, or with shardings over a mesh of several"
    return [Finding(message, op.loc, hint=hint)]


def _lower_collective_rule(op: Op, b: Builder) -> Sequence[Value] | None:
    """Return the results of a collective in a program of one process, which are mostly its operands."""
    if op.name not in COLLECTIVES:
        return None
    if not op.operands:  # the number of this process
        return (b.constant(0, TensorType("u32")),)
    if op.name == "collective_permute" and not op.attrs["pairs"]:  # without senders StableHLO's result is zeros
        return [b.constant(0, v.type) for v in op.operands]
    return (_lower_ragged_all_to_all(op.operands, b),) if op.name == "ragged_all_to_all" else op.operands


def _lower_ragged_all_to_all(operands: Sequence[Value], b: Builder) -> Value:
    """Return ``ragged_all_to_all`` of one process: ranges of rows of the first operand written into the second.

    Rows beyond either operand are dropped.
    """
    x, out, *vectors = operands
    index = TensorType("i64", (out.type.shape[0],))
    row = b.make("iota", (), {"dim": 0}, index)
    end = b.broadcast(b.make("dim", (), {"expr": x.type.shape[0]}, TensorType("i64")), (), index.shape)
    zero, count = b.constant(0, index), vectors[0].type.shape[0]
    for k in range(count if isinstance(count, int) else 0):
        start, sent, place = (b.broadcast(_vector_element(v, k, b), (), index.shape) for v in vectors[:3])
        offset = b.make("sub", (row, place))
        source = b.make("add", (offset, start))
        tests = [
            b.make("ge", (offset, zero)), b.make("lt", (offset, sent)),
            b.make("ge", (source, zero)), b.make("lt", (source, end)),
        ]  # fmt: skip
        mask = tests[0]
        for test in tests[1:]:
            mask = b.make("and", (mask, test))
        wide = b.broadcast(mask, (0,), out.type.shape)
        out = b.make("select", (wide, b.make("gather", (x, source), _row_gather_attributes(x)), out))
    return out


def _vector_element(vector: Value, k: int, b: Builder) -> Value:
    return b.convert(b.reshape(b.slice(vector, (k,), (k + 1,)), ()), "i64")


def _row_gather_attributes(x: Value) -> dict[str, Any]:
    """Return the attributes of a gather of whole rows of ``x``."""
    return {
        "offset_dims": tuple(range(1, x.type.rank)), "collapsed_slice_dims": (0,), "operand_batching_dims": (),
        "start_indices_batching_dims": (), "start_index_map": (0,), "index_vector_dim": 1,
        "slice_sizes": (1, *x.type.shape[1:]),
    }  # fmt: skip
