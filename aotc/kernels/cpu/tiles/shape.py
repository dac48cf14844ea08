"""The constants of a register tile; tiles with equal constants share one function."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from aotc.ir.loop.forms.tile_forms import TileForm

PREFIX = "tile_"
"""Prefix of the names of tile functions."""
Levels = tuple[tuple[int | None, int | None, int | None], ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """The constants of a register tile; None stands for a value that is an argument at run time.

    Strides and ``prefetch`` (the prefetch distance in ``b``; 0: none) are in bytes. ``levels`` are the loops over k,
    outermost first: (extent, stride in a, stride in b). ``isa`` has names of instruction sets: ``x86`` (else AArch64),
    ``fma``, ``vnni``, ``dot``, ``i8mm``, ``bf16``, ``sve``, ``amx-bf16`` and ``amx-i8``.
    """

    form: TileForm
    rows: int
    vectors: int
    lanes: int
    a_dtype: str
    a_row: int | None
    a_inner: int | None
    out_row: int | None
    levels: Levels
    prefetch: int
    isa: tuple[str, ...]
    b_column: int | None = 0
    b_inner: int | None = 0
    adds: bool = False

    @property
    def is_packed(self) -> bool:
        """Return True if each step of ``b`` is contiguous and steps follow each other, panel after panel."""
        return self.b_column == 0 and self.b_inner == 0

    @property
    def of_dots(self) -> bool:
        """Return True if the tile computes dot products of rows of both operands; ``vectors`` then counts columns."""
        return self.b_column != 0

    @property
    def is_one_dot(self) -> bool:
        """Return True if the tile is a single dot product, which is inlined."""
        return self.of_dots and self.rows * self.vectors == 1

    @property
    def name(self) -> str:
        """Return the symbol of the tile's function, which is the same for equal shapes in every module."""
        digest = hashlib.sha256(repr(self).encode()).hexdigest()[:12]
        columns = f"dots_{self.vectors}" if self.of_dots else self.vectors * self.lanes
        return f"{PREFIX}{self.form.name}_{self.rows}x{columns}_{digest}"
