"""What a row of the cost tables is: a decision by size, the size of a block, an estimate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aotc.ir.dims.algebra import Dim, Expr


@dataclass(frozen=True, slots=True)
class CostRow:
    """What every row says.

    Attributes
    ----------
    name : str
        That of the variable, in lower case.
    value : int
    unit : str
        Of what ``value`` is a number.
    measured : str
        Where and how it was measured, or why it was chosen.
    """

    name: str
    value: int
    unit: str
    measured: str


@dataclass(frozen=True, slots=True)
class Limit(CostRow):
    """A decision by size: ``value`` is the largest for which it holds.

    Attributes
    ----------
    unknown : bool
        Does it hold for a size that only a call knows?
    """

    unknown: bool = False

    def holds(self, size: Dim) -> bool:
        """Is ``size`` at most the limit?"""
        return self.unknown if isinstance(size, Expr) else size <= self.value


class BlockSize(CostRow):
    """How much is done at a time."""

    __slots__ = ()


class Estimate(CostRow):
    """What the cost model counts."""

    __slots__ = ()


def rows_in(names: Mapping[str, Any]) -> tuple[CostRow, ...]:
    """Return the rows among the variables of a module."""
    return tuple(row for row in names.values() if isinstance(row, CostRow))
