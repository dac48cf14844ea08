"""Comparisons of dims by the bounds of their symbols, and the largest value of a dim in loops.

Dims have no order: the meaning of ``n < 4`` depends on the purpose. :func:`is_provable_relation` is for conditions that
must hold in every call, :func:`is_possible_relation` for conditions that may hold in one.
"""

from __future__ import annotations

from collections.abc import Mapping

from aotc.ir.dims.algebra import Atom, Call, Dim, Expr, Sym, bounds, expr_of_atom, floordiv, maximum, minimum, product
from aotc.ir.dims.symbols import symbols


def decide_relation(relation: str, a: Dim, b: Dim) -> bool | None:
    """Return True if ``a relation b`` holds for all values of the symbols, False if for none, else None.

    Parameters
    ----------
    relation : str
        ``eq``, ``ne``, ``lt``, ``le``, ``gt`` or ``ge``.
    a, b : Dim
    """
    low, high = bounds(a - b)
    below, not_above = high is not None and high < 0, high is not None and high <= 0
    above, not_below = low is not None and low > 0, low is not None and low >= 0
    same, different = a == b or (not_above and not_below), below or above
    match relation:
        case "eq":
            proven, refuted = same, different
        case "ne":
            proven, refuted = different, same
        case "lt":
            proven, refuted = below, not_below
        case "le":
            proven, refuted = not_above, above
        case "gt":
            proven, refuted = above, not_above
        case _:
            proven, refuted = not_below, below
    return True if proven else False if refuted else None


def is_provable_relation(relation: str, a: Dim, b: Dim) -> bool:
    """Return True if ``a relation b`` holds for all values of the symbols."""
    return decide_relation(relation, a, b) is True


def is_possible_relation(relation: str, a: Dim, b: Dim) -> bool:
    """Return False only if ``a relation b`` holds for no values of the symbols."""
    return decide_relation(relation, a, b) is not False


def upper_bound_in_loops(e: Dim, extents: Mapping[str, Dim]) -> Dim | None:
    """Return an upper bound of ``e`` in loops that start at 0, or None if it is unknown.

    Parameters
    ----------
    e : Dim
    extents : mapping of str to Dim
        Number of iterations of each loop, by its variable. The bound does not contain these variables.

    Notes
    -----
    A ``min`` is bounded by an operand without loop variables, so that a static bound stays static.
    """
    if not isinstance(e, Expr) or not _varies_in_loops(e, extents):
        return e
    total: Dim = e.const
    for monomial, coefficient in e.terms:
        atoms: list[Dim] = [expr_of_atom(atom) for atom in monomial]
        if any(_varies_in_loops(atom, extents) for atom in atoms):
            grows = coefficient > 0 and (len(atoms) == 1 or all(is_provable_relation("ge", atom, 0) for atom in atoms))
            tops = [_largest_atom(atom, extents) for atom in monomial]
            if not grows or any(top is None for top in tops):
                return bounds(e)[1]
            atoms = [top for top in tops if top is not None]
        total = total + product(atoms) * coefficient
    return total


def _varies_in_loops(e: Dim, extents: Mapping[str, Dim]) -> bool:
    return any(s.name in extents for s in symbols(e))


def _largest_atom(atom: Atom, extents: Mapping[str, Dim]) -> Dim | None:
    """Return an upper bound of ``atom`` for loop variables below ``extents``, or None if none can be derived."""
    if isinstance(atom, Sym):
        return extents[atom.name] - 1 if atom.name in extents else expr_of_atom(atom)
    a, b = (upper_bound_in_loops(x, extents) for x in (atom.a, atom.b))
    match atom:
        case Call(fn="min"):
            fixed = [x for x in (atom.a, atom.b) if not _varies_in_loops(x, extents)]
            tops = fixed or [x for x in (a, b) if x is not None]
            return minimum(tops[0], tops[-1]) if tops else None
        case Call(fn="max"):
            return None if a is None or b is None else maximum(a, b)
        case Call(fn="%", b=count) if not _varies_in_loops(count, extents):
            return count - 1
        case Call(fn="//", b=count) if a is not None and not _varies_in_loops(count, extents):
            return floordiv(a, count)
    return None
