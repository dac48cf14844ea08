"""Memoise facts about kernels; kernels that differ only in their names share an entry.

Equal layers of a model are lowered once. The kernel of each further layer is a renamed copy that shares the statements
and arrays of the first. Hashing a kernel is expensive, so the key consists of the identities (``id``) of these parts.
Each entry holds a reference to its kernel; otherwise a new object could reuse an identity.
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
    """Cache of the results of ``find``, a function of a kernel that does not depend on the kernel's name."""

    find: Callable[..., Fact]
    _facts: dict[tuple[Hashable, ...], tuple[Kernel, Fact]] = field(default_factory=dict)

    def facts_of(self, kernel: Kernel, *more: Hashable) -> Fact:
        """Return the facts of ``kernel``, cached."""
        key = (*map(id, _parts(kernel)), *more)
        entry = self._facts.get(key)
        if entry is None:
            entry = self._facts[key] = kernel, self.find(kernel, *more)
        return entry[1]
