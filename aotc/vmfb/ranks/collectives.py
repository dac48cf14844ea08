"""Collectives as StableHLO defines them, along the first dim of arrays, on any link between ranks.

Reductions add in the order of the ranks of the group, so that results have the same bits on every rank, with every
transport, and in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from aotc.vmfb.dtypes import from_numpy, kind_of
from aotc.vmfb.errors import CallError
from aotc.vmfb.ranks.link import Link


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective of a partitioned program.

    Parameters
    ----------
    op : str
        ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``collective_permute`` or
        ``collective_broadcast``.
    serial : int
        Number in the total order of the program's collectives.
    groups : tuple of tuple of int
        The ranks of each group; if empty, all ranks form one group.
    pairs : tuple of pairs of int
        (source, target) ranks of a ``collective_permute``.
    reduction : str
        ``add``, ``mul``, ``max``, ``min``, ``and`` or ``or``.
    place : str
        The line of the user's source, for error messages.
    """

    op: str
    serial: int
    groups: tuple[tuple[int, ...], ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()
    reduction: str = ""
    place: str = ""

    def __str__(self) -> str:
        place = f" at {self.place}" if self.place else ""
        return f"{self.op}{place}, collective {self.serial}"


def run_collective(c: Collective, link: Link, operands: Sequence[np.ndarray], results: Sequence[np.ndarray]) -> None:
    """Run a collective: compute ``results`` from the ``operands`` of all ranks in this rank's group.

    Arrays are C-contiguous, and results share no memory with operands. All ranks of the group must run the collective.

    Raises
    ------
    RankLost
        If a rank whose operand is needed has ended.
    CallError
        If no group contains this rank, or if ranks run different collectives.
    """
    kind, work = _OPS[c.op], _RankCollective(c, link, str(c))
    is_alike = len({x.dtype for x in operands}) == 1 and all(x.size for x in operands)
    if kind.is_packed and len(operands) > 1 and is_alike:
        _run_packed(work, kind, operands, results)
        return
    for operand, result in zip(operands, results, strict=True):
        kind.run(work, operand, result)


def _run_packed(
    work: _RankCollective, kind: _CollectiveKind, operands: Sequence[np.ndarray], results: Sequence[np.ndarray]
) -> None:
    """Run a collective of several operands of one dtype as a single collective of the concatenated operands.

    Each element is reduced in the order of the ranks, so the results equal those of one collective for each operand.
    """
    members = len(work.group()[0])
    rows, result_rows = members if kind.cuts_operand else 1, members if kind.cuts_result else 1
    packed = np.concatenate([operand.reshape(rows, -1) for operand in operands], axis=1)
    result = np.empty((result_rows, sum(x.size for x in results) // result_rows), packed.dtype)
    kind.run(work, packed, result)
    start = 0
    for one in results:
        size = one.size // result_rows
        one.reshape(result_rows, -1)[...] = result[:, start : start + size]
        start += size


@dataclass(frozen=True, slots=True)
class _RankCollective:
    """A collective that this rank runs, with the link to the other ranks and the text for its errors."""

    collective: Collective
    link: Link
    what: str

    def group(self) -> tuple[tuple[int, ...], int]:
        """Return the ranks of this rank's group, and the index of this rank in it."""
        group = _group_of(self.collective, self.link.rank, self.link.size)
        if group is None:
            raise CallError("", f"rank {self.link.rank} is in no group of {self.what}")
        return group, group.index(self.link.rank)

    def exchange(self, sends: Mapping[int, np.ndarray], receives: Mapping[int, np.ndarray]) -> None:
        """Send and receive arrays by rank; return at once if there are none."""
        if sends or receives:
            self.link.exchange(sends, receives, self.what)


def _group_of(c: Collective, rank: int, size: int) -> tuple[int, ...] | None:
    if not c.groups:
        return tuple(range(size))
    return next((group for group in c.groups if rank in group), None)


def needed_ranks(c: Collective, rank: int, size: int) -> tuple[int, ...]:
    """Return the ranks whose operands the result of ``rank`` depends on; there are ``size`` ranks."""
    group = _group_of(c, rank, size) or ()
    match c.op:
        case "collective_permute":
            return tuple(source for source, target in c.pairs if target == rank)
        case "collective_broadcast":
            return group[:1]
    return group


# Bytes of the other ranks' operands up to which each rank gets them all and reduces them itself: one exchange instead
# of two, but more bytes and work. Measured inside a host with two cores, the minimum of 12 to 300 calls: for 2 ranks
# both take the same time at 4 to 16 MiB by TCP and at 1 to 4 MiB by MPI, for 4 ranks at 3 to 12 MiB by TCP.
GATHER_BYTES = 2 << 20

# Bytes of an operand that are reduced at a time; bounds the memory for the parts of other ranks.
PIECE_BYTES = 8 << 20


def _all_reduce(work: _RankCollective, operand: np.ndarray, result: np.ndarray) -> None:
    group, me = work.group()
    data, out = operand.reshape(-1), result.reshape(-1)
    if len(group) == 1 or not data.size:
        out[...] = data
    elif data.nbytes * (len(group) - 1) <= GATHER_BYTES:
        parts = np.empty((len(group), data.size), data.dtype)
        parts[me] = data
        work.exchange(_other_ranks(group, me, lambda k: data), _other_ranks(group, me, lambda k: parts[k]))
        _reduce(list(parts), out, work.collective.reduction)
    else:
        step = max(PIECE_BYTES // data.itemsize, len(group))
        for start in range(0, data.size, step):
            _reduce_by_chunks(work, data[start : start + step], out[start : start + step])


def _reduce_by_chunks(work: _RankCollective, data: np.ndarray, out: np.ndarray) -> None:
    """All-reduce ``data`` into ``out``: each rank of the group reduces one chunk, then all gather the chunks."""
    group, me = work.group()
    bounds = [data.size * k // len(group) for k in range(len(group) + 1)]
    chunks = [slice(a, b) for a, b in pairwise(bounds)]
    parts = np.empty((len(group), bounds[me + 1] - bounds[me]), data.dtype)
    parts[me] = data[chunks[me]]
    work.exchange(_other_ranks(group, me, lambda k: data[chunks[k]]), _other_ranks(group, me, lambda k: parts[k]))
    _reduce(list(parts), out[chunks[me]], work.collective.reduction)
    work.exchange(_other_ranks(group, me, lambda k: out[chunks[me]]), _other_ranks(group, me, lambda k: out[chunks[k]]))


def _reduce_scatter(work: _RankCollective, operand: np.ndarray, result: np.ndarray) -> None:
    group, me = work.group()
    slots = _split_first_dim(operand, len(group))
    parts = [slots[me] if k == me else np.empty(result.shape, result.dtype) for k in range(len(group))]
    if result.size:
        work.exchange(_other_ranks(group, me, lambda k: slots[k]), _other_ranks(group, me, lambda k: parts[k]))
    _reduce([part.reshape(-1) for part in parts], result.reshape(-1), work.collective.reduction)


def _all_gather(work: _RankCollective, operand: np.ndarray, result: np.ndarray) -> None:
    group, me = work.group()
    _exchange_and_concatenate(work, group, me, [operand] * len(group), result)


def _all_to_all(work: _RankCollective, operand: np.ndarray, result: np.ndarray) -> None:
    group, me = work.group()
    _exchange_and_concatenate(work, group, me, _split_first_dim(operand, len(group)), result)


def _exchange_and_concatenate(
    work: _RankCollective, group: tuple[int, ...], me: int, sent: Sequence[np.ndarray], result: np.ndarray
) -> None:
    """Send ``sent[k]`` to rank k of the group, and concatenate the received arrays along the first dim."""
    slots = _split_first_dim(result, len(group))
    slots[me][...] = sent[me]
    if result.size:
        work.exchange(_other_ranks(group, me, lambda k: sent[k]), _other_ranks(group, me, lambda k: slots[k]))


def _collective_permute(work: _RankCollective, operand: np.ndarray, result: np.ndarray) -> None:
    me = work.link.rank
    targets = [target for source, target in work.collective.pairs if source == me]
    source = next((source for source, target in work.collective.pairs if target == me), None)
    if source is None:
        result[...] = np.zeros((), result.dtype)
    elif source == me:
        result[...] = operand
    if operand.size:
        sends = {target: operand for target in targets if target != me}
        work.exchange(sends, {} if source in (None, me) else {source: result})


def _collective_broadcast(work: _RankCollective, operand: np.ndarray, result: np.ndarray) -> None:
    me, group = work.link.rank, _group_of(work.collective, work.link.rank, work.link.size)
    if group is None:
        result[...] = np.zeros((), result.dtype)
    elif group[0] == me:
        result[...] = operand
        if operand.size:
            work.exchange(dict.fromkeys(group[1:], operand), {})
    elif operand.size:
        work.exchange({}, {group[0]: result})


class _CollectiveKind(NamedTuple):
    """Implementation and facts of one kind of collective.

    Attributes
    ----------
    run : callable
        Runs the collective on one operand and one result.
    cuts_operand, cuts_result : bool
        True if the first dim of the array is split into one equal part for each rank of a group.
    is_packed : bool
        True if several operands are concatenated and exchanged as one.
    """

    run: Callable[[_RankCollective, np.ndarray, np.ndarray], None]
    cuts_operand: bool = False
    cuts_result: bool = False
    is_packed: bool = False


_OPS = {
    "all_reduce": _CollectiveKind(_all_reduce, is_packed=True),
    "all_gather": _CollectiveKind(_all_gather, cuts_result=True, is_packed=True),
    "reduce_scatter": _CollectiveKind(_reduce_scatter, cuts_operand=True, is_packed=True),
    "all_to_all": _CollectiveKind(_all_to_all, cuts_operand=True, cuts_result=True),
    "collective_permute": _CollectiveKind(_collective_permute),
    "collective_broadcast": _CollectiveKind(_collective_broadcast),
}


def is_collective(op: str) -> bool:
    """Return True if ``op`` is the name of a collective."""
    return op in _OPS


def cuts_arrays(op: str) -> bool:
    """Return True if collective ``op`` splits its operand or result into one part for each rank of a group."""
    return _OPS[op].cuts_operand or _OPS[op].cuts_result


def are_sizes_valid(op: str, operand: int, result: int, members: int) -> bool:
    """Return True if the element counts of an operand and a result are valid for a group of ``members`` ranks."""
    kind = _OPS[op]
    parts, result_parts = members if kind.cuts_operand else 1, members if kind.cuts_result else 1
    return operand % parts == result % result_parts == 0 and operand // parts == result // result_parts


def _other_ranks(group: tuple[int, ...], me: int, array: Callable[[int], np.ndarray]) -> dict[int, np.ndarray]:
    """Return ``{rank: array(k)}`` for each rank of the group but this one; k is the index of the rank in the group."""
    return {rank: array(k) for k, rank in enumerate(group) if k != me}


def _split_first_dim(array: np.ndarray, count: int) -> list[np.ndarray]:
    """Split an array along the first dim into ``count`` equal views."""
    size = array.shape[0] // count
    return [array[k * size : (k + 1) * size] for k in range(count)]


def buffer_bytes(op: str, size: int, members: int) -> int:
    """Estimate the bytes of a collective's temporary arrays on one rank; exact up to rounding to whole elements.

    Parameters
    ----------
    op : str
    size : int
        Bytes of the operand.
    members : int
        Ranks in the group.
    """
    if members == 1:
        return 0
    match op:
        case "all_reduce":
            return members * size if size * (members - 1) <= GATHER_BYTES else min(size, PIECE_BYTES)
        case "reduce_scatter":
            return size * (members - 1) // members
    return 0


# Reductions.

_FUNCTIONS: dict[str, np.ufunc] = {
    "add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum, "and": np.bitwise_and,
    "or": np.bitwise_or,
}  # fmt: skip

# Elements reduced at a time, so that the accumulator stays in the cache.
_BLOCK = 16 << 10


def _reduce(parts: Sequence[np.ndarray], result: np.ndarray, reduction: str) -> None:
    """Reduce flat arrays elementwise into ``result``, in the order of ``parts``.

    Floats of 16 bits and less are accumulated in f32 and rounded once (decision 310). Integers below 8 bits wrap around
    when their low bits are stored.
    """
    function = _FUNCTIONS[reduction]
    wide = _accumulator(result.dtype)
    if wide is None:
        with np.errstate(all="ignore"):
            function(parts[0], parts[1], out=result) if len(parts) > 1 else np.copyto(result, parts[0])
            for part in parts[2:]:
                function(result, part, out=result)
        return
    with np.errstate(all="ignore"):
        for start in range(0, result.size, _BLOCK):
            at = slice(start, start + _BLOCK)
            total = parts[0][at].astype(wide)
            for part in parts[1:]:
                function(total, part[at].astype(wide), out=total)
            result[at] = total.astype(result.dtype)


def _accumulator(dtype: np.dtype) -> np.dtype | None:
    """Return the dtype in which elements of ``dtype`` are accumulated; None if in ``dtype`` itself."""
    name = from_numpy(dtype)
    match kind_of(name):
        case "f" if name not in ("f32", "f64"):
            return np.dtype(np.float32)
        case "i" if name in ("i2", "i4"):
            return np.dtype(np.int8)
        case "u" if name in ("u2", "u4"):
            return np.dtype(np.uint8)
    return None
