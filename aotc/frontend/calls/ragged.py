"""Ragged matmuls (``jax.lax.ragged_dot``) as batched matmuls over tiles, each with rows of one group only.

A ragged matmul multiplies each group of rows by its own matrix. JAX lowers it to one copy of the left operand per
group, with zeros outside of the group: ``groups`` times as much work as necessary. Here the rows (for the gradient of
the right operand: the terms) are split into tiles; each group starts a new tile. This is a batched matmul::

        group of tile z          number of groups that end before the tile
    rows[z, t]               start of the group + its tiles before z * T + t
    x[rows] @ w[group]       the batch; rows beyond a group's end are ignored

So NaN and infinities of one group never reach the results of another.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.interpreters import mlir
from jax._src.lax import lax

# Rows of a tile of a ragged matmul, at least. Smaller tiles copy more matrices for the same work.
TILE_ROWS = 8


def ragged_rules() -> tuple[tuple[Any, Callable[..., Any]], ...]:
    """Return the lowering rule for ``ragged_dot_general``."""
    return ((lax.ragged_dot_general_p, _lower_ragged_dot),)


def _lower_ragged_dot(ctx: Any, *operands: Any, **params: Any) -> Any:
    """Lower ``ragged_dot_general`` by a trace of :func:`ragged_dot`."""
    return mlir.lower_fun(ragged_dot, multiple_results=False)(ctx, *operands, **params)


def ragged_dot(lhs: Any, rhs: Any, sizes: Any, **params: Any) -> Any:
    """Return a ragged matmul: by tiles for one ragged dim of known size without batch, else by JAX's lowering."""
    numbers = params["ragged_dot_dimension_numbers"]
    (lhs_contract, rhs_contract), batch = numbers.dot_dimension_numbers
    (ragged,) = numbers.lhs_ragged_dimensions
    static_sizes = all(isinstance(d, int) and d > 0 for x in (lhs, rhs, sizes) for d in x.shape)
    plain = static_sizes and lhs.ndim == 2 and len(lhs_contract) == 1 and not any(batch) and sizes.ndim == 1
    dot = partial(lax.dot_general, precision=params["precision"])
    dtype = params.get("preferred_element_type") or jnp.result_type(lhs, rhs)
    others = params.get("group_offset"), params.get("out_sharding")
    if plain and others == (None, None):
        if ragged not in lhs_contract and rhs.ndim == 3:
            (group,) = numbers.rhs_group_dimensions
            (column,) = {0, 1, 2} - {group, rhs_contract[0]}
            x, w = jnp.moveaxis(lhs, ragged, 0), jnp.transpose(rhs, (group, rhs_contract[0], column))
            return _ragged_matmul_of_rows(x, w, sizes, partial(dot, preferred_element_type=dtype))
        many = lhs.shape[ragged] >= TILE_ROWS * sizes.shape[0]
        if ragged in lhs_contract and rhs.ndim == 2 and many and jnp.issubdtype(dtype, jnp.floating):
            x, w = jnp.moveaxis(lhs, ragged, 0), jnp.moveaxis(rhs, rhs_contract[0], 0)
            sums = jnp.promote_types(dtype, jnp.float32)
            return _ragged_matmul_of_terms(x, w, sizes, partial(dot, preferred_element_type=sums)).astype(dtype)
    return lax._ragged_dot_general_impl(lhs, rhs, sizes, **params)


# Rows of a tile of a ragged matmul, at most. Rows beyond the end of a group are multiplied in vain, half a tile of each
# group on average. Measured on a CPU: 512 rows in 8 groups with 512 x 512 take 5.2, 4.8 and 5.5 ms with tiles of 32, 64
# and 128 rows.
MOST_TILE_ROWS = 128


