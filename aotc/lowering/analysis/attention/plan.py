"""How a worker of a CPU computes attention: how many rows and terms at a time, in how much scratch memory."""

from __future__ import annotations

from dataclasses import dataclass

from aotc.ir.dims import Dim, Expr, product
from aotc.ir.opset.attention import axes
from aotc.ir.opset.spec import Attrs, Types
from aotc.ir.tensor_ir import Op
from aotc.lowering.analysis.costs.table_attention import (
    ATTENTION_ROWS,
    ATTENTION_TERMS,
    DECODED_ROWS,
    FEW_SCORES,
    IDLE_ITEMS,
    PART_TERMS,
    TERM_PARTS,
)
from aotc.lowering.analysis.gpu.attention_tiles import takes_attention_cuda
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
    pairs : bool
        Are both products of pairs of bf16, by an instruction of the processor? Weights are rounded to bf16 then.
    """

    wide: str
    rows: int
    terms: int
    tile_terms: int
    tile_rows: int
    columns: int
    tile_columns: int
    tile_height: int
    pairs: bool = False

    @property
    def group(self) -> int:
        """Return how many terms of a sum lie side by side in an operand of a tile."""
        return 2 if self.pairs else 1

    @property
    def form(self) -> str:
        """Return the form of the tiles whose operands were copied, or lie as they must."""
        return "bf16" if self.pairs else self.wide

    @property
    def few(self) -> bool:
        """Are scores dot products, in vectors of terms?"""
        return self.tile_rows == 0

    def bytes(self, depth: int) -> int:
        """Return the scratch memory of a worker, with copies of a block's keys and values."""
        scores = self.rows * (self.terms + 2 * self.tile_terms)
        copies = (self.terms + 2 * self.tile_terms) * depth + (self.terms + 1) * self.columns + self.rows * depth
        copies += self.rows * (self.terms + 1) if self.pairs else 0
        return size_of(self.wide) * (2 * self.rows * self.columns + scores) + size_of(self.form) * copies


def takes_attention(op: Op, target: Target) -> bool:
    """Does ``target`` compute ``op`` as one, and does that pay?"""
    types = tuple(v.type for v in op.operands)
    if target.kind == "cuda":
        return takes_attention_cuda(types, op.attrs, target)
    if not attention_plans(types, op.attrs, rounded_as(op), target):
        return False
    _, rows, terms, _, _ = axes(types, op.attrs)
    return not FEW_SCORES.holds(rows * terms)


def parts_of(op: Op, target: Target) -> int:
    """Return in how many parts the terms of ``op`` are split, so that there is work for all workers; mostly 1."""
    types = tuple(v.type for v in op.operands)
    plans = attention_plans(types, op.attrs, rounded_as(op), target) if target.kind == "cpu" else ()
    batch, rows, terms, _, _ = axes(types, op.attrs)
    if not plans or op.attrs["causal"] or isinstance(terms, Expr):
        return 1
    if not IDLE_ITEMS.holds(product(batch) * ((rows + (plans[-1].rows - 1)) // plans[-1].rows)):
        return 1
    most = max(min(TERM_PARTS.value, terms // PART_TERMS.value), 1)
    return max(n for n in range(1, most + 1) if terms % n == 0)


def takes_pairs(types: Types, attrs: Attrs, depth: int, result: str, target: Target) -> bool:
    """Are products of pairs of bf16 taken, which round the weights as the result is rounded?

    A matrix unit's tiles read nothing of the kind that weights are.
    """
    has = "bf16" in target.units - target.matrices and attrs.get("precision") in (None, "DEFAULT")
    return has and depth % 2 == 0 and {*(t.dtype for t in types[:3]), result} == {"bf16"}


def rounded_as(op: Op) -> str:
    """Return the dtype that the result of ``op`` is rounded to, of a part of the terms when parts were combined."""
    return op.results[0].type.dtype if len(op.results) == 1 else op.operands[0].type.dtype


def attention_plans(types: Types, attrs: Attrs, result: str, target: Target) -> tuple[AttentionPlan, ...]:
    """Return the blocks of attention on a CPU: none if none fit, or depth or columns are not known.

    There are two of them, the first for few rows, where only a call knows how many there are. ``result`` is the dtype
    that the result is rounded to.
    """
    _, rows, terms, depth, columns = axes(types, attrs)
    if not isinstance(depth, int) or not isinstance(columns, int) or not depth or not columns or terms == 0:
        return ()
    room = memory_limits(target)["scratch"][1]
    wide = "f64" if types[0].dtype == "f64" else "f32"
    pairs = takes_pairs(types, attrs, depth, result, target)
    for share in (1, 2, 4, 8):
        some = _part(terms, ATTENTION_TERMS.value // share)
        few = _few(DECODED_ROWS.value if isinstance(rows, Expr) else rows, some, columns, wide, target)
        plans: tuple[AttentionPlan, ...] = (few,)
        if not DECODED_ROWS.holds(rows):
            most = ATTENTION_ROWS.value // min(share, 4)
            many = _many(_part(rows, most), some, depth, columns, (wide, pairs), target)
            plans = (few, many) if isinstance(rows, Expr) else (many,)
        stack = 5 * sum(plan.rows for plan in plans) * size_of(wide)
        if sum(plan.bytes(depth) for plan in plans) <= room and stack <= target.stack:
            return plans
    return ()


def _few(rows: int, terms: int, columns: int, wide: str, target: Target) -> AttentionPlan:
    height, width = best_tile(rows, columns, terms, wide, target)
    return AttentionPlan(wide, max(rows, 1), terms, 0, 0, -(-columns // width) * width, width, height)


def _many(
    rows: int, terms: int, depth: int, columns: int, kind: tuple[str, bool], target: Target
) -> AttentionPlan:
    wide, pairs = kind
    form, lanes = "bf16" if pairs else wide, target.vector_bytes // size_of(wide)
    block = -(-rows // lanes) * lanes
    tile_terms, tile_rows = best_tile(terms, block, depth, form, target)
    block = -(-block // tile_rows) * tile_rows
    height, width = best_tile(block, columns, terms, form, target)
    return AttentionPlan(
        wide, block, terms, tile_terms, tile_rows, -(-columns // width) * width, width, height, pairs
    )


def _part(extent: Dim, most: int) -> int:
    """Return the size of equal parts of ``extent`` of at most ``most``, or ``most`` if it is not known."""
    if not isinstance(extent, int):
        return most
    return -(-extent // max(-(-extent // most), 1)) or 1
