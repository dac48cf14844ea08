"""Custom calls of JAX, XLA and MHLO that equal other ops: top-k, windows of dynamic size, buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from aotc.frontend.affinity import check_declared, device_of_attribute, placement_annotation
from aotc.frontend.importers.random import bind_random_bits
from aotc.frontend.mlir_types import DYNAMIC, config_of, dictionary_entries, leaf_types
from aotc.frontend.session import Importer, ImportState
from aotc.ir.dims.algebra import Dim
from aotc.ir.tensor.ir import Op, Region, TensorType, Value
from aotc.vmfb.dtypes import kind_of, to_numpy


def _custom_call_attribute(op: Any, name: str) -> Any:
    """Return ``name`` from the FFI configuration or MHLO attributes of a custom call; None if it is missing."""
    entries = dictionary_entries(op.attributes.get("mhlo.attributes")) | dictionary_entries(config_of(op))
    return entries[name].value if name in entries else None


def _called_computation(state: ImportState, op: Any) -> Region:
    """Import the scalar function that a custom call refers to, as a region."""
    name = op.attributes["called_computations"][0].value
    if name not in state.session.symbols:
        state.fail(f"the call names computation @{name}, which the module does not define", "add the function")
    return state.scalar_region(state.session.symbols[name].regions[0].blocks[0])


def _first_elements(state: ImportState, values: Sequence[Value], dim: int, count: Dim) -> list[Value]:
    """Return the first ``count`` elements of each value along ``dim``."""
    slices = []
    for v in values:
        shape = v.type.shape
        limit = tuple(count if d == dim else n for d, n in enumerate(shape))
        attrs = {"start": (0,) * len(shape), "limit": limit, "stride": (1,) * len(shape)}
        slices.append(v if limit == shape else state.one("slice", [v], attrs))
    return slices


def _import_approximate_top_k(state: ImportState, op: Any) -> None:
    """Import approximate top-k as exact top-k, like XLA on other platforms than TPU: sort and cut."""
    operands = state.data_operands(op)
    if "indices_of_shape_operands" not in op.attributes and op.attributes["call_target_name"].value != "ApproxTopK":
        operands = operands[:-1]  # the last one is k
    values = operands[: len(operands) // 2]
    dim = _custom_call_attribute(op, "reduction_dim") % values[0].type.rank
    size = state.session.parts(op.results[0].type)[1][dim]
    top: Dim = size
    if size == DYNAMIC:
        top = _custom_call_attribute(op, "top_k") or state.dims_of(state.operands(op)[-1], "k of approx_top_k")[0]
    ordered = state.emit("sort", values, {"dim": dim, "stable": True}, (), [_called_computation(state, op)])
    state.bind(op, _first_elements(state, ordered, dim, top))


def _import_top_k(state: ImportState, op: Any) -> None:
    """Import a ``TopK`` or ``mhlo.topk`` call, whose results may be a tuple.

    A comparator of the call defines the order. Without one, the smallest elements come first if ``largest`` is false.
    """
    operands = state.data_operands(op)
    if len(operands) != 1:
        target = op.attributes["call_target_name"].value
        state.fail(f"custom call @{target} has {len(operands)} operands, expected 1", "call it with one array")
    largest, count = _custom_call_attribute(op, "largest") is not False, _custom_call_attribute(op, "k")
    order = _pair_order(state, op) if len(op.attributes.get("called_computations", ())) else None
    _bind_top_k(state, op, operands[0], count, largest, order)


def _bind_top_k(state: ImportState, op: Any, x: Value, k: int | None, largest: bool, order: Region | None) -> None:
    """Bind results of ``op``: the first ``k`` elements of ``x`` along the last dim and their i32 indices.

    ``order`` is the comparator, if there is one. If ``k`` is None, the result type determines it.
    """
    last = x.type.rank - 1
    if last < 0:
        state.fail(f"{op.name} on {x.type}: the operand has no dimensions", "give it a rank of at least 1")
    count: Dim = state.session.parts(leaf_types(op.results[0].type)[0])[1][last] if k is None else k
    if count == DYNAMIC:
        state.fail(f"{op.name} does not state k", "state k as an attribute or in the type of the results")
    if largest and order is None:
        state.bind(op, state.emit("top_k", [x], {"k": count}))
        return
    if order is None:
        order = _scalar_comparator(state, x, "lt_total" if kind_of(x.type.dtype) == "f" else "lt")
    state.require("le", count, x.type.shape[last], "top-k of {0} elements of a dimension of {1}")
    indices = state.one("iota", (), {"dim": last}, [TensorType("i32", x.type.shape)])
    ordered = state.emit("sort", [x, indices], {"dim": last, "stable": True}, (), [order])
    state.bind(op, _first_elements(state, ordered, last, count))


def _pair_order(state: ImportState, op: Any) -> Region:
    """Import a top-k call's comparator with parameters for two values and two indices; XLA's may lack the indices."""
    region = _called_computation(state, op)
    missing = [TensorType("i32")] * (4 - len(region.params))
    return replace(region, params=(*region.params, *(state.new_value(t) for t in missing)))


def _scalar_comparator(state: ImportState, x: Value, compare: str) -> Region:
    params = [state.new_value(TensorType(t)) for t in (x.type.dtype, x.type.dtype, "i32", "i32")]
    test = state.new_value(TensorType("i1"))
    return Region(tuple(params), (Op(compare, (params[0], params[1]), (test,), {}, (), state.loc),), (test,))


def _import_dynamic_reduce_window(state: ImportState, op: Any) -> None:
    """Import ``reduce_window`` with window, strides, dilations and padding as operands."""
    *operands, _, _, _, _, _ = values = state.operands(op)
    window, strides, base, dilations, flat = (
        state.dims_of(v, "the window of dynamic_reduce_window") for v in values[-5:]
    )
    attrs = {
        "window": window, "strides": strides, "base_dilations": base, "window_dilations": dilations,
        "padding": tuple(zip(flat[::2], flat[1::2])),
    }  # fmt: skip
    state.bind(op, state.emit("reduce_window", operands, attrs, (), [_called_computation(state, op)]))


def _import_dynamic_rng_bit_generator(state: ImportState, op: Any) -> None:
    old_state, size = state.operands(op)
    dims = state.dims_of(size, "the shape of rng_bit_generator")
    bind_random_bits(state, op, old_state, state.type_with(op.results[1].type, dims))


def _import_buffer(state: ImportState, op: Any) -> None:
    """Import an uninitialized buffer as zeros."""
    types = [state.static_type(r.type) for r in op.results]
    state.bind(op, [state.constant(np.zeros((), to_numpy(t.dtype)), t) for t in types])


def _import_as_operands(state: ImportState, op: Any) -> None:
    """Import a call that only orders or annotates values: bind its results to its operands."""
    operands = state.operands(op)[: len(op.results)]
    for v, result in zip(operands, op.results, strict=True):
        whole = state.session.parts(result.type)[1]
        if any(n not in (DYNAMIC, d) for n, d in zip(whole, v.type.shape)):
            target = op.attributes["call_target_name"].value
            message = f"custom call @{target} takes shards: {v.type} of {result.type}: it needs several devices"
            state.fail(message, "export the function for one device")
    device = placement_annotation(op, state.session.devices)
    state.bind(op, [state.one("transfer", [v], {"device": device}) for v in operands] if device else operands)


FUNCTIONS = (
    "mhlo.acos", "mhlo.acosh", "mhlo.asin", "mhlo.asinh", "mhlo.atanh", "mhlo.cosh", "mhlo.sinh", "mhlo.tan",
    "mhlo.erf", "mhlo.erfc", "mhlo.erf_inv", "mhlo.lgamma", "mhlo.digamma",
)  # fmt: skip
"""Custom calls that are StableHLO's names of CHLO functions; they are converted before the import."""


