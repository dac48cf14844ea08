"""Collectives: exchange of tensors between processes. The reference defines the meaning for a single process.

``groups`` lists the ids of the processes that exchange data with each other; ``channel`` and ``global_ids`` define how
processes are numbered, as in StableHLO. The type rules are valid for any number of processes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from aotc.ir.dims.algebra import Dim, mod
from aotc.ir.opset.spec import (
    Arrays,
    Attrs,
    Constraint,
    OpSpec,
    Types,
    equal_shapes,
    equal_sizes,
    op_spec_table,
    require_rule,
)
from aotc.ir.tensor.ir import TensorType

GROUPED = ("groups", "channel", "global_ids")
SAME_ON_ALL = frozenset({"all_reduce", "all_gather", "collective_broadcast"})
"""Collectives whose result is the same on each rank of a group."""

COMBINED = frozenset({"all_reduce", "all_gather", "reduce_scatter"})
"""Collectives of which several small ones may be one call."""

REDUCTIONS = ("add", "mul", "max", "min", "and", "or")
"""Ops by which the ranks of a mesh can reduce."""


def group_size(groups: tuple[tuple[int, ...], ...]) -> int:
    """Return the number of processes in a group; 1 without groups."""
    return max((sum(i >= 0 for i in g) for g in groups), default=1)


def _infer_same_type(types: Types, attrs: Attrs, regions: tuple, given: Types) -> Types:
    return types


def _infer_all_gather(types: Types, attrs: Attrs, regions: tuple, given: Types) -> Types:
    return tuple(_scaled_dim_type(t, attrs["dim"], group_size(attrs["groups"])) for t in types)


def _infer_reduce_scatter(types: Types, attrs: Attrs, regions: tuple, given: Types) -> Types:
    return tuple(_divided_dim_type(t, attrs["dim"], group_size(attrs["groups"])) for t in types)


def _infer_all_to_all(types: Types, attrs: Attrs, regions: tuple, given: Types) -> Types:
    count = attrs["split_count"]
    require_rule(
        count == group_size(attrs["groups"]), f"all_to_all: {count} parts for {group_size(attrs['groups'])} processes"
    )
    return tuple(
        _scaled_dim_type(_divided_dim_type(t, attrs["split_dim"], count), attrs["concat_dim"], count) for t in types
    )


def _scaled_dim_type(t: TensorType, dim: int, factor: int) -> TensorType:
    require_rule(0 <= dim < t.rank, f"a collective along dim {dim} of {t}")
    return TensorType(t.dtype, tuple(n * factor if d == dim else n for d, n in enumerate(t.shape)))


def _divided_dim_type(t: TensorType, dim: int, parts: int) -> TensorType:
    require_rule(0 <= dim < t.rank, f"a collective along dim {dim} of {t}")
    size: Dim = t.shape[dim]
    require_rule(not isinstance(size, int) or size % parts == 0, f"dim {dim} of {t} does not divide into {parts}")
    return TensorType(t.dtype, tuple(n // parts if d == dim else n for d, n in enumerate(t.shape)))


def _require_divisible_dim(types: Types, dim: int, parts: int) -> Iterator[Constraint]:
    for t in types:
        yield Constraint("eq", mod(t.shape[dim], parts), 0, f"a remainder of {{0}} in {parts} parts")


def _scatter_sizes_constraints(types: Types, attrs: Attrs, given: Types) -> Iterator[Constraint]:
    yield from _require_divisible_dim(types, attrs["dim"], group_size(attrs["groups"]))


def _exchange_sizes_constraints(types: Types, attrs: Attrs, given: Types) -> Iterator[Constraint]:
    yield from _require_divisible_dim(types, attrs["split_dim"], attrs["split_count"])


def _ragged_sizes_constraints(types: Types, attrs: Attrs, given: Types) -> Iterator[Constraint]:
    for d in range(1, types[0].rank):
        yield from equal_sizes(types, (0, d), (1, d))
    yield from equal_shapes(types, operands=range(2, len(types)))


def _infer_process_id(types: Types, attrs: Attrs, regions: tuple, given: Types) -> Types:
    return (TensorType("u32"),)


def _infer_ragged_all_to_all(types: Types, attrs: Attrs, regions: tuple, given: Types) -> Types:
    require_rule(len(types) == 6, f"ragged_all_to_all: takes 6 operands, not {len(types)}")
    x, out, *places = types
    require_rule(
        x.dtype == out.dtype and x.rank == out.rank > 0 and x.shape[1:] == out.shape[1:],
        f"ragged_all_to_all: rows of {x} do not fit into {out}",
    )
    for t in places:
        require_rule(
            t.rank == 1 and t == places[0], f"ragged_all_to_all: offsets and sizes must be vectors alike, found {t}"
        )
        require_rule(isinstance(t.shape[0], int), f"ragged_all_to_all: the number of exchanges in {t} is not known")
    return (out,)


def multiprocess_reason(attrs: Attrs) -> str:
    """Return the reason why a collective with these attributes needs several processes; "" if one process can run it.

    The single process has id 0. A collective in a group that contains only process 0 returns its operand,
    whatever other groups exist. A pair of ``collective_permute`` with another id needs another process.
    """
    if last := max((i for pair in attrs.get("pairs", ()) for i in pair), default=0):
        return f"exchanges between {last + 1} processes"
    groups = attrs.get("groups", ())
    if (count := group_size(groups)) > 1:
        return f"exchanges between {count} processes"
    if groups and not any(0 in group for group in groups):
        return "has no group with process 0"
    return ""


def _reference_of_one_process(arrays: Arrays, attrs: Attrs, regions: tuple, types: Types) -> list[np.ndarray]:
    if reason := multiprocess_reason(attrs):
        raise NotImplementedError(f"the reference is one process, and this collective {reason}")
    return list(arrays)


def _reference_permute(arrays: Arrays, attrs: Attrs, regions: tuple, types: Types) -> list[np.ndarray]:
    """Return the operand, or zeros if no pair has process 0 as its target, as StableHLO defines."""
    return [a if attrs["pairs"] else np.zeros_like(a) for a in _reference_of_one_process(arrays, attrs, regions, types)]


def _reference_ragged_all_to_all(arrays: Arrays, attrs: Attrs, regions: tuple, types: Types) -> list[np.ndarray]:
    """Copy, for each exchange, ``sent`` rows of operand 0 from row ``start`` to row ``to`` of a copy of operand 1."""
    x, out, starts, sent, to, _ = _reference_of_one_process(arrays, attrs, regions, types)
    out = out.copy()
    for begin, count, place in zip(starts.tolist(), sent.tolist(), to.tolist()):
        for k in range(count):
            if 0 <= place + k < len(out) and 0 <= begin + k < len(x):
                out[place + k] = x[begin + k]
    return [out]


def _reference_process_id(arrays: Arrays, attrs: Attrs, regions: tuple, types: Types) -> list[np.ndarray]:
    return [np.zeros((), np.uint32)]


COLLECTIVES = op_spec_table(
    OpSpec(
        "all_gather",
        _infer_all_gather,
        _reference_of_one_process,
        ("dim", *GROUPED),
        tolerance=0,
        removed_by="lower_collectives",
    ),
    OpSpec(
        "all_reduce",
        _infer_same_type,
        _reference_of_one_process,
        GROUPED,
        regions=1,
        tolerance=0,
        removed_by="lower_collectives",
    ),
    OpSpec(
        "reduce_scatter",
        _infer_reduce_scatter,
        _reference_of_one_process,
        ("dim", *GROUPED),
        regions=1,
        tolerance=0,
        removed_by="lower_collectives",
        constraints=_scatter_sizes_constraints,
    ),
    OpSpec(
        "all_to_all",
        _infer_all_to_all,
        _reference_of_one_process,
        ("split_dim", "concat_dim", "split_count", *GROUPED),
        tolerance=0,
        removed_by="lower_collectives",
        constraints=_exchange_sizes_constraints,
    ),
    OpSpec(
        "collective_broadcast",
        _infer_same_type,
        _reference_of_one_process,
        GROUPED,
        tolerance=0,
        removed_by="lower_collectives",
    ),
    OpSpec(
        "collective_permute",
        _infer_same_type,
        _reference_permute,
        ("pairs", "channel"),
        tolerance=0,
        removed_by="lower_collectives",
    ),
    OpSpec(
        "ragged_all_to_all",
        _infer_ragged_all_to_all,
        _reference_ragged_all_to_all,
        GROUPED,
        tolerance=0,
        removed_by="lower_collectives",
        constraints=_ragged_sizes_constraints,
    ),
    OpSpec("partition_id", _infer_process_id, _reference_process_id, tolerance=0, removed_by="lower_collectives"),
    OpSpec("replica_id", _infer_process_id, _reference_process_id, tolerance=0, removed_by="lower_collectives"),
)
