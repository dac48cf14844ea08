"""Lifetimes to offsets in one arena.

Static storages are placed largest first at the lowest offset that no storage
alive at the same time occupies. Symbolic ones follow behind them; two of equal
size that are never alive together share a place.
"""

from __future__ import annotations

from collections.abc import Callable

from aotc.frontend.dims import Dim, static
from aotc.lowering.bufferize import Storage
from aotc.vmfb.abi import ALIGNMENT


def plan_memory(arena: list[Storage]) -> Dim:
    """Set the ``offset`` of every storage; return the bytes of the arena."""
    return plan_stages(arena, lambda size: 0, 1)[0]


def plan_stages(arena: list[Storage], stage_of: Callable[[Dim], int], count: int) -> list[Dim]:
    """Set the ``offset`` of every storage; return the bytes of the arena in each of ``count`` stages.

    ``stage_of(size)`` is the first stage in which a size is known; offsets depend on sizes of
    the same stage and earlier ones only, so that the arena of one stage is the head of the next one's.
    """
    total: Dim = _place_static([s for s in arena if isinstance(s.size, int)])
    slots: list[tuple[Dim, Dim, list[Storage]]] = []
    totals = []
    for stage in range(count):
        total = _place_symbolic([s for s in arena if _in_stage(s, stage, stage_of)], slots, total)
        totals.append(total)
    return totals


def _in_stage(s: Storage, stage: int, stage_of: Callable[[Dim], int]) -> bool:
    return not isinstance(s.size, int) and stage_of(s.size) == stage


def _place_symbolic(storages: list[Storage], slots: list[tuple[Dim, Dim, list[Storage]]], total: Dim) -> Dim:
    for s in storages:
        for size, offset, holders in slots:
            if size == s.size and not any(_together(s, h) for h in holders):
                s.offset = offset
                holders.append(s)
                break
        else:
            s.offset = total
            slots.append((s.size, total, [s]))
            total = total + (s.size + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT
    return total


def _together(a: Storage, b: Storage) -> bool:
    return a.first <= b.last and b.first <= a.last


def _place_static(storages: list[Storage]) -> int:
    placed: list[Storage] = []
    top = 0
    order = sorted(range(len(storages)), key=lambda n: (-static(storages[n].size), storages[n].first))
    for n in order:
        s = storages[n]
        size = _aligned(s)
        at = 0
        for other in sorted((p for p in placed if _together(s, p)), key=lambda p: static(p.offset)):
            if at + size <= other.offset:  # type: ignore[operator]
                break
            at = max(at, static(other.offset) + _aligned(other))
        s.offset = at
        placed.append(s)
        top = max(top, at + size)
    return top


def _aligned(s: Storage) -> int:
    return -(-static(s.size) // ALIGNMENT) * ALIGNMENT
