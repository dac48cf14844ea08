"""What a threshold of lowering is: a decision by size, the size of a block, an estimate.

A row stands above the function that reads it; what several modules read is in their folder's table
(``thresholds.py``). A :class:`Limit` decides and is asked by :meth:`Limit.holds` only, so that a test can see both of
its answers. A :class:`BlockSize` says how much is done at a time, an :class:`Estimate` what a unit of work counts for.
What is chosen is handed on in attributes of ops and in kernels; nobody decides the same thing a second time.

Bounds of the compiler's own time (sweeps, look-back, recursion) decide nothing about the program: they are plain
constants with a comment.
"""

from __future__ import annotations

from dataclasses import dataclass

from aotc.ir.dims.algebra import Dim, Expr


@dataclass(frozen=True, slots=True)
class CostRow:
    """What every row says.

    Attributes
    ----------
    value : int
    unit : str
        Of what ``value`` is a number.
    why : str
        The reason for this value, with what was measured by hand, if anything was.
    benchmark : str
        The command that measures it again, if a benchmark chose the value: a script with its options.
    """

    value: int
    unit: str
    why: str = ""
    benchmark: str = ""


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
