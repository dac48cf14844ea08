"""Plan loops with strided reads across rows: blocks of the operand are transposed first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aotc.ir.dims.algebra import Dim, Expr, Sym
from aotc.ir.loop.access import loads_and_indices, statement_scalars
from aotc.ir.loop.ir import Let, Load, Stmt, Store, walk
from aotc.lowering.analysis.anchors import single_axis
from aotc.lowering.analysis.index_maps import linearize
from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.elements.nests import NestAxis, axis_coefficient
from aotc.lowering.plans.region_plan import RegionPlan
from aotc.lowering.plans.resources import memory_limits
from aotc.lowering.plans.thresholds import FETCH_LINE, FEW_TURNED, TURNED_OPERANDS, TURNED_TILE
from aotc.lowering.threshold import BlockSize
from aotc.vmfb.dtypes import size_of


@dataclass(frozen=True, slots=True)
class TransposedLoopPlan(RegionPlan):
    """Plan of blocks of ``height`` iterations of ``axes[-2]``, the last grid loop, by ``width`` of the innermost loop.

    The blocks of a tile of ``rows`` by ``columns`` run one after the other; an item has ``tiles`` adjacent tiles.
    ``is_copied`` is True if operands are transposed into thread-local memory first; a region that only copies does not
    need that.
    """

    axes: tuple[tuple[int, ...], ...]
    height: int
    width: int
    rows: int
    columns: int
    tiles: int
    is_copied: bool


TURNED_ELEMENTS = BlockSize(
    1 << 15,
    "elements per grid item of a blocked transpose, at most",
    "some microseconds of one core",
)


def plan_transposed_blocks(
    b: RegionBuilder, outer: Sequence[NestAxis], inner: Sequence[NestAxis], trial: Sequence[Stmt], is_copy: bool
) -> TransposedLoopPlan | None:
    """Return the blocks of a region with transposed reads; None if it has none, or too many.

    ``is_copy`` is True for a region that copies one operand without computation.
    """
    if not outer or len(inner) != 1 or not all(isinstance(s, Let) or _is_plain_store(s) for s in trial):
        return None
    along, across = (single_axis(b.anchors.space[axis.members[-1]]) for axis in (outer[-1], inner[-1]))
    if along is None or across is None:
        return None
    strided = {(x.buffer.name, x.index): x for x in loads_in_body(trial) if is_transposed_load(x, along, across)}
    if not strided or not TURNED_OPERANDS.holds(len(strided)):
        return None
    sizes = [size_of(x.buffer.dtype) for x in strided.values()]
    line = FETCH_LINE.value // min(sizes)
    height, width = (_transposed_block_edge(axis.extent, line) for axis in (outer[-1], inner[-1]))
    fits = is_copy or height * width * sum(sizes) <= memory_limits(b.target)["private"][1]
    if not height or not width or not fits:
        return None
    axes = (*outer, inner[-1])
    rows, columns = (equal_parts(axis.extent, n, TURNED_TILE.value) for axis, n in zip(axes[-2:], (height, width)))
    tiles = equal_parts(inner[-1].extent, columns, TURNED_ELEMENTS.value // rows) // columns
    groups = tuple(axis.members for axis in axes)
    height, width = (rows, columns) if is_copy else (height, width)
    return TransposedLoopPlan(groups, height, width, rows, columns, tiles, not is_copy)


def _is_plain_store(stmt: Stmt) -> bool:
    return isinstance(stmt, Store) and not stmt.reduce


def loads_in_body(body: Sequence[Stmt]) -> list[Load]:
    """Return every load of ``body``."""
    return [x for s in walk(tuple(body)) for x in loads_and_indices(statement_scalars(s)) if isinstance(x, Load)]


def is_transposed_load(x: Load, along: Sym, across: Sym) -> bool:
    """Return True if load ``x`` is contiguous along the loop ``along``, and strided along the loop ``across``."""
    at = linearize(x.index, x.buffer.shape)
    step = axis_coefficient(at, across)
    return axis_coefficient(at, along) == 1 and isinstance(step, int) and step > 1


def _transposed_block_edge(extent: Dim, line: int) -> int:
    """Return ``line`` or half of it if it divides ``extent``; 0 if neither does, or ``extent`` is unknown or short."""
    if isinstance(extent, Expr) or FEW_TURNED.holds(extent):
        return 0
    return transposed_line_length(extent, line)


def transposed_line_length(extent: int, line: int) -> int:
    """Return the elements of a line to transpose at once: ``line`` or half of it, 0 if neither divides ``extent``."""
    return next((n for n in (line, line // 2) if extent % n == 0), 0)


def equal_parts(extent: Dim, part: int, most: int) -> int:
    """Return the largest multiple of ``part`` up to ``most`` that divides ``extent``; without any, ``part``."""
    return next((n for n in range(most // part * part, part, -part) if extent % n == 0), part)
