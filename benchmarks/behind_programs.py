"""Programs of other people's kinds on which aotc was, or might be, slower than a peer: ``PROGRAMS`` by name."""

from __future__ import annotations

from benchmarks import behind_networks, behind_numbers
from benchmarks.behind_catalogue import PROGRAMS

__all__ = ["PROGRAMS", "behind_networks", "behind_numbers"]
