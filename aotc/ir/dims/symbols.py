"""Symbols of a dim, substitution, and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aotc.ir.dims.algebra import Atom, Call, Dim, Expr, Sym, expr_of_atom, floordiv, maximum, minimum, mod, product
from aotc.support.memoize import memoized

_CALLS = {"//": floordiv, "%": mod, "max": maximum, "min": minimum}


def symbols(e: Dim) -> set[Sym]:
    """Return the symbols in ``e``."""
    return set(_symbols_of_expression(e)) if isinstance(e, Expr) else set()


@memoized
def _symbols_of_expression(e: Expr) -> frozenset[Sym]:
    """Return the symbols in ``e``, also those inside of calls."""
    atoms: set[Sym] = set()
    stack: list[Dim] = [e]
    while stack:
        x = stack.pop()
        if isinstance(x, Expr):
            for monomial, _ in x.terms:
                for atom in monomial:
                    if isinstance(atom, Sym):
                        atoms.add(atom)
                    else:
                        stack += [atom.a, atom.b]
    return frozenset(atoms)


def calls_in(e: Dim) -> tuple[Call, ...]:
    """Return the calls (``//``, ``%``, ``max``, ``min``) in ``e``, including nested ones."""
    return _calls_of_expression(e) if isinstance(e, Expr) else ()


@memoized
def _calls_of_expression(e: Expr) -> tuple[Call, ...]:
    """Return the calls (``min``, ``//``, ...) in ``e``, also those nested in other calls."""
    calls: list[Call] = []
    stack: list[Dim] = [e]
    while stack:
        x = stack.pop()
        own = [a for monomial, _ in x.terms for a in monomial if isinstance(a, Call)] if isinstance(x, Expr) else []
        calls += own
        stack += [part for call in own for part in (call.a, call.b)]
    return tuple(calls)


@memoized
def count_atoms(e: Dim, most: int) -> int:
    """Return the number of symbols and calls in ``e``, or ``most + 1`` if there are more."""
    count = 0
    stack: list[Dim] = [e]
    while stack and count <= most:
        x = stack.pop()
        if isinstance(x, Expr):
            atoms = [atom for monomial, _ in x.terms for atom in monomial]
            count += len(atoms)
            stack += [part for atom in atoms if not isinstance(atom, Sym) for part in (atom.a, atom.b)]
    return min(count, most + 1)


def substitute(e: Dim, values: Mapping[str, Dim]) -> Dim:
    """Return ``e`` with symbols replaced, by name."""
    return _replace_in_dim(e, lambda s: values.get(s.name))


def substitute_symbols(e: Dim, values: Mapping[Sym, Dim]) -> Dim:
    """Return ``e`` with symbols replaced; other symbols of the same name stay."""
    return _replace_in_dim(e, values.get)


def _replace_in_dim(e: Dim, value_of: Callable[[Sym], Dim | None]) -> Dim:
    """Return ``e`` with each symbol replaced by ``value_of(symbol)``, unless that is None."""
    if not isinstance(e, Expr):
        return e
    if all(value_of(s) is None for s in symbols(e)):
        return e
    total: Dim = e.const
    for monomial, c in e.terms:
        total = total + product(_replace_atom(a, value_of) for a in monomial) * c
    return total


def _replace_atom(atom: Atom, value_of: Callable[[Sym], Dim | None]) -> Dim:
    """Return an atom with its symbols replaced; calls are simplified again."""
    if isinstance(atom, Sym):
        value = value_of(atom)
        return expr_of_atom(atom) if value is None else value
    return _CALLS[atom.fn](_replace_in_dim(atom.a, value_of), _replace_in_dim(atom.b, value_of))


def evaluate(e: Dim, values: Mapping[str, int]) -> int:
    """Return the value of ``e`` under ``values``.

    Raises
    ------
    KeyError
        If a symbol has no value.
    """
    if not isinstance(e, Expr):
        return e
    result = substitute(e, values)
    if isinstance(result, Expr):
        raise KeyError(f"no value for {sorted(s.name for s in symbols(result))} in {e}")
    return result
