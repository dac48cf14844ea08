"""Import of communication between processes and devices: collectives, asynchronous pairs, Shardy's regions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from jaxlib.mlir import ir

from aotc.diagnostics import Loc
from aotc.frontend.mlir_types import array_numbers, config_of, dictionary_entries, discardable_integer
from aotc.frontend.session import Importer, ImportState
from aotc.ir.opset.collective import group_size
from aotc.ir.tensor.ir import TensorType

Groups: TypeAlias = tuple[tuple[int, ...], ...]

_ONE_DEVICE = "export the function for one device, or with shardings over a mesh of several"


def _exchange_importer(name: str, count: int) -> str:
    return f"{name} exchanges between {count} processes, and the program is compiled for one"


def _group_rows(state: ImportState, attribute: Any) -> Groups:
    if not isinstance(attribute, ir.DenseElementsAttr):
        state.fail(f"groups {attribute} are not numbers of processes", hint="write them as dense<[[0, 1]]>")
    return tuple(tuple(int(i) for i in row) for row in array_numbers(attribute))


_MOST_REPLICAS = 1 << 16  # their numbers are listed: a damaged count must not fill the memory


def _channel_number(op: Any) -> int:
    """Return the number in ``#stablehlo.channel_handle<handle = 1, type = 1>``; 0 if it is missing."""
    handle = op.attributes.get("channel_handle")
    return 0 if handle is None else int(str(handle).split("handle = ")[1].split(",")[0].rstrip(">"))


def _replica_count(op: Any) -> int:
    """Return the module's number of replicas; modules with several partitions are rejected before the import."""
    while op.parent is not None:
        op = op.parent.operation
    return discardable_integer(op.attributes, "mhlo.num_replicas", 1, Loc())


def _process_groups(state: ImportState, op: Any, rows: Groups) -> Groups:
    """Return the groups of processes that exchange data; if ``rows`` is empty, all replicas or ranks form one group."""
    if not all(rows):
        state.fail("replica_groups has a group without processes", hint="dense<[[0]]> is a group of one process")
    if rows:
        return rows
    if state.session.ranks:
        return (tuple(range(state.session.ranks)),)
    if (replicas := _replica_count(op)) > _MOST_REPLICAS:
        state.fail(f"mhlo.num_replicas is {replicas}, expected at most {_MOST_REPLICAS}", hint="replica_groups")
    return (tuple(range(replicas)),)


def _collective_attributes(state: ImportState, op: Any, names: Mapping[str, str]) -> dict[str, Any]:
    attrs: dict[str, Any] = {ours: op.attributes[theirs].value for theirs, ours in names.items()}
    attrs |= {"channel": _channel_number(op), "global_ids": "use_global_device_ids" in op.attributes}
    return attrs | {"groups": _process_groups(state, op, _group_rows(state, op.attributes["replica_groups"]))}


def _collective_importer(name: str, names: Mapping[str, str]) -> Importer:
    """Return the importer of the collective ``name``; ``names`` maps its attributes to StableHLO's."""

    def run(state: ImportState, op: Any) -> None:
        regions = [state.scalar_region(r.blocks[0]) for r in op.regions]
        operands = state.promoted(state.operands(op), [state.dtype(r.type) for r in op.results])
        state.bind(op, state.emit(name, operands, _collective_attributes(state, op, names), (), regions))

    return run


def _import_reduce_to_root(state: ImportState, op: Any) -> None:
    """Import a reduction to the root of each group as its operand, as a single process is its own root."""
    attrs = _collective_attributes(state, op, {})
    if group_size(attrs["groups"]) > 1:  # of a rank's program, too: XLA's partitioner makes none
        state.fail(_exchange_importer("collective_reduce", group_size(attrs["groups"])), hint=_ONE_DEVICE)
    regions = [state.scalar_region(r.blocks[0]) for r in op.regions]
    operands = state.operands(op)[: len(op.results)]  # any further operands are the roots
    operands = state.promoted(operands, [state.dtype(r.type) for r in op.results])
    state.bind(op, state.emit("all_reduce", operands, attrs, (), regions))


def _import_broadcast(state: ImportState, op: Any) -> None:
    """Import a broadcast; reject one without groups: XLA and the specification of StableHLO differ there."""
    if not _group_rows(state, op.attributes["replica_groups"]):
        state.fail("collective_broadcast has no replica_groups", hint="name the processes: dense<[[0]]> is one alone")
    _collective_importer("collective_broadcast", {})(state, op)


