"""Classes for the thresholds of lowering: a decision by size, the size of a block, or an estimate of the cost model.

A threshold is defined above the function that reads it. Thresholds with several readers are in the table of their
folder (``thresholds.py``). A :class:`Limit` is only compared by :meth:`Limit.holds`, so that a test can observe both
outcomes of each decision. A :class:`BlockSize` is the amount of work done at a time, an :class:`Estimate` the cost of a
unit of work. Later stages read a decision from the attributes of an op or from a kernel; they do not decide again.

Bounds on the time of the compiler itself (sweeps, look-back, recursion) do not affect the compiled program. They are
plain constants with a comment.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from aotc.ir.dims.algebra import Dim, Expr


class Decider(Protocol):
    """Answers for thresholds in place of their own values: see :mod:`aotc.lowering.tuning`."""

    def holds(self, limit: Limit, size: Dim, own: bool) -> bool:
        """Return the decision of ``limit`` for ``size``; ``own`` is the decision by its value."""

    def amount(self, block: BlockSize) -> int:
        """Return the amount to use for ``block``."""


_DECIDER: ContextVar[Decider | None] = ContextVar("decider", default=None)


@contextmanager
def decided_by(decider: Decider | None) -> Iterator[None]:
    """Let ``decider`` answer for all thresholds inside the block; None lets them answer by their own values."""
    token = _DECIDER.set(decider)
    try:
        yield
    finally:
        _DECIDER.reset(token)


@dataclass(frozen=True, slots=True)
class CostRow:
    """Fields of every threshold.

    Attributes
    ----------
    default : int
    unit : str
        The quantity that ``default`` counts, and for a limit the decision on either side of it.
    why : str
        The reason for this value, with measurements made by hand, if any.
    benchmark : str
        The command that repeats the measurement, if a benchmark chose the value: ``python -m benchmarks`` and a suite.
    """

    default: int
    unit: str
    why: str = ""
    benchmark: str = ""

    @property
    def value(self) -> int:
        """The value to use."""
        return self.default


@dataclass(frozen=True, slots=True)
class Limit(CostRow):
    """Decision by size: ``default`` is the largest size for which it holds.

    Attributes
    ----------
    unknown : bool
        Does it hold for a symbolic size, which only a call knows?
    """

    unknown: bool = False

    def holds(self, size: Dim) -> bool:
        """Return True if ``size`` is at most the limit; for a symbolic size, return ``unknown``."""
        own = self.unknown if isinstance(size, Expr) else size <= self.default
        decider = _DECIDER.get()
        return own if decider is None else decider.holds(self, size, own)


class BlockSize(CostRow):
    """Amount of work, memory or parallelism that is used at a time."""

    __slots__ = ()

    @property
    def value(self) -> int:
        """The amount to use: the default, or a tuned one."""
        decider = _DECIDER.get()
        return self.default if decider is None else decider.amount(self)


class Estimate(CostRow):
    """Cost or rate that the cost model assumes."""

    __slots__ = ()
