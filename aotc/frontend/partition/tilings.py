"""Find the mesh axes by which XLA has partitioned an array."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from aotc.vmfb.ranks.layout import Layout, Mesh


def mesh_of_factors(count: int) -> Mesh:
    """Return a mesh of ``count`` ranks with an axis for each prime factor of ``count``."""
    factors, rest, divisor = [], count, 2
    while rest > 1:
        while rest % divisor == 0:
            factors.append(divisor)
            rest //= divisor
        divisor += 1
    return Mesh(tuple((f"axis{n}", size) for n, size in enumerate(factors)))


def layout_of_tiling(mesh: Mesh, tiling: Mapping[str, Any], rank: int) -> Layout | None:
    """Return the mesh axes that partition each dim of an array; None if XLA's parts are not whole axes.

    Parameters
    ----------
    mesh : Mesh
        The ranks and their axes.
    tiling : mapping
        ``parts``: number of parts of each dim; ``devices``: device numbers in the order of the parts, replicas of a
        part one after another. An empty mapping means an array that is whole.
    rank : int
        Number of dims of the array.
    """
    if not tiling:
        return ((),) * rank
    parts = tiling["parts"]
    devices = np.array(tiling["devices"]).reshape(prod(parts), -1)
    numbers = np.empty(mesh.size, np.int64)
    numbers[devices] = np.arange(prod(parts))[:, None]  # the part that each device has
    order = np.array(mesh.devices or range(mesh.size))
    places = np.unravel_index(np.arange(mesh.size), [size for _, size in mesh.axes])
    at = {name: where for (name, _), where in zip(mesh.axes, places, strict=True)}
    part_numbers = np.unravel_index(numbers[order], parts)
    layout: list[tuple[str, ...]] = []
    for count, numbers_of_dim in zip(parts, part_numbers, strict=True):
        axes = _axes_of_dim(mesh, at, count, numbers_of_dim)
        if axes is None:
            return None
        layout.append(axes)
    return tuple(layout)


def _axes_of_dim(mesh: Mesh, at: Mapping[str, Any], count: int, part_numbers: np.ndarray) -> tuple[str, ...] | None:
    """Return the axes that number the parts of a dim, the slowest first; None if there are none.

    The step of an axis is the number of the part one place further along it.
    """
    strides = np.cumprod([1, *(size for _, size in reversed(mesh.axes))])[-2::-1]
    steps = [(int(part_numbers[s]), name, n) for (name, n), s in zip(mesh.axes, strides, strict=True) if n > 1]
    axes = [(name, size) for step, name, size in sorted(steps, reverse=True) if step > 0]
    number = np.zeros(mesh.size, np.int64)
    for name, size in axes:
        number = number * size + at[name]
    fits = prod(size for _, size in axes) == count and np.array_equal(number, part_numbers)
    return tuple(name for name, _ in axes) if fits else None
