"""Grid and indices of kernels that process an array row by row, along one of its dims."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aotc.ir.dims.algebra import Dim, minimum, product
from aotc.lowering.analysis.index_maps import Index, delinearize
from aotc.lowering.elements.builder import grid_item

Place = Callable[[Dim], Index]


def rows_along_dim(shape: Sequence[Dim], dim: int) -> tuple[Dim, Place]:
    """Return the number of rows along ``dim``, and a function from a position in row ``p`` to an index."""
    others = [d for d in range(len(shape)) if d != dim]
    rows = product(shape[d] for d in others)
    at = delinearize(grid_item(rows), [shape[d] for d in others])
    return rows, lambda k: (*at[:dim], k, *at[dim:])


class RowBlocks:
    """Division of an array's rows among grid items.

    The array is seen as ``[outer, n, inner]``. A row has the ``n`` elements along the middle axis; a grid item takes up
    to ``block`` rows that are neighbours along ``inner``.

    Attributes
    ----------
    n : Dim
        Length of a row.
    block : Dim
        Rows per item; the last item of an ``outer`` may have fewer.
    width : Dim
        Rows of this item.
    items : Dim
        Size of the grid.
    """

    def __init__(self, shape: Sequence[Dim], dim: int, most: int) -> None:
        """Divide the rows along ``dim`` into items of at most ``most`` neighbouring rows."""
        self._lead, self.n, self._tail = shape[:dim], shape[dim], shape[dim + 1 :]
        inner = product(self._tail)
        self.block: int = min(most, inner) if isinstance(inner, int) else most
        blocks: Dim = -(-inner // self.block)
        self.items = product(self._lead) * blocks
        item = grid_item(self.items)
        cut = blocks != 1
        self._outer = item // blocks if cut else item
        self._start: Dim = item % blocks * self.block if cut else 0
        self.width = minimum(inner - self._start, self.block) if cut else inner

    def element_index(self, position: Dim, v: Dim) -> Index:
        """Return the index in the array of element ``position`` of row ``v`` of the item."""
        return (*delinearize(self._outer, self._lead), position, *delinearize(self._start + v, self._tail))
