"""Custom calls: a kernel of one grid item that calls the user's function with the arrays and their sizes.

On GPUs the runtime's collectives are kernels without code.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aotc.diagnostics import CompileError, Loc
from aotc.ir.dims.algebra import Dim, product
from aotc.ir.loop.forms.offsets import delinearize
from aotc.ir.loop.ir import (
    COLLECTIVE_CALL,
    DEVICE_CALL,
    Apply,
    Buffer,
    Const,
    ExternalCall,
    For,
    Kernel,
    Load,
    Stmt,
    Store,
    While,
)
from aotc.ir.loop.ir import Index as IndexScalar
from aotc.ir.opset.control import REFUSED_ON_GPUS
from aotc.ir.tensor.ir import Function, Op
from aotc.lowering.elements.builder import RegionBuilder, grid_item
from aotc.lowering.plans.single_ops import CollectivePlan, CustomCallPlan, DeviceCallPlan
from aotc.lowering.regions.common.library_call import LibraryCall, loops_over
from aotc.lowering.threshold import Estimate
from aotc.vmfb.ranks.gpu_reductions import gpu_reduction
from aotc.vmfb.ranks.layout import RANK_CALL

PREFIX = "custom_"


@dataclass(frozen=True)
class CustomCall:
    """One custom call of a model: the interface of its function.

    ``operands`` and ``results`` are pairs of dtype and rank. Two calls that differ only in sizes share one function.
    """

    name: str
    attributes: Mapping[str, Any]
    operands: tuple[tuple[str, int], ...]
    results: tuple[tuple[str, int], ...]
    loc: Loc = field(compare=False)

    @property
    def symbol(self) -> str:
        """Return the symbol of the function in the kernel library."""
        facts = repr((self.name, sorted(self.attributes.items()), self.operands, self.results))
        plain = re.sub(r"\W", "_", self.name)
        return f"{PREFIX}{plain}_{hashlib.sha256(facts.encode()).hexdigest()[:12]}"

    def manifest_entry(self) -> dict[str, Any]:
        """Return the custom call's entry for the bundle manifest."""
        rows = {"operands": self.operands, "results": self.results}
        plain = {key: [list(pair) for pair in pairs] for key, pairs in rows.items()}
        return {"symbol": self.symbol, "name": self.name, "attributes": dict(self.attributes), "answers": True, **plain}


def custom_call_of(function: Function) -> CustomCall | None:
    """Return the custom call that an outlined region consists of, or None."""
    op = next((op for op in function.body.ops if op.name == "custom_call"), None)
    return None if op is None else describe_custom_call(op)


def describe_custom_call(op: Op) -> CustomCall:
    """Return the :class:`CustomCall` of an op; a non-dictionary configuration becomes its only attribute."""
    config = op.attrs["config"]
    attributes = config if isinstance(config, Mapping) else {"backend_config": config} if config else {}
    operands, results = (tuple((v.type.dtype, v.type.rank) for v in vs) for vs in (op.operands, op.results))
    return CustomCall(op.attrs["target"], attributes, operands, results, op.loc)


CALL_WORK = Estimate(16, "scalar operations counted per array element of a custom call")


def lower_custom_call(b: RegionBuilder, plan: CustomCallPlan) -> Kernel:
    """Lower a custom call: pass all operands, results and their sizes; aliased results start as copies.

    A word after the sizes counts attempts. The call is repeated until the function stores -1 there: a function in
    Python may end by an exception before its first instruction (from a signal handler, say), which is not reported.
    """
    op = b.region_root_op("custom_call")
    described = describe_custom_call(op)
    call = LibraryCall(b)
    buffers = [*(b.buffers[v] for v in op.operands), *b.outputs]
    for result, operand in op.attrs.get("aliases", ()):
        _prefill_aliased_result(b, call, b.outputs[result], buffers[operand])
    for buffer in buffers:
        call.args.append((buffer, (0,) * len(buffer.shape)))
    dims = [d for buffer in buffers for d in buffer.shape]
    sizes = call.allocate_workspace("i64", (len(dims) + 1,))
    call.before += [Store(sizes, (n,), IndexScalar(d)) for n, d in enumerate(dims)]
    call.args.append((sizes, (0,)))
    attempt = Load(sizes, (len(dims),))
    count = Store(sizes, (len(dims),), Apply("add", (attempt, Const(1, "i64")), "i64"))
    waits = Apply("ge", (attempt, Const(0, "i64")), "i1")
    first = Store(sizes, (len(dims),), Const(0, "i64"))
    statements = [*call.before, first, While((), waits, (count, call.external_call(described.symbol)))]
    return b.grid(1, statements, _custom_call_work(buffers))


