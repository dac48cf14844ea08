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
        Its number in the total order of the program's collectives.
    groups : tuple of tuple of int
        The ranks of each group; without groups all ranks are one.
    pairs : tuple of pairs of int
        Of ``collective_permute``: source and target.
    reduction : str
        ``add``, ``mul``, ``max``, ``min``, ``and`` or ``or``.
    place : str
        The line of source, for errors.
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
    """Run a collective: fill ``results`` from the ``operands`` of the ranks of this rank's group.

    Arrays are C-contiguous, and results share no memory with operands. All ranks that the collective names must call
    it.

    Raises
    ------
    RankLost
        If a rank that is needed ended.
    CallError
        If the collective does not concern this rank, or ranks are in different collectives.
    """
    kind, work = _OPS[c.op], _OnRank(c, link, str(c))
    is_alike = len({x.dtype for x in operands}) == 1 and all(x.size for x in operands)
    if kind.is_packed and len(operands) > 1 and is_alike:
        _run_packed(work, kind, operands, results)
        return
    for operand, result in zip(operands, results, strict=True):
        kind.run(work, operand, result)


def _run_packed(work: _OnRank, kind: _Op, operands: Sequence[np.ndarray], results: Sequence[np.ndarray]) -> None:
    """Run a collective of several operands of one dtype as one of their elements, one operand after the other.

    Each element is reduced in the order of the ranks, so the bits are those of a call for each operand.
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
class _OnRank:
    """A collective on one rank."""

    collective: Collective
    link: Link
    what: str

    def group(self) -> tuple[tuple[int, ...], int]:
        """Return this rank's group and its position there."""
        group = _group_of(self.collective, self.link.rank, self.link.size)
        if group is None:
            raise CallError("", f"rank {self.link.rank} is in no group of {self.what}")
        return group, group.index(self.link.rank)

    def exchange(self, sends: Mapping[int, np.ndarray], receives: Mapping[int, np.ndarray]) -> None:
        """Exchange arrays with other ranks; without any, nothing is waited for."""
        if sends or receives:
            self.link.exchange(sends, receives, self.what)


def _group_of(c: Collective, rank: int, size: int) -> tuple[int, ...] | None:
    if not c.groups:
        return tuple(range(size))
    return next((group for group in c.groups if rank in group), None)


def needed_ranks(c: Collective, rank: int, size: int) -> tuple[int, ...]:
    """Return the ranks, of ``size`` ones, whose operands the result of ``rank`` needs."""
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