def _import_permute(state: ImportState, op: Any) -> None:
    """Import ``collective_permute``: pairs of a sending and a receiving process."""
    count = 1 if _channel_number(op) or state.session.ranks else _replica_count(op)  # with a channel: ids of partitions
    if count > 1:
        state.fail(_exchange_importer("collective_permute", count), hint=_ONE_DEVICE)
    attrs = {"pairs": _group_rows(state, op.attributes["source_target_pairs"]), "channel": _channel_number(op)}
    state.bind(op, state.emit("collective_permute", state.operands(op), attrs))


def _import_partition_id(state: ImportState, op: Any) -> None:
    state.bind(op, state.emit("partition_id", (), {}, [TensorType("u32")]))


def _import_replica_id(state: ImportState, op: Any) -> None:
    """Import the number of this process, which a single process knows at compile time."""
    if (count := _replica_count(op)) > 1:
        state.fail(
            f"replica_id asks which of {count} processes this is, and the program is compiled for one",
            hint="export the function for one device",
        )
    state.bind(op, state.emit("replica_id", (), {}, [TensorType("u32")]))


def _import_ragged_all_to_all(state: ImportState, op: Any) -> None:
    """Import ``ragged_all_to_all``, a custom call with the process groups in its configuration."""
    config = dictionary_entries(config_of(op))
    rows = _group_rows(state, config["replica_groups"]) if "replica_groups" in config else ()
    channel = config["channel_id"].value if "channel_id" in config else 0
    attrs = {"groups": _process_groups(state, op, rows), "channel": channel, "global_ids": True}
    state.bind(op, state.emit("ragged_all_to_all", state.operands(op), attrs))


def _import_inlined_body(state: ImportState, op: Any) -> None:
    block = op.regions[0].blocks[0]
    state.bind_values(block.arguments, state.operands(op))
    state.bind(op, state.session.import_block(state, block))


def _import_as_operands(state: ImportState, op: Any) -> None:
    state.bind(op, state.operands(op))


def _import_manual_computation(state: ImportState, op: Any) -> None:
    """Import Shardy's manual computation by inlining its body: on one device a shard is the whole array."""
    block = op.regions[0].blocks[0]
    for outer, inner in zip(op.operands, block.arguments, strict=True):
        if outer.type != inner.type:
            state.fail(
                f"sdy.manual_computation takes shards {inner.type} of {outer.type}: it needs several devices",
                hint="export the function for one device",
            )
    _import_inlined_body(state, op)


# Shardy's annotations of a tensor's placement; the whole tensor is unchanged.
_PLACEMENTS = (
    "sdy.all_gather", "sdy.all_reduce", "sdy.all_slice", "sdy.all_to_all", "sdy.collective_permute",
    "sdy.data_flow_edge", "sdy.func_data_flow_edge", "sdy.propagation_barrier", "sdy.reduce_scatter",
    "sdy.replicated_to_unreduced", "sdy.reshard", "sdy.sharded_to_unreduced", "sdy.sharding_constraint",
)  # fmt: skip

COLLECTIVE: dict[str, Importer] = {
    "stablehlo.all_gather": _collective_importer("all_gather", {"all_gather_dim": "dim"}),
    "stablehlo.all_reduce": _collective_importer("all_reduce", {}),
    "stablehlo.reduce_scatter": _collective_importer("reduce_scatter", {"scatter_dimension": "dim"}),
    "stablehlo.all_to_all": _collective_importer(
        "all_to_all", {"split_dimension": "split_dim", "concat_dimension": "concat_dim", "split_count": "split_count"}
    ),
    "stablehlo.collective_reduce": _import_reduce_to_root,
    "stablehlo.collective_broadcast": _import_broadcast,
    "stablehlo.collective_permute": _import_permute,
    "stablehlo.partition_id": _import_partition_id,
    "stablehlo.replica_id": _import_replica_id,
    "stablehlo.async_start": _import_inlined_body,  # the work is done where it starts; the future is its results
    "stablehlo.async_done": _import_as_operands,
    **dict.fromkeys(_PLACEMENTS, _import_as_operands),
    "sdy.sharding_group": lambda state, op: None,
    "sdy.named_computation": _import_inlined_body,
    "sdy.manual_computation": _import_manual_computation,
}
COLLECTIVE_CALLS: dict[str, Importer] = {"ragged_all_to_all": _import_ragged_all_to_all}
