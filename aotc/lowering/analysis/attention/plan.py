"""How a worker of a CPU computes attention: how many rows and terms at a time, in how much scratch memory."""

from __future__ import annotations

from dataclasses import dataclass

from aotc.ir.dims import Dim
from aotc.ir.opset.attention import axes
from aotc.ir.opset.spec import Attrs, Types
from aotc.ir.tensor_ir import Op
from aotc.lowering.analysis.costs.table_attention import ATTENTION_ROWS, ATTENTION_TERMS, DECODED_ROWS, FEW_SCORES
from aotc.lowering.analysis.resources import memory_limits
from aotc.lowering.analysis.tiling import best_tile
from aotc.targets import Target
from aotc.vmfb.dtypes import size_of


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The blocks of attention on a CPU.

    Attributes
    ----------
    wide : str
        The dtype of scores and sums.
    rows, terms : int
        Of a block of scores.
    tile_terms, tile_rows : int
        Of a register tile of scores, which holds vectors of rows; no tile if there are few rows.
    columns, tile_columns : int
        Of the sums, in whole tiles, and of one tile.
    tile_height : int
        The most rows of a tile of sums.
    """

    wide: str
    rows: int
    terms: int
    tile_terms: int
    tile_rows: int
    columns: int
    tile_columns: int
    tile_height: int

    @property
    def few(self) -> bool:
        """Are scores dot products, in vectors of terms?"""
        return self.tile_rows == 0

    def bytes(self, depth: int) -> int:
        """Return the scratch memory of a worker, with copies of a block's keys and values."""
        scores = self.rows * (self.terms + 2 * self.tile_terms)
        copies = (self.terms + 2 * self.tile_terms) * depth + self.terms * self.columns
        return size_of(self.wide) * (self.rows * (depth + 2 * self.columns) + scores + copies)


def takes_attention(op: Op, target: Target) -> bool:
    """Does ``target`` compute ``op`` as one, and does that pay?"""
    types = tuple(v.type for v in op.operands)
    if target.kind != "cpu" or attention_plan(types, op.attrs, target) is None:
        return False
    _, rows, terms, _, _ = axes(types, op.attrs)
    return not FEW_SCORES.holds(rows * terms)


def attention_plan(types: Types, attrs: Attrs, target: Target) -> AttentionPlan | None:
    """Return the blocks of attention on a CPU, or None if none fit, or depth or columns are not known."""
    _, rows, terms, depth, columns = axes(types, attrs)
    if not isinstance(depth, int) or not isinstance(columns, int) or not depth or not columns or terms == 0:
        return None
    room = memory_limits(target)["scratch"][1]
    wide = "f64" if types[0].dtype == "f64" else "f32"
    for share in (1, 2, 4, 8):
        plan = _plan(rows, terms, depth, columns, wide, share, target)
        if plan.bytes(depth) <= room:
            return plan
    return None


def _plan(rows: Dim, terms: Dim, depth: int, columns: int, wide: str, share: int, target: Target) -> AttentionPlan:
    some = _part(terms, ATTENTION_TERMS.value // share)
    if DECODED_ROWS.holds(rows) and isinstance(rows, int):
        height, width = best_tile(rows, columns, some, wide, target)
        wide_columns = -(-columns // width) * width
        return AttentionPlan(wide, max(rows, 1), some, 0, 0, wide_columns, width, height)
    lanes = target.vector_bytes // size_of(wide)
    block = -(-_part(rows, ATTENTION_ROWS.value // min(share, 4)) // lanes) * lanes
    tile_terms, tile_rows = best_tile(some, block, depth, wide, target)
    block = -(-block // tile_rows) * tile_rows
    height, width = best_tile(block, columns, some, wide, target)
    return AttentionPlan(
        wide, block, some, tile_terms, tile_rows, -(-columns // width) * width, width, height
    )


def _part(extent: Dim, most: int) -> int:
    """Return the size of equal parts of ``extent`` of at most ``most``, or ``most`` if it is not known."""
    if not isinstance(extent, int):
        return most
    return -(-extent // max(-(-extent // most), 1)) or 1
