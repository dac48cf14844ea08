"""Import of what processes and devices do together: collectives, asynchronous pairs, Shardy's regions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from aotc.frontend.mlir_types import config_of, entries
from aotc.frontend.session import Importer, State
from aotc.ir.opset.collective import group_size
from aotc.ir.tensor_ir import TensorType


def _rows(state: State, attribute: Any) -> tuple[tuple[int, ...], ...]:
    if not isinstance(attribute, ir.DenseElementsAttr):
        state.fail(f"groups {attribute} are not numbers of processes", hint="write them as dense<[[0, 1]]>")
    return tuple(tuple(int(i) for i in row) for row in np.array(attribute).reshape(attribute.type.shape))


def _channel(op: Any) -> int:
    """Return the number in ``#stablehlo.channel_handle<handle = 1, type = 1>``; 0 where there is none."""
    handle = op.attributes.get("channel_handle")
    return 0 if handle is None else int(str(handle).split("handle = ")[1].split(",")[0].rstrip(">"))


def _devices(op: Any) -> tuple[int, int]:
    """Return for how many replicas and partitions the module says it is written."""
    while op.parent is not None:
        op = op.parent.operation
    held = (op.attributes.get(f"mhlo.num_{name}") for name in ("replicas", "partitions"))
    replicas, partitions = (1 if a is None else a.value for a in held)
    return replicas, partitions


def _groups(state: State, op: Any, attribute: Any) -> tuple[tuple[int, ...], ...]:
    """Return who exchanges with whom; no group at all is everybody whom the module knows."""
    groups = _rows(state, attribute)
    replicas, partitions = _devices(op)
    everybody = replicas * partitions if "use_global_device_ids" in op.attributes else replicas
    return groups or (tuple(range(everybody)),)


def _attrs(state: State, op: Any, names: Mapping[str, str]) -> dict[str, Any]:
    attrs: dict[str, Any] = {ours: op.attributes[theirs].value for theirs, ours in names.items()}
    attrs |= {"channel": _channel(op), "global_ids": "use_global_device_ids" in op.attributes}
    return attrs | {"groups": _groups(state, op, op.attributes["replica_groups"])}


def _collective(name: str, names: Mapping[str, str]) -> Importer:
    def run(state: State, op: Any) -> None:
        regions = [state.scalar_region(r.blocks[0]) for r in op.regions]
        operands = state.promoted(state.operands(op), [state.dtype(r.type) for r in op.results])
        state.bind(op, state.emit(name, operands, _attrs(state, op, names), (), regions))

    return run


def _reduce_to_root(state: State, op: Any) -> None:
    """Import what reduces to one process of each group: alone it is the root, and the result is its operand."""
    attrs = _attrs(state, op, {})
    if group_size(attrs["groups"]) > 1:
        state.fail(
            f"collective_reduce exchanges between {group_size(attrs['groups'])} processes, "
            "and the program is compiled for one",
            hint="export the function for one device; distributed programs are not supported yet",
        )
    regions = [state.scalar_region(r.blocks[0]) for r in op.regions]
    operands = state.operands(op)[: len(op.results)]  # what may follow are the roots
    operands = state.promoted(operands, [state.dtype(r.type) for r in op.results])
    state.bind(op, state.emit("all_reduce", operands, attrs, (), regions))


def _permute(state: State, op: Any) -> None:
    attrs = {"pairs": _rows(state, op.attributes["source_target_pairs"]), "channel": _channel(op)}
    state.bind(op, state.emit("collective_permute", state.operands(op), attrs))


def _identifier(name: str) -> Importer:
    def run(state: State, op: Any) -> None:
        replicas, partitions = _devices(op)
        count = replicas if name == "replica_id" else partitions
        if count > 1:
            state.fail(
                f"{name} asks which of {count} processes this is, and the program is compiled for one",
                hint="export the function for one device",
            )
        state.bind(op, state.emit(name, (), {}, [TensorType("u32")]))

    return run


def _ragged_all_to_all(state: State, op: Any) -> None:
    """A custom call with the groups in its configuration."""
    config = entries(config_of(op))
    groups = _groups(state, op, config["replica_groups"]) if "replica_groups" in config else ()
    channel = config["channel_id"].value if "channel_id" in config else 0
    attrs = {"groups": groups, "channel": channel, "global_ids": True}
    state.bind(op, state.emit("ragged_all_to_all", state.operands(op), attrs))


def _inlined(state: State, op: Any) -> None:
    block = op.regions[0].blocks[0]
    state.bind_values(block.arguments, state.operands(op))
    state.bind(op, state.session.import_block(state, block))


def _hand_on(state: State, op: Any) -> None:
    state.bind(op, state.operands(op))


def _manual_computation(state: State, op: Any) -> None:
    """On one device a shard is the whole: the body is part of the program."""
    block = op.regions[0].blocks[0]
    for outer, inner in zip(op.operands, block.arguments, strict=True):
        if outer.type != inner.type:
            state.fail(
                f"sdy.manual_computation takes shards {inner.type} of {outer.type}: it needs several devices",
                hint="export the function for one device",
            )
    _inlined(state, op)


# what Shardy says about where a tensor lies; the tensor as a whole stays as it is
_PLACEMENTS = (
    "sdy.all_gather", "sdy.all_reduce", "sdy.all_slice", "sdy.all_to_all", "sdy.collective_permute",
    "sdy.data_flow_edge", "sdy.func_data_flow_edge", "sdy.propagation_barrier", "sdy.reduce_scatter",
    "sdy.replicated_to_unreduced", "sdy.reshard", "sdy.sharded_to_unreduced", "sdy.sharding_constraint",
)  # fmt: skip

COLLECTIVE: dict[str, Importer] = {
    "stablehlo.all_gather": _collective("all_gather", {"all_gather_dim": "dim"}),
    "stablehlo.all_reduce": _collective("all_reduce", {}),
    "stablehlo.reduce_scatter": _collective("reduce_scatter", {"scatter_dimension": "dim"}),
    "stablehlo.all_to_all": _collective(
        "all_to_all", {"split_dimension": "split_dim", "concat_dimension": "concat_dim", "split_count": "split_count"}
    ),
    "stablehlo.collective_reduce": _reduce_to_root,
    "stablehlo.collective_broadcast": _collective("collective_broadcast", {}),
    "stablehlo.collective_permute": _permute,
    "stablehlo.partition_id": _identifier("partition_id"),
    "stablehlo.replica_id": _identifier("replica_id"),
    "stablehlo.async_start": _inlined,  # the work is done where it starts; the future is its results
    "stablehlo.async_done": _hand_on,
    **dict.fromkeys(_PLACEMENTS, _hand_on),
    "sdy.sharding_group": lambda state, op: None,
    "sdy.named_computation": _inlined,
    "sdy.manual_computation": _manual_computation,
}
COLLECTIVE_CALLS: dict[str, Importer] = {"ragged_all_to_all": _ragged_all_to_all}
