"""What is found out about kernels, once for those that differ in their names alone.

Equal layers of a model are lowered once, and the kernel is given the name of each: it is the same statements and arrays
then. Kernels are large to hash, so these are told apart by their identity, and kept so that they have it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Generic, TypeVar

from aotc.ir.loop.ir import Kernel

Fact = TypeVar("Fact")

_parts = attrgetter(*(f.name for f in fields(Kernel) if f.name != "name"))


@dataclass
class FactsOfKernels(Generic[Fact]):
    """What ``find`` returns for kernels, whose names it does not look at."""

    find: Callable[..., Fact]
    _known: dict[tuple[Hashable, ...], tuple[Kernel, Fact]] = field(default_factory=dict)

    def of(self, kernel: Kernel, *more: Hashable) -> Fact:
        """Return the fact of a kernel, and of what else ``find`` is to be told."""
        key = (*map(id, _parts(kernel)), *more)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = kernel, self.find(kernel, *more)
        return found[1]
