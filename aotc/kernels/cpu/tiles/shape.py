"""What is constant in a register tile: functions of equal shapes are one function."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

PREFIX = "tile_"
"""What the names of tiles' functions begin with."""
Levels = tuple[tuple[int | None, int | None, int | None], ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """All that is constant in a tile; None is a value given at run time.

    Strides and ``prefetch`` (how far ahead of each row of ``b``; 0: not at all) are in bytes; ``levels`` are (extent,
    a step, b step).
    """

    form: str
    rows: int
    vectors: int
    lanes: int
    a_dtype: str
    a_row: int | None
    a_inner: int | None
    out_row: int | None
    levels: Levels
    prefetch: int
    isa: str
    b_column: int | None = 0
    b_inner: int | None = 0
    adds: bool = False

    @property
    def is_packed(self) -> bool:
        """Does a step of ``b`` lie in one piece, group beside group?"""
        return self.b_column == 0 and self.b_inner == 0

    @property
    def of_dots(self) -> bool:
        """Is it a tile of dot products? It has as many columns as vectors."""
        return self.b_column != 0

    @property
    def is_one_dot(self) -> bool:
        """Is it one dot product, which is put where it is called? A call takes as long as some of its vectors."""
        return self.of_dots and self.rows * self.vectors == 1

    @property
    def name(self) -> str:
        """Return the symbol: the same for equal shapes in every module."""
        digest = hashlib.sha256(repr(self).encode()).hexdigest()[:12]
        columns = f"dots_{self.vectors}" if self.of_dots else self.vectors * self.lanes
        return f"{PREFIX}{self.form}_{self.rows}x{columns}_{digest}"
