"""Programs on which aotc was, or may be, slower than a peer: ``PROGRAMS`` by name."""

from __future__ import annotations

from benchmarks.programs import numerics, training
from benchmarks.programs.catalogue import PROGRAMS

__all__ = ["PROGRAMS", "numerics", "training"]
