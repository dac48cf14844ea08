"""Kernels that take an array row by row along one dim: their grid, and where an element lies."""

from __future__ import annotations

from aotc.ir.dims import Dim, product, sym
from aotc.ir.loop_ir import Const, For, Stmt
from aotc.lowering.analysis.index_maps import delinearize
from aotc.lowering.regions.ops.sorting_radix import Place


def rows_of(shape: tuple[Dim, ...], dim: int) -> tuple[Dim, Place]:
    """Return the number of rows along ``dim`` and the index of an element of row ``p``."""
    others = [d for d in range(len(shape)) if d != dim]
    rows = product(shape[d] for d in others)
    at = delinearize(sym("p", 0, rows) if rows != 1 else 0, [shape[d] for d in others])
    return rows, lambda k: (*at[:dim], k, *at[dim:])


def over_rows(rows: Dim, body: list[Stmt]) -> tuple[Stmt, ...]:
    """Return the body of a kernel that runs ``body`` for each row ``p``."""
    return tuple(body) if rows == 1 else (For("p", 0, rows, tuple(body), "parallel"),)


def integer(value: int) -> Const:
    """Return an i64 literal."""
    return Const(value, "i64")
