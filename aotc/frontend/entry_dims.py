"""Solve a module's shape assertions for the dims of its arguments.

JAX checks ``x.shape == (2*b, b + 1)`` by asserting ``d0 % 2 == 0`` and ``d1 == d0 // 2 + 1`` on sizes that are plain
unknowns. Solving these equations before the import gives the dims ``2*b`` and ``b + 1``, so that shapes inside the
model are provably equal, without comparisons at run time.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Collection, Iterable, Iterator

from aotc.ir.dims.algebra import Call, Dim, Expr, Sym, lone_atom, sym
from aotc.ir.dims.symbols import substitute, symbols
from aotc.ir.tensor.ir import Requirement

Shapes = list[tuple[Dim, ...]]

# Names that aotc generates: for sizes without a name, sizes and values of arguments, and computed sizes. _RESERVED adds
# the words of the text of both IRs, which is read as Python.
_OURS = (r"d\d+", r"size_\d+_\d+", r"arg\d+", r"arg\d+_\d+", r"value_\d+")
_RESERVED = re.compile("|".join([*_OURS, "dim", "inf", "nan", *keyword.kwlist]))


def symbols_of_labels(labels: Collection[str]) -> dict[str, Dim]:
    """Return a symbol for each dim name of the model; a name that aotc reserves gets a suffix.

    Parameters
    ----------
    labels : collection of str
        All dim names of the model: ``b`` stays; ``for`` and ``d0`` become ``for_dim`` and ``d0_dim``.
    """
    names: dict[str, str] = {}
    for label in sorted(labels):
        name = label
        if not label.isidentifier() or _RESERVED.fullmatch(label):
            name = re.sub(r"\W|^(?=\d)", "_", label) + "_dim"
            while name in labels or name in names.values():
                name += "_"
        names[label] = name
    return {label: sym(name) for label, name in names.items()}


def solve_entry_dims(requirements: Iterable[Requirement], shapes: Shapes) -> Shapes:
    """Return ``shapes`` with symbols replaced by the solutions of the assertions.

    Parameters
    ----------
    requirements : iterable of Requirement
        Conditions on every call of the function, from an import with a plain unknown for each size in ``shapes``.
    shapes : list of tuple of Dim
        The dims of the function's arguments.
    """
    for left, right in _asserted_shape_equations(
        requirements, {s.name for dims in shapes for d in dims for s in symbols(d)}
    ):
        names = {s.name for dims in shapes for d in dims for s in symbols(d)}
        solved = _solve_for_symbol(left, right, names)
        if solved:
            shapes = [tuple(substitute(d, solved) for d in dims) for dims in shapes]
    return shapes


def _asserted_shape_equations(requirements: Iterable[Requirement], unknowns: set[str]) -> Iterator[tuple[Dim, Dim]]:
    """Yield left and right side of each asserted equality of sizes, with earlier solutions substituted."""
    done: dict[str, Dim] = {}
    for relation, first, second, *_ in requirements:
        left, right = (substitute(e, done) for e in (first, second))
        names = {s.name for e in (left, right) for s in symbols(e)}
        if relation != "eq" or not names <= unknowns:  # a value of an argument is not a size
            continue
        solution = _solve_for_symbol(left, right, names) or {}
        done = {**{k: substitute(v, solution) for k, v in done.items()}, **solution}
        yield left, right


def _solve_for_symbol(left: Dim, right: Dim, names: set[str]) -> dict[str, Dim] | None:
    """Solve ``left == right`` for one of its symbols; return its name with the solution, or None."""
    difference = left - right
    if not isinstance(difference, Expr):
        return None
    if right == 0 and (multiple := _multiple_of(left)):
        divided, factor = multiple
        return {divided.name: factor * sym(divided.name)} if divided.name in names else None
    for side, other in ((left, right), (right, left)):
        symbol = lone_atom(side)
        if isinstance(symbol, Sym) and symbol.name in names and symbol not in symbols(other):
            return {symbol.name: other}
    for monomial, k in difference.terms:
        atom = monomial[0]
        if len(monomial) != 1 or not isinstance(atom, Sym) or abs(k) != 1 or atom.name not in names:
            continue
        rest = difference - k * sym(atom.name)
        if atom not in symbols(rest):
            return {atom.name: rest * -k}
    return None


def _multiple_of(e: Dim) -> tuple[Sym, int] | None:
    """Return the symbol ``x`` and the integer ``k`` if ``e`` is ``x % k``, else None."""
    call = lone_atom(e)
    if not isinstance(call, Call) or call.fn != "%" or not isinstance(call.b, int):
        return None
    symbol = lone_atom(call.a)
    return (symbol, call.b) if isinstance(symbol, Sym) else None