def _import_unconverted_function(state: ImportState, op: Any) -> None:
    """Bind the result of a call without an importer to its operand; the check of its types rejects the call."""
    operands = state.data_operands(op)
    if len(operands) != 1:
        target = op.attributes["call_target_name"].value
        state.fail(f"custom call @{target} has {len(operands)} operands, expected 1", "call it with one array")
    state.bind(op, operands)  # stated results are compared with it


_ANNOTATIONS = (
    "Sharding", "annotate_device_placement", "LayoutConstraint", "SPMDFullToShardShape", "SPMDShardToFullShape", "Pin",
    "Unpin", "dce_sink", "control_dep", "MoveToHost", "MoveToDevice", "tt.mark_argument", "tt.sharding_constraint",
    "xla.sdy.FuncResultSharding", "xla.sdy.GlobalToLocalShape", "xla.sdy.LocalToGlobalShape", "xla.sdy.ShardingGroup",
    "xla.sdy.PropagationBarrier",
)


def _import_transfer(state: ImportState, op: Any) -> None:
    """Move a value to the device of ``aotc.to``."""
    to = op.attributes.get("aotc.to")
    device = device_of_attribute(to)
    if not device:
        shown = "nothing" if to is None else str(to)
        state.fail(f"custom call @aotc.transfer says {shown} for aotc.to", 'write {aotc.to = "d1"}')
    check_declared(state, device, "aotc.to", ops=True)
    operands = state.operands(op)
    if len(operands) != 1:
        state.fail(f"custom call @aotc.transfer moves {len(operands)} values", "one call for each")
    state.bind(op, [state.one("transfer", operands, {"device": device})])


KNOWN_CALLS: dict[str, Importer] = {
    "aotc.transfer": _import_transfer,
    **dict.fromkeys(_ANNOTATIONS, _import_as_operands),
    **dict.fromkeys(("AllocateBuffer", "CreateBuffer"), _import_buffer),
    **dict.fromkeys(("ApproxTopK", "stablehlo.dynamic_approx_top_k"), _import_approximate_top_k),
    **dict.fromkeys(("TopK", "mhlo.topk"), _import_top_k),
    "mhlo.copy": _import_as_operands,
    **dict.fromkeys(FUNCTIONS, _import_unconverted_function),
    "stablehlo.dynamic_reduce_window": _import_dynamic_reduce_window,
    "stablehlo.dynamic_rng_bit_generator": _import_dynamic_rng_bit_generator,
}