def _prefill_aliased_result(b: RegionBuilder, call: LibraryCall, result: Buffer, operand: Buffer) -> None:
    """Append the copy of ``operand`` to the result that aliases it, before the call."""
    call.before += loops_over(b, result.shape, lambda at: Store(result, at, Load(operand, at)))


def lower_device_call(b: RegionBuilder, plan: DeviceCallPlan) -> Kernel:
    """Lower a custom call to the user's GPU function, called per element, per row or once for whole arrays.

    The kernel has one statement for the call; :mod:`aotc.kernels.cuda.users_function` writes the code around it.
    """
    op = b.region_root_op("custom_call")
    per, *launch = op.attrs["gpu"]
    if per == REFUSED_ON_GPUS:
        raise CompileError.at(op.loc, launch[0], hint=launch[1])
    function = f"{DEVICE_CALL}{per}_{describe_custom_call(op).symbol}"
    buffers = [*(b.buffers[v] for v in op.operands), *b.outputs]
    if launch:
        threads, blocks = launch
        call = ExternalCall(function, tuple((buffer, (0,) * len(buffer.shape)) for buffer in buffers))
        loop = For(b.fresh("t"), 0, threads, (call,), "thread")
        return b.kernel(blocks, (For("p", 0, blocks, (loop,), "parallel"),), _custom_call_work(buffers))
    shape = b.outputs[0].shape if per == "element" else b.outputs[0].shape[:-1]
    items = product(shape)
    at = delinearize(grid_item(items), shape)
    first = at if per == "element" else (*at, 0)
    places = [(x, first if len(x.shape) == len(first) else (0,) * len(x.shape)) for x in buffers]
    statements: list[Stmt] = []
    for result, operand in op.attrs.get("aliases", ()):
        statements += _prefill_aliased_row(b, b.outputs[result], buffers[operand], at)
    return b.grid(items, [*statements, ExternalCall(function, tuple(places))], _custom_call_work(buffers))


def lower_collective(b: RegionBuilder, plan: CollectivePlan) -> Kernel:
    """Return a kernel without code: the runtime runs its only call as a collective on the arrays."""
    op = b.region_root_op("custom_call")
    reduction = op.attrs["config"].get("reduction", "")
    for operand in op.operands[:-1]:
        if reduction and gpu_reduction(reduction, operand.type.dtype) is None:
            name, dtype = op.attrs["target"].removeprefix(RANK_CALL), operand.type.dtype
            hint = "convert to f32 or i32 before, or a CPU target"
            raise CompileError.at(op.loc, f"{name} of {dtype} by {reduction}: NCCL does not reduce so", hint=hint)
    buffers = [*(b.buffers[v] for v in op.operands), *b.outputs]
    call = ExternalCall(
        COLLECTIVE_CALL + describe_custom_call(op).symbol, tuple((x, (0,) * len(x.shape)) for x in buffers)
    )
    return b.kernel(1, (call,), sum((product(x.shape) for x in b.outputs), 0))


def _custom_call_work(buffers: Sequence[Buffer]) -> Dim:
    return sum((product(buffer.shape) for buffer in buffers), 0) * CALL_WORK.value


def _prefill_aliased_row(b: RegionBuilder, result: Buffer, operand: Buffer, at: tuple[Dim, ...]) -> list[Stmt]:
    rest = result.shape[len(at) :]
    return loops_over(b, rest, lambda inner: Store(result, (*at, *inner), Load(operand, (*at, *inner))))