def tile_rows(rows: int, groups: int) -> int:
    """Return the number of rows of a tile: a power of two near the mean group size."""
    return min(max(1 << (-(-rows // groups) - 1).bit_length(), TILE_ROWS), MOST_TILE_ROWS)


class _GroupTiles:
    """Division of the rows of a ragged matmul into tiles that belong to one group each.

    Attributes
    ----------
    rows : int
        Rows of a tile.
    number : int
        Upper bound of the number of tiles, for any group sizes.
    group : array
        The group of each tile.
    place : array
        The row numbers of each tile, shape (number, rows); they may be beyond the end of the group.
    inside : array
        Mask of the rows of each tile that belong to its group, shape (number, rows).
    """

    def __init__(self, count: int, sizes: Any) -> None:
        """Divide the rows of each group into tiles of ``rows`` rows; the last tile of a group may be padded.

        ``place`` is the row of the operand for each row of each tile; ``inside`` is False for padding.
        """
        groups = sizes.shape[0]
        self.count, self.groups, self.rows = count, groups, tile_rows(count, groups)
        self.number = min(count, count // self.rows + groups)
        self.sizes = sizes.astype(jnp.int32)
        self.end = jax.lax.cumsum(self.sizes)
        each = (self.sizes + (self.rows - 1)) // self.rows
        self.tile_end = jax.lax.cumsum(each)
        self.tile_begin = self.tile_end - each
        tiles = jnp.arange(self.number, dtype=jnp.int32)
        self.group = self._group_containing(self.tile_end, tiles)
        first = (tiles - _element_at(self.tile_begin, self.group)) * self.rows
        within = first[:, None] + jnp.arange(self.rows, dtype=jnp.int32)[None, :]
        begin = _element_at(self.end, self.group) - _element_at(self.sizes, self.group)
        self.place = begin[:, None] + within
        whole = (tiles < self.tile_end[-1])[:, None]
        self.inside = whole & (within < _element_at(self.sizes, self.group)[:, None])

    def _group_containing(self, ends: Any, numbers: Any) -> Any:
        """Return the group whose range contains each of ``numbers``, or the last group for larger numbers."""
        before = (ends[None, :] <= numbers[:, None]).astype(jnp.int32)
        return jnp.minimum(before.sum(1, dtype=jnp.int32), self.groups - 1)

    def rows_in_original_order(self, results: Any) -> Any:
        """Return rows of tile results (number, rows, columns) in original order; 0 for rows after all groups."""
        rows = jnp.arange(self.count, dtype=jnp.int32)
        group = self._group_containing(self.end, rows)
        begin = _element_at(self.end, group) - _element_at(self.sizes, group)
        at = _element_at(self.tile_begin, group) * self.rows + (rows - begin)
        rows_of_results = _element_at(results.reshape(self.number * self.rows, results.shape[-1]), at)
        return jnp.where((rows < self.end[-1])[:, None], rows_of_results, jnp.zeros((), rows_of_results.dtype))


def _element_at(x: Any, index: Any) -> Any:
    return jnp.take(x, index, axis=0, mode="clip")


def _ragged_matmul_of_rows(x: Any, w: Any, sizes: Any, dot: Callable[..., Any]) -> Any:
    """Multiply each row of ``x`` (rows, terms) by the matrix of its group in ``w`` (groups, terms, n)."""
    tiles = _GroupTiles(x.shape[0], sizes)
    products = dot(_element_at(x, tiles.place), _element_at(w, tiles.group), (((2,), (1,)), ((0,), (0,))))
    return tiles.rows_in_original_order(products)


def _ragged_matmul_of_terms(x: Any, w: Any, sizes: Any, dot: Callable[..., Any]) -> Any:
    """Multiply ``x`` (terms, m), transposed, by ``w`` (terms, n) for each group's terms: (groups, m, n)."""
    tiles = _GroupTiles(x.shape[0], sizes)
    pieces = (jnp.where(tiles.inside[:, :, None], _element_at(v, tiles.place), jnp.zeros((), v.dtype)) for v in (x, w))
    parts = dot(*pieces, (((1,), (1,)), ((0,), (0,))))
    return jnp.zeros((tiles.groups, *parts.shape[1:]), parts.dtype).at[tiles.group].add(parts)