def _all_reduce(work: _OnRank, operand: np.ndarray, result: np.ndarray) -> None:
    group, me = work.group()
    data, out = operand.reshape(-1), result.reshape(-1)
    if len(group) == 1 or not data.size:
        out[...] = data
    elif data.nbytes * (len(group) - 1) <= GATHER_BYTES:
        parts = np.empty((len(group), data.size), data.dtype)
        parts[me] = data
        work.exchange(_others(group, me, lambda k: data), _others(group, me, lambda k: parts[k]))
        _reduce(list(parts), out, work.collective.reduction)
    else:
        step = max(PIECE_BYTES // data.itemsize, len(group))
        for start in range(0, data.size, step):
            _reduce_by_chunks(work, data[start : start + step], out[start : start + step])


def _reduce_by_chunks(work: _OnRank, data: np.ndarray, out: np.ndarray) -> None:
    """Reduce a chunk on each rank, and gather the chunks."""
    group, me = work.group()
    bounds = [data.size * k // len(group) for k in range(len(group) + 1)]
    chunks = [slice(a, b) for a, b in pairwise(bounds)]
    parts = np.empty((len(group), bounds[me + 1] - bounds[me]), data.dtype)
    parts[me] = data[chunks[me]]
    work.exchange(_others(group, me, lambda k: data[chunks[k]]), _others(group, me, lambda k: parts[k]))
    _reduce(list(parts), out[chunks[me]], work.collective.reduction)
    work.exchange(_others(group, me, lambda k: out[chunks[me]]), _others(group, me, lambda k: out[chunks[k]]))


def _reduce_scatter(work: _OnRank, operand: np.ndarray, result: np.ndarray) -> None:
    group, me = work.group()
    slots = _split(operand, len(group))
    parts = [slots[me] if k == me else np.empty(result.shape, result.dtype) for k in range(len(group))]
    if result.size:
        work.exchange(_others(group, me, lambda k: slots[k]), _others(group, me, lambda k: parts[k]))
    _reduce([part.reshape(-1) for part in parts], result.reshape(-1), work.collective.reduction)


def _all_gather(work: _OnRank, operand: np.ndarray, result: np.ndarray) -> None:
    group, me = work.group()
    _gather(work, group, me, [operand] * len(group), result)


def _all_to_all(work: _OnRank, operand: np.ndarray, result: np.ndarray) -> None:
    group, me = work.group()
    _gather(work, group, me, _split(operand, len(group)), result)


def _gather(
    work: _OnRank, group: tuple[int, ...], me: int, sent: Sequence[np.ndarray], result: np.ndarray
) -> None:
    """Send an array to each rank of the group, and put those that arrive one after the other."""
    slots = _split(result, len(group))
    slots[me][...] = sent[me]
    if result.size:
        work.exchange(_others(group, me, lambda k: sent[k]), _others(group, me, lambda k: slots[k]))


def _collective_permute(work: _OnRank, operand: np.ndarray, result: np.ndarray) -> None:
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


def _collective_broadcast(work: _OnRank, operand: np.ndarray, result: np.ndarray) -> None:
    me, group = work.link.rank, _group_of(work.collective, work.link.rank, work.link.size)
    if group is None:
        result[...] = np.zeros((), result.dtype)
    elif group[0] == me:
        result[...] = operand
        if operand.size:
            work.exchange(dict.fromkeys(group[1:], operand), {})
    elif operand.size:
        work.exchange({}, {group[0]: result})


class _Op(NamedTuple):
    """A kind of collective.

    Attributes
    ----------
    run : callable
    cuts_operand, cuts_result : bool
        True if the array consists of as many equal parts, along its first dim, as a group has ranks.
    is_packed : bool
        True if several operands are exchanged as one.
    """

    run: Callable[[_OnRank, np.ndarray, np.ndarray], None]
    cuts_operand: bool = False
    cuts_result: bool = False
    is_packed: bool = False


_OPS = {
    "all_reduce": _Op(_all_reduce, is_packed=True),
    "all_gather": _Op(_all_gather, cuts_result=True, is_packed=True),
    "reduce_scatter": _Op(_reduce_scatter, cuts_operand=True, is_packed=True),
    "all_to_all": _Op(_all_to_all, cuts_operand=True, cuts_result=True),
    "collective_permute": _Op(_collective_permute),
    "collective_broadcast": _Op(_collective_broadcast),
}


def is_collective(op: str) -> bool:
    """Return True for the name of a collective."""
    return op in _OPS


def cuts_arrays(op: str) -> bool:
    """Return True for a collective that cuts its operand or result into as many parts as a group has ranks."""
    return _OPS[op].cuts_operand or _OPS[op].cuts_result


def sizes_agree(op: str, operand: int, result: int, members: int) -> bool:
    """Return True if an operand and a result have numbers of elements that fit in a group of ``members`` ranks."""
    kind = _OPS[op]
    parts, result_parts = members if kind.cuts_operand else 1, members if kind.cuts_result else 1
    return operand % parts == result % result_parts == 0 and operand // parts == result // result_parts


def _others(group: tuple[int, ...], me: int, array: Callable[[int], np.ndarray]) -> dict[int, np.ndarray]:
    """Return an array for each other rank of the group, by rank; ``array`` gets its position."""
    return {rank: array(k) for k, rank in enumerate(group) if k != me}


def _split(array: np.ndarray, count: int) -> list[np.ndarray]:
    """Return views of ``count`` equal parts of the first dim."""
    size = array.shape[0] // count
    return [array[k * size : (k + 1) * size] for k in range(count)]


def buffer_bytes(op: str, size: int, members: int) -> int:
    """Return the bytes of the temporary arrays of a collective on one rank, up to rounding to elements.

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
    """Reduce flat arrays element by element, in their order.

    Floats of 16 bits and less are accumulated in f32 and rounded once (decision 310). Integers below 8 bits wrap when
    their low bits are stored.
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
    """Return the dtype to accumulate in, or None for the dtype itself."""
    name = from_numpy(dtype)
    match kind_of(name):
        case "f" if name not in ("f32", "f64"):
            return np.dtype(np.float32)
        case "i" if name in ("i2", "i4"):
            return np.dtype(np.int8)
        case "u" if name in ("u2", "u4"):
            return np.dtype(np.uint8)
    return None
