"""Classes for the thresholds of lowering: a decision by size, the size of a block, or an estimate of the cost model.

A threshold is defined above the function that reads it. Thresholds with several readers are in the table of their
folder (``thresholds.py``). A :class:`Limit` is only compared by :meth:`Limit.holds`, so that a test can observe both
outcomes of each decision. A :class:`BlockSize` is a tile or chunk size, an :class:`Estimate` a parameter of the cost
model. Later stages read a decision from the attributes of an op or from a kernel; they do not decide again.

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
    """Interface of an object that decides in place of thresholds: see :mod:`aotc.lowering.tuning`."""

    def holds(self, limit: Limit, size: Dim, own: bool) -> bool:
        """Return the decision of ``limit`` for ``size``; ``own`` is its default decision."""

    def amount(self, block: BlockSize) -> int:
        """Return the value to use for ``block``."""


_DECIDER: ContextVar[Decider | None] = ContextVar("decider", default=None)


@contextmanager
def decided_by(decider: Decider | None) -> Iterator[None]:
    """Let ``decider`` decide for all thresholds inside the block; with None they use their defaults."""
    token = _DECIDER.set(decider)
    try:
        yield
    finally:
        _DECIDER.reset(token)


@dataclass(frozen=True, slots=True)
class CostRow:
    """Base class of thresholds: a default value with its unit, reason and benchmark.

    Attributes
    ----------
    default : int
    unit : str
        Unit of ``default``; for a limit also the decision for sizes up to it and for larger sizes.
    why : str
        The reason for this value, with measurements made by hand, if any.
    benchmark : str
        Command that repeats the measurement, ``python -m benchmarks`` and a suite, if a benchmark chose the value.
    """

    default: int
    unit: str
    why: str = ""
    benchmark: str = ""

    @property
    def value(self) -> int:
        """The value to use: the default."""
        return self.default


@dataclass(frozen=True, slots=True)
class Limit(CostRow):
    """Decision by size: ``default`` is the largest size for which it holds.

    Attributes
    ----------
    unknown : bool
        The decision for a symbolic size, whose value is known only at run time.
    """

    unknown: bool = False

    def holds(self, size: Dim) -> bool:
        """Return True if ``size`` is at most the limit; for a symbolic size, return ``unknown``."""
        own = self.unknown if isinstance(size, Expr) else size <= self.default
        decider = _DECIDER.get()
        return own if decider is None else decider.holds(self, size, own)


class BlockSize(CostRow):
    """Size of a tile, chunk or buffer, or a number of parallel units, that tuning may change."""

    __slots__ = ()

    @property
    def value(self) -> int:
        """The value to use: the default, or a tuned value."""
        decider = _DECIDER.get()
        return self.default if decider is None else decider.amount(self)


class Estimate(CostRow):
    """Cost or rate that the cost model assumes; tuning does not change it."""

    __slots__ = ()
