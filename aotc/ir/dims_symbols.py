"""What a dim mentions, and what it is when something stands for that: symbols, substitution, numbers."""

from __future__ import annotations

from collections.abc import Mapping

from aotc.ir.dims import Atom, Dim, Expr, Sym, floordiv, maximum, minimum, mod, product

_CALLS = {"//": floordiv, "%": mod, "max": maximum, "min": minimum}


def symbols(e: Dim) -> set[Sym]:
    """Return the symbols that ``e`` mentions."""
    found: set[Sym] = set()
    stack: list[Dim] = [e]
    while stack:
        x = stack.pop()
        if isinstance(x, Expr):
            for monomial, _ in x.terms:
                for atom in monomial:
                    if isinstance(atom, Sym):
                        found.add(atom)
                    else:
                        stack += [atom.a, atom.b]
    return found


def substitute(e: Dim, values: Mapping[str, Dim]) -> Dim:
    """Return ``e`` with symbols replaced by name."""
    if not isinstance(e, Expr):
        return e
    if not any(s.name in values for s in symbols(e)):
        return e
    total: Dim = e.const
    for monomial, c in e.terms:
        total = total + product(_substitute_atom(a, values) for a in monomial) * c
    return total


def _substitute_atom(atom: Atom, values: Mapping[str, Dim]) -> Dim:
    if isinstance(atom, Sym):
        return values.get(atom.name, Expr(0, (((atom,), 1),)))
    return _CALLS[atom.fn](substitute(atom.a, values), substitute(atom.b, values))


def evaluate(e: Dim, values: Mapping[str, int]) -> int:
    """Return the number that ``e`` has under ``values``.

    Raises
    ------
    KeyError
        If a symbol has no value.
    """
    result = substitute(e, values)
    if isinstance(result, Expr):
        raise KeyError(f"no value for {sorted(s.name for s in symbols(result))} in {e}")
    return result
