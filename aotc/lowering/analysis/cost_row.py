"""What a row of the cost tables is: a decision by size, the size of a block, an estimate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aotc.ir.dims import Dim, Expr


@dataclass(frozen=True, slots=True)
class Limit:
    """A decision by size.

    Attributes
    ----------
    name : str
        The row's name: that of the variable in lower case.
    value : int
        The largest size for which it holds.
    unit : str
        Of what ``value`` is a number.
    measured : str
        Where and how it was measured, or why it was chosen.
    unknown : bool
        Does it hold for a size that only a call knows?
    """

    name: str
    value: int
    unit: str
    measured: str
    unknown: bool = False

    def holds(self, size: Dim) -> bool:
        """Is ``size`` at most the limit?"""
        return self.unknown if isinstance(size, Expr) else size <= self.value


@dataclass(frozen=True, slots=True)
class BlockSize:
    """How much is done at a time; attributes as of :class:`Limit`."""

    name: str
    value: int
    unit: str
    measured: str


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the cost model counts; attributes as of :class:`Limit`."""

    name: str
    value: int
    unit: str
    measured: str


Row = Limit | BlockSize | Estimate


def rows_in(names: Mapping[str, Any]) -> tuple[Row, ...]:
    """Return the rows among the variables of a module."""
    return tuple(row for row in names.values() if isinstance(row, Row))
