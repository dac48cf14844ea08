"""Loop nests over an iteration space: merge axes, and emit loops over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from aotc.ir.dims.algebra import Dim, Expr, Sym, expr_of_atom, minimum, product, sym
from aotc.ir.dims.symbols import symbols
from aotc.ir.loop.access import loads_and_indices, statement_scalars, statement_sizes
from aotc.ir.loop.ir import ExternalCall, For, Load, LoopKind, Prefetch, Scalar, Stmt, Store, walk
from aotc.lowering.analysis.anchors import loop_name, single_axis
from aotc.lowering.analysis.index_maps import Index, delinearize, linearize

Emit = Callable[[list[Stmt], Index], None]


@dataclass(frozen=True, slots=True)
class NestAxis:
    """A loop axis: consecutive axes of the iteration space that one loop of ``extent`` runs over."""

    members: tuple[int, ...]
    extent: Dim
    name: str

    def symbol(self, lo: int = 0, end: Dim | None = None) -> Dim:
        """Return the loop symbol, restricted to ``[lo, end)`` if given."""
        return sym(self.name, lo, self.extent if end is None else end)


def loop_in_steps(
    block: list[Stmt], name: str, begin: Dim, extent: Dim, some: int, emit: Callable[[list[Stmt], list[Dim]], None]
) -> None:
    """Append a loop over ``extent`` indices from ``begin`` on, ``some`` per iteration, and a loop over the rest."""
    whole = extent // some
    for count, first, each in ((whole, begin, some), (extent - whole * some, begin + whole * some, 1)):
        if count != 0:
            iteration: list[Stmt] = []
            q = sym(name, 0, count)
            emit(iteration, [first + q * each + r for r in range(each)])
            block.append(For(name, 0, count, tuple(iteration)))


def buffer_addresses(body: Iterable[Stmt]) -> list[Dim]:
    """Return all flat buffer offsets in ``body``, and all indices used as values."""
    addresses: list[Dim] = []
    scalars: list[Scalar] = []
    for stmt in walk(tuple(body)):
        scalars += statement_scalars(stmt)
        addresses += statement_sizes(stmt)
        match stmt:
            case Store(buffer=buffer, index=index) | Prefetch(buffer=buffer, index=index):
                addresses.append(linearize(index, buffer.shape))
            case ExternalCall(args=places):
                addresses += [linearize(index, buffer.shape) for buffer, index in places]
    for leaf in loads_and_indices(scalars):
        addresses.append(linearize(leaf.index, leaf.buffer.shape) if isinstance(leaf, Load) else leaf.expr)
    return addresses


def axis_coefficient(e: Dim, axis: Sym) -> Dim | None:
    """Return the factor ``c`` of ``axis`` in ``e == c*axis + rest``; None if not linear in it."""
    if not isinstance(e, Expr):
        return 0
    total: Dim = 0
    for monomial, c in e.terms:
        rest = [a for a in monomial if a != axis]
        if len(rest) == len(monomial):
            if any(axis in symbols(expr_of_atom(a)) for a in monomial):
                return None
            continue
        if len(rest) < len(monomial) - 1 or any(axis in symbols(expr_of_atom(a)) for a in rest):
            return None
        total = total + Expr(0, ((tuple(rest), c),)) if rest else total + c
    return total


def mergeable_axes(
    space: Index, shape: Sequence[Dim], axes: Sequence[int], used: Sequence[Dim]
) -> list[tuple[int, ...]]:
    """Return the groups of neighbouring ``axes`` that can be one loop without a change of any address in ``used``."""
    groups: list[tuple[int, ...]] = []
    table = {k: [axis_coefficient(e, axis) for e in used] for k in axes if (axis := single_axis(space[k])) is not None}
    for k in axes:
        last = groups[-1][-1] if groups else None
        if last is not None and all(
            a is not None and b is not None and a == b * shape[k] for a, b in zip(table[last], table[k], strict=True)
        ):
            groups[-1] = (*groups[-1], k)
        else:
            groups.append((k,))
    return groups


def merged_loops(space: Index, shape: Sequence[Dim], trial: Iterable[Stmt]) -> tuple[tuple[int, ...], ...]:
    """Return the axes of each loop over ``space``, merged as far as the addresses in ``trial`` statements allow."""
    axes = [k for k, s in enumerate(space) if s != 0]
    return tuple(mergeable_axes(space, shape, axes, buffer_addresses(trial)))


def make_axes(shape: Sequence[Dim], groups: Sequence[tuple[int, ...]], prefix: str = "j") -> list[NestAxis]:
    """Return the loop axes for groups of axes of ``shape``."""
    names = [loop_name(g[0]) if len(g) == 1 else f"{prefix}{g[0]}" for g in groups]
    return [NestAxis(g, product(shape[k] for k in g), name) for g, name in zip(groups, names, strict=True)]


def substitute_loops(space: Index, shape: Sequence[Dim], axes: Sequence[NestAxis], symbols: Sequence[Dim]) -> Index:
    """Return ``space`` with the loop symbols of ``axes`` substituted for its own."""
    at = list(space)
    for axis, s in zip(axes, symbols, strict=True):
        for k, e in zip(axis.members, delinearize(s, [shape[k] for k in axis.members]), strict=True):
            at[k] = e
    return tuple(at)


def append_serial_loops(
    axes: Sequence[NestAxis],
    symbols: list[Dim],
    emit: Callable[[list[Stmt], list[Dim]], None],
    block: list[Stmt],
    unroll: Callable[[Dim], bool] = lambda _: False,
) -> None:
    """Append serial loops over ``axes`` around the statements of ``emit``, unrolled where ``unroll(extent)``."""
    if not axes:
        emit(block, symbols)
        return
    axis = axes[0]
    inner: list[Stmt] = []
    append_serial_loops(axes[1:], [*symbols, axis.symbol()], emit, inner, unroll)
    kind: LoopKind = "unroll" if unroll(axis.extent) else "serial"
    block.append(For(axis.name, 0, axis.extent, tuple(inner), kind))


def split_grid(axes: Sequence[NestAxis], work: int) -> tuple[list[NestAxis], list[NestAxis]]:
    """Split loop axes into the grid (parallel) and the loops of one item (serial).

    Trailing axes become loops of the item until it has ``work`` elements. An axis of symbolic extent is the last one
    added.
    """
    inner: list[NestAxis] = []
    outer = list(axes)
    size = 1
    while outer:
        axis = outer[-1]
        if inner and (not isinstance(axis.extent, int) or size * axis.extent > work):
            break
        inner.insert(0, outer.pop())
        if not isinstance(axis.extent, int):
            break
        size *= axis.extent
        if size >= work:
            break
    return outer, inner


def grid_loop(
    outer: Sequence[NestAxis],
    chunk: tuple[NestAxis, int] | None,
    emit: Callable[[list[Stmt], list[Dim], Dim, Dim], None],
    inside: int = 0,
) -> tuple[Dim, tuple[Stmt, ...]]:
    """Return the grid size and the parallel loop over grid items.

    ``emit(block, outer symbols, begin, end)`` appends the statements of one grid item. ``[begin, end)`` is the item's
    range of the chunked axis, (0, 0) without one. The last ``inside`` axes of ``outer`` vary faster than the chunks.
    """
    extents = [a.extent for a in outer]
    place = len(extents) - inside
    if chunk:
        extents.insert(place, (chunk[0].extent + (chunk[1] - 1)) // chunk[1])
    grid = product(extents)
    # A single item needs no loop: all its symbols are 0.
    if grid == 1:
        block: list[Stmt] = []
        zero: list[Dim] = [0] * len(outer)
        emit(block, zero, 0, chunk[0].extent if chunk else 0)
        return 1, tuple(block)
    p = sym("p", 0, grid)
    at = list(delinearize(p, extents))
    block = []
    if chunk:
        begin = at.pop(place) * chunk[1]
        emit(block, at, begin, minimum(begin + chunk[1], chunk[0].extent))
    else:
        emit(block, at, 0, 0)
    return grid, (For("p", 0, grid, tuple(block), "parallel"),)
