"""Meshes of ranks, and the partition of arrays over mesh axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

RANK_CALL = "aotc."
"""Prefix of the custom calls that the runtime of a rank answers: ``aotc.all_reduce``, ``aotc.partition_id``."""


class Mesh(NamedTuple):
    """Ranks in a grid with named axes.

    Attributes
    ----------
    axes : tuple of (str, int)
        Name and size of each axis, slowest first.
    devices : tuple of int
        The rank at each position of the grid, in row-major order; empty: 0, 1, 2...
    """

    axes: tuple[tuple[str, int], ...]
    devices: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return prod(size for _, size in self.axes)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the position of a rank along each axis."""
        at = self.devices.index(rank) if self.devices else rank
        found = {}
        for name, size in reversed(self.axes):
            at, found[name] = divmod(at, size)
        return found

    def entry(self) -> dict[str, Any]:
        """Return the manifest's entry."""
        devices = {"devices": list(self.devices)} if self.devices else {}
        return {"axes": [list(axis) for axis in self.axes], **devices}

    def __str__(self) -> str:
        return " x ".join(f"{name}={size}" for name, size in self.axes)


def mesh_of(entry: Mapping[str, Any]) -> Mesh:
    """Return the mesh of a manifest's entry."""
    return Mesh(tuple((name, size) for name, size in entry["axes"]), tuple(entry.get("devices", ())))


Layout = tuple[tuple[str, ...], ...]
"""The axes of a mesh over which each dim of an array is cut, the slowest first; without axes a dim is whole."""


def layout_of(entry: Sequence[Sequence[str]]) -> Layout:
    """Return the layout of a manifest's entry."""
    return tuple(tuple(axes) for axes in entry)


def parts_of_dims(mesh: Mesh, layout: Layout) -> tuple[int, ...]:
    """Return, for each dim of an array, the number of parts into which its mesh axes split it."""
    sizes = dict(mesh.axes)
    return tuple(prod(sizes[axis] for axis in axes) for axes in layout)


def part_of_rank(mesh: Mesh, layout: Layout, rank: int) -> tuple[int, ...]:
    """Return, for each dim of an array, the index of the part that a rank has."""
    sizes, at = dict(mesh.axes), mesh.coordinates(rank)
    found = []
    for axes in layout:
        number = 0
        for axis in axes:
            number = number * sizes[axis] + at[axis]
        found.append(number)
    return tuple(found)


def whole_shape(mesh: Mesh, layout: Layout, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the whole array; ``shape`` is the shape of a rank's part."""
    return tuple(n * parts for n, parts in zip(shape, parts_of_dims(mesh, layout), strict=True))


def slices_of_rank(mesh: Mesh, layout: Layout, rank: int, shape: Sequence[int]) -> tuple[slice, ...]:
    """Return the slices of the whole array that are a rank's part, whose shape is ``shape``."""
    at = part_of_rank(mesh, layout, rank)
    return tuple(slice(k * n, (k + 1) * n) for k, n in zip(at, shape, strict=True))


def layout_text(layout: Layout) -> str:
    """Return a layout as text: ``data, -, model``; several axes of a dim are joined, as ``data+model``."""
    return ", ".join("+".join(axes) or "-" for axes in layout)
