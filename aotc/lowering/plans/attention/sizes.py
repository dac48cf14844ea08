"""Axes of attention in the form that the GPU templates expect."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from aotc.ir.dims.algebra import Dim, bounds
from aotc.ir.loop.forms.attention import attention_shared
from aotc.ir.loop.forms.tiling import Tiling
from aotc.ir.opset.attention import ABSENT, attention_axis_sizes, attention_operand_dims
from aotc.ir.opset.dim_attributes import dims_of
from aotc.ir.opset.spec import Attrs, Types
from aotc.lowering.threshold import Estimate, Limit
from aotc.vmfb.dtypes import size_of

ATTENTION_DEPTH = Limit(
    256,
    "elements of a key, or of a value, at most, that the GPU templates support",
    "registers of a warpgroup: sums of 256 elements take 128 of the 240 registers of each thread",
)
CERTAIN_FILL = Estimate(
    30,
    "power of ten: a score of minus 1e30 or less has no weight next to any other score",
    "another score would have to be as low, which is not far from the lowest number of f32",
)


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """Axes of attention in the form that a GPU template expects.

    Attributes
    ----------
    batch : tuple of Dim
        The sizes of the batch axes.
    rows, terms : Dim
        The number of queries and of keys.
    depth, width : int
        The elements of a key and of a value.
    offset : Dim, optional
        Causal attention: row ``i`` has weight only for terms up to ``i + offset``. None if any term may have weight.
    plain : bool
        Are all scores with weight just scaled products, without bias or mask?
    grouped : int
        The batch axis that serves as the rows, or ``ABSENT``. With one query per head, the heads that share keys form
        the rows of a tile (grouped-query attention).
    size : int
        The bytes of an element of an operand.
    """

    batch: tuple[Dim, ...]
    rows: Dim
    terms: Dim
    depth: int
    width: int
    offset: Dim | None = None
    plain: bool = True
    grouped: int = ABSENT
    size: int = 2

    def shared_memory_bytes(self, tiling: Tiling) -> int:
        """Return the bytes of shared memory of a block."""
        return attention_shared(tiling, self.depth, self.width, self.size)

    def dims_in_template_order(self, dims: tuple[int, ...], rows: bool = True) -> tuple[int, ...]:
        """Return an operand's dims in the order batch, row (or key), last."""
        if self.grouped == ABSENT:
            return dims
        *batch, line, last = dims
        row = batch.pop(self.grouped)
        return (*batch, row if rows else line, last)


def attention_sizes(types: Types, attrs: Attrs) -> AttentionSizes | None:
    """Return the axes, or None if the GPU templates do not support such operands.

    They need default precision, operands of one dtype (bf16, f16 or f32), contiguous last dims of a multiple of 8
    elements, and at most three batch axes.
    """
    batch, rows, terms, depth, width = attention_axis_sizes(types, attrs)
    if not isinstance(depth, int) or not isinstance(width, int) or terms == 0:
        return None
    dtypes = {t.dtype for t in types[:3]}
    if dtypes not in ({"bf16"}, {"f16"}, {"f32"}) or attrs.get("precision", "DEFAULT") != "DEFAULT":
        return None
    size = size_of(types[0].dtype)
    pieces = all(n % 8 == 0 and ATTENTION_DEPTH.holds(n) and n for n in (depth, width))
    lying = all(dims[-1] == t.rank - 1 for t, dims in zip(types[:3], attention_operand_dims(attrs)))
    if not pieces or not lying or len(batch) > 3 or any(not isinstance(d, int) for d in batch[1:]):
        return None
    offset = _causal_offset(attrs)
    plain = len(types) == 3 and attrs["scale"] > 0 and (offset is not None or not dims_of(attrs, "causal"))
    sizes = AttentionSizes(batch, rows, terms, depth, width, offset, plain, size=size)
    shared = [n for n in range(len(batch)) if attrs["k_dims"][n] == attrs["v_dims"][n] == ABSENT]
    if rows != 1 or not shared:
        return sizes
    rest = tuple(size for n, size in enumerate(batch) if n != shared[-1])
    return replace(sizes, batch=rest, rows=batch[shared[-1]], grouped=shared[-1])


def _causal_offset(attrs: Attrs) -> Dim | None:
    """Return the causal offset of attention, or None without a usable causal mask.

    A masked term has no weight if the fill is ``-inf``, or so low that every row surely has a higher score.
    """
    if not dims_of(attrs, "causal"):
        return None
    (offset,) = dims_of(attrs, "causal")
    low = bounds(offset)[0]
    certain = attrs["fill"] <= -(10.0**CERTAIN_FILL.value) and low is not None and low >= 0 and not attrs["mask_dims"]
    return offset if attrs["fill"] == -math.inf or certain else None
