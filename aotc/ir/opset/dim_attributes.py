"""Typed access to attributes whose values are dims: numbers, or expressions if sizes are symbolic.

``Op.attrs`` has values of any type, so a type checker accepts ``op.attrs["low"][0] > 0``, which fails at run time for
an expression. All code therefore reads these attributes by the functions below: as dims, which have no order (see
``aotc.ir.dims.compare``), or as numbers where they must be numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aotc.ir.dims.algebra import Dim, Expr, static

DIM_ATTRIBUTES = {
    "attention": ("causal",),
    "bind_dim": ("dim",),
    "conv": ("padding",),
    "convolution": ("padding",),
    "dim": ("expr",),
    "dynamic_slice": ("sizes",),
    "gather": ("slice_sizes",),
    "packed_conv": ("kernel", "n"),
    "packed_matmul": ("n",),
    "pad": ("low", "high", "interior"),
    "reduce_window": ("window", "padding"),
    "slice": ("start", "limit", "stride"),
    "top_k": ("k",),
}
"""By op, the attributes that may be expressions; all others are numbers."""

Attributes = Mapping[str, Any]


def dim_of(attrs: Attributes, name: str) -> Dim:
    """Return attribute ``name``, a single dim."""
    value: Dim = attrs[name]
    return value


def dims_of(attrs: Attributes, name: str) -> tuple[Dim, ...]:
    """Return attribute ``name``, a tuple with one dim for each axis."""
    values: tuple[Dim, ...] = tuple(attrs[name])
    return values


def pairs_of(attrs: Attributes, name: str = "padding") -> tuple[tuple[Dim, Dim], ...]:
    """Return attribute ``name`` as (before, after) pairs: the padding of each axis."""
    pairs: tuple[tuple[Dim, Dim], ...] = tuple(attrs[name])
    return pairs


def padding_of(attrs: Attributes, axes: int) -> tuple[tuple[Dim, Dim], ...]:
    """Return the ``padding`` of an op as (before, after) pairs, zeros for ``axes`` axes if the op has none."""
    return pairs_of(attrs) if "padding" in attrs else ((0, 0),) * axes


def numbers_of(attrs: Attributes, name: str) -> tuple[int, ...]:
    """Return attribute ``name`` as integers, one for each axis.

    Raises
    ------
    TypeError
        If a value is an expression; callers check :func:`has_expression` first.
    """
    return tuple(static(d) for d in attrs[name])


def number_pairs_of(attrs: Attributes, name: str = "padding") -> tuple[tuple[int, int], ...]:
    """Return attribute ``name`` as (before, after) pairs of integers; errors as in :func:`numbers_of`."""
    return tuple((static(low), static(high)) for low, high in attrs[name])


def has_expression(data: Any) -> bool:
    """Return True if the attribute value ``data`` contains a symbolic expression, at any depth."""
    match data:
        case Expr():
            return True
        case tuple() | list():
            return any(map(has_expression, data))
        case Mapping():
            return any(map(has_expression, data.values()))
    return False
