"""Classes for the thresholds of lowering: a decision by size, the size of a block, or an estimate of the cost model.

A threshold is defined above the function that reads it. Thresholds with several readers are in the table of their
folder (``thresholds.py``). A :class:`Limit` is only compared by :meth:`Limit.holds`, so that a test can observe both
outcomes of each decision. A :class:`BlockSize` is the amount of work done at a time, an :class:`Estimate` the cost of a
unit of work. Later stages read a decision from the attributes of an op or from a kernel; they do not decide again.

Bounds on the time of the compiler itself (sweeps, look-back, recursion) do not affect the compiled program. They are
plain constants with a comment.
"""

from __future__ import annotations

from dataclasses import dataclass

from aotc.ir.dims.algebra import Dim, Expr


@dataclass(frozen=True, slots=True)
class CostRow:
    """Fields of every threshold.

    Attributes
    ----------
    value : int
    unit : str
        The quantity that ``value`` counts, and for a limit the decision on either side of it.
    why : str
        The reason for this value, with measurements made by hand, if any.
    benchmark : str
        The command that repeats the measurement, if a benchmark chose the value: ``python -m benchmarks`` and a suite.
    """

    value: int
    unit: str
    why: str = ""
    benchmark: str = ""


@dataclass(frozen=True, slots=True)
class Limit(CostRow):
    """Decision by size: ``value`` is the largest size for which it holds.

    Attributes
    ----------
    unknown : bool
        Does it hold for a symbolic size, which only a call knows?
    """

    unknown: bool = False

    def holds(self, size: Dim) -> bool:
        """Return True if ``size`` is at most the limit; for a symbolic size, return ``unknown``."""
        return self.unknown if isinstance(size, Expr) else size <= self.value


class BlockSize(CostRow):
    """Amount of work, memory or parallelism that is used at a time."""

    __slots__ = ()


class Estimate(CostRow):
    """Cost or rate that the cost model assumes."""

    __slots__ = ()
