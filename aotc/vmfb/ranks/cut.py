"""Partition of an argument or result among ranks, and the signature of a function for whole arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from aotc.vmfb.arguments import Signature
from aotc.vmfb.dtypes import to_numpy
from aotc.vmfb.ranks.layout import Layout, Mesh, layout_of, part_of_rank, slices_of_rank


@dataclass(frozen=True, slots=True)
class Cut:
    """Partition of an argument or result among ranks.

    Attributes
    ----------
    dtype : numpy.dtype
    whole, dims : tuple of int
        The shape of the whole array, and of a part.
    owners : tuple of int
        For each rank: the lowest rank that has the same part.
    slices : tuple of tuple of slice
        For each rank: the position of its part in the whole array.
    """

    dtype: np.dtype
    whole: tuple[int, ...]
    dims: tuple[int, ...]
    owners: tuple[int, ...]
    slices: tuple[tuple[slice, ...], ...]

    @property
    def distinct(self) -> Iterator[int]:
        """One rank for each distinct part: the lowest that has it."""
        return (rank for rank, owner in enumerate(self.owners) if rank == owner)

    @property
    def part_bytes(self) -> int:
        """The size of a part in bytes."""
        return int(np.prod(self.dims, dtype=np.int64)) * self.dtype.itemsize


def layout_and_shapes(row: Mapping[str, Any]) -> tuple[Layout, tuple[int, ...], tuple[int, ...]]:
    """Return the layout, the shape of the whole array and the shape of a part, from a row of a signature."""
    dims = tuple(row["dims"])
    return layout_of(row.get("layout") or [[] for _ in dims]), tuple(row.get("whole", dims)), dims


def cut_of(mesh: Mesh, row: Mapping[str, Any]) -> Cut:
    """Return the partition over ``mesh`` of an argument or result, given as a row of a signature."""
    layout, whole, dims = layout_and_shapes(row)
    first: dict[tuple[int, ...], int] = {}
    ranks = range(mesh.size)
    owners = tuple(first.setdefault(part_of_rank(mesh, layout, rank), rank) for rank in ranks)
    slices = tuple(slices_of_rank(mesh, layout, rank, dims) for rank in ranks)
    return Cut(to_numpy(row["dtype"]), whole, dims, owners, slices)


class FunctionCuts:
    """How the arguments and the results of a function are cut into the parts of ranks.

    Attributes
    ----------
    arguments, results : tuple of Cut
    """

    def __init__(self, mesh: Mesh, signature: Signature) -> None:
        self.arguments = tuple(cut_of(mesh, row) for row in signature.arguments)
        self.results = tuple(cut_of(mesh, row) for row in signature.results)


def whole_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of a signature with the shape of the whole array, and without donation."""
    kept = {key: value for key, value in row.items() if key not in ("layout", "whole")}
    donated = {"donated": False, "donatable": False} if "donated" in row else {}
    return {**kept, "dims": list(row.get("whole", row["dims"])), **donated}


def whole_signature(signature: Signature) -> Signature:
    """Convert the signature of a rank's function to whole arrays."""
    found = Signature(signature.name, {"arguments": [], "results": []})
    found.__dict__.update(signature.__dict__)
    found.arguments = [whole_row(row) for row in signature.arguments]
    found.results = [whole_row(row) for row in signature.results]
    return found
