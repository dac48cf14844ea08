"""Integer expressions over named dims: the algebra of all shapes and indices.

A *dim* is a Python ``int`` or an :class:`Expr`. Expressions have a canonical form, a sum of integer multiples of
products of atoms, so that equal polynomials are structurally equal, and ``==`` proves equality::

    b = sym("b")
    (b + 1) * 2 == 2 * b + 2          # True
    (4 * b + 3) // 4 == b             # True
    4 * (x // 4) + x % 4 == x         # True

An *atom* is a symbol or a call of ``//``, ``%``, ``max`` or ``min``. Loop variables are symbols, too, with an exclusive
upper bound (``extent``), which helps to simplify the divisions of reshapes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import reduce
from typing import TypeAlias, Union

from aotc.support.memoize import memoized

Dim: TypeAlias = Union[int, "Expr"]


@dataclass(frozen=True, slots=True)
class Sym:
    """A named unknown ``lo <= name < extent`` (``extent`` None: unbounded)."""

    name: str
    lo: int = 0
    extent: Dim | None = None

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Call:
    """An atom ``fn(a, b)``; ``fn`` is ``//``, ``%``, ``max`` or ``min``."""

    fn: str
    a: Dim
    b: Dim

    def __str__(self) -> str:
        if self.fn in ("max", "min"):
            return f"{self.fn}({self.a}, {self.b})"
        right = _tightened(self.b)
        return f"{_tightened(self.a)} {self.fn} {f'({right})' if '*' in right and right[0] != '(' else right}"


Atom: TypeAlias = Sym | Call
Monomial: TypeAlias = tuple[Atom, ...]

Interval: TypeAlias = tuple[int | None, int | None]
"""Inclusive ends; None for an unknown one."""


def _tightened(e: Dim) -> str:
    text = str(e)
    return f"({text})" if " " in text or text.startswith("-") else text


@dataclass(frozen=True, slots=True)
class Expr:
    """A canonical sum ``const + sum(coefficient * product of atoms)``; only :func:`sym` and the operators build one."""

    const: int
    terms: tuple[tuple[Monomial, int], ...]
    _hash: int = field(init=False, compare=False, repr=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.const, self.terms)))

    def __hash__(self) -> int:
        return self._hash

    def __add__(self, other: Dim) -> Dim:
        if isinstance(other, Expr):
            return _sum_of_dims(self, other)
        return Expr(self.const + int(other), self.terms) if other else self

    __radd__ = __add__

    def __sub__(self, other: Dim) -> Dim:
        return _sum_of_dims(self, other, -1) if isinstance(other, Expr) else self + -int(other)

    def __rsub__(self, other: Dim) -> Dim:
        return _sum_of_dims(other, self, -1)

    def __neg__(self) -> Dim:
        return _sum_of_dims(0, self, -1)

    def __mul__(self, other: Dim) -> Dim:
        return _product_of_dims(self, other)

    __rmul__ = __mul__

    def __floordiv__(self, other: Dim) -> Dim:
        return floordiv(self, other)

    def __rfloordiv__(self, other: int) -> Dim:
        return floordiv(other, self)

    def __mod__(self, other: Dim) -> Dim:
        return mod(self, other)

    def __rmod__(self, other: int) -> Dim:
        return mod(other, self)

    @memoized
    def __str__(self) -> str:
        """Return the text of a sum, such as ``2*n - m + 1``, which parses to an equal expression."""
        parts: list[str] = []
        for monomial, coefficient in self.terms:
            factors = [_tightened_atom(a) for a in monomial]
            if abs(coefficient) != 1:
                factors.insert(0, str(abs(coefficient)))
            sign = "-" if coefficient < 0 else "+"
            parts.append(f" {sign} {'*'.join(factors)}")
        if self.const or not parts:
            parts.append(f" {'-' if self.const < 0 else '+'} {abs(self.const)}")
        text = "".join(parts)
        return text[3:] if text.startswith(" + ") else "-" + text[3:]


def _tightened_atom(atom: Atom) -> str:
    text = str(atom)
    return f"({text})" if isinstance(atom, Call) and atom.fn in ("//", "%") else text


@memoized
def sym(name: str, lo: int = 0, extent: Dim | None = None) -> Expr:
    """Return the expression of the symbol ``name``."""
    return Expr(0, (((Sym(name, lo, extent),), 1),))


def _make_sum(const: int, terms: dict[Monomial, int]) -> Dim:
    """Return the dim of a constant and terms; ``q * (x // q) + x % q`` becomes ``x``."""
    live = {m: c for m, c in terms.items() if c}
    if any(isinstance(m[0], Call) and m[0].fn == "%" for m in live if len(m) == 1):
        const, live = _join_div_and_mod(const, live)
    items = live.items() if len(live) < 2 else sorted(live.items(), key=lambda t: "*".join(map(str, t[0])))
    return Expr(const, tuple(items)) if live else const


def _join_div_and_mod(const: int, terms: dict[Monomial, int]) -> tuple[int, dict[Monomial, int]]:
    """Simplify ``k*d*(x // d) + k*(x % d)`` to ``k*x`` in a sum of terms."""
    for monomial, c in terms.items():
        atom = monomial[0] if len(monomial) == 1 else None
        if isinstance(atom, Call) and atom.fn in ("//", "%"):
            k, digits = _digits_completed_by(atom, c)
            if isinstance(digits, Expr) and all(terms.get(m) == n for m, n in digits.terms):
                rest = {m: n for m, n in terms.items() if m != monomial and (m, n) not in digits.terms}
                joined = _sum_of_dims(Expr(const - digits.const, tuple(rest.items())), atom.a, k)
                return (joined, {}) if isinstance(joined, int) else (joined.const, dict(joined.terms))
    return const, terms


def _digits_completed_by(atom: Call, c: int) -> tuple[int, Dim]:
    """Return ``k`` and the term that added to ``c`` times ``atom`` (``x // d`` or ``x % d``) gives ``k*x``.

    If there is no such term, a number is returned in its place.
    """
    if atom.fn == "%":
        return c, _product_of_dims(_next_digit(atom.a, atom.b), _product_of_dims(atom.b, c))
    if isinstance(atom.b, Expr) or c % atom.b:
        return 0, 0
    return c // atom.b, _product_of_dims(mod(atom.a, atom.b), c // atom.b)


def _next_digit(x: Dim, d: Dim) -> Dim:
    """Return ``x // d`` in the form of a digit of a mixed-radix number: ``(y // 2) // 2`` is ``y // 4``."""
    inner = lone_atom(x)
    if isinstance(inner, Call) and inner.fn == "//" and isinstance(inner.b, int) and isinstance(d, int):
        x, d = inner.a, inner.b * d
    return Expr(0, (((Call("//", x, d),), 1),))


@memoized
def _sum_of_dims(a: Dim, b: Dim, times: int = 1) -> Dim:
    """Return ``a + times * b`` with terms of equal monomials added."""
    const = 0
    terms: dict[Monomial, int] = {}
    for e, k in ((a, 1), (b, times)):
        if isinstance(e, Expr):
            const += k * e.const
            for m, c in e.terms:
                terms[m] = terms.get(m, 0) + k * c
        else:
            const += k * int(e)
    return _make_sum(const, terms)


@memoized
def _product_of_dims(a: Dim, b: Dim) -> Dim:
    """Return the product of two dims, multiplied out to a sum of monomials."""
    if not isinstance(a, Expr):
        a, b = b, a
    if not isinstance(a, Expr):
        return static(a) * static(b)
    if not isinstance(b, Expr):
        b = int(b)
        if b == 1:
            return a
        return Expr(a.const * b, tuple((m, c * b) for m, c in a.terms)) if b else 0
    terms: dict[Monomial, int] = {}
    left = [((), a.const), *a.terms] if a.const else list(a.terms)
    right = [((), b.const), *b.terms] if b.const else list(b.terms)
    for m, c in left:
        for n, d in right:
            key = tuple(sorted(m + n, key=str))
            terms[key] = terms.get(key, 0) + c * d
    return _make_sum(terms.pop((), 0), terms)


@memoized
def bounds(e: Dim) -> Interval:
    """Return the inclusive lower and upper bound of ``e``; a side is None if it is unbounded or unknown."""
    if not isinstance(e, Expr):
        return int(e), int(e)
    lo: int | None = e.const
    hi: int | None = e.const
    for monomial, c in e.terms:
        a, b = reduce(_interval_of_product, map(_atom_bounds, monomial))
        if c < 0:
            a, b = b, a
        lo = None if lo is None or a is None else lo + c * a
        hi = None if hi is None or b is None else hi + c * b
    return lo, hi


def _atom_bounds(atom: Atom) -> Interval:
    """Return the least and largest value of an atom, None for an unknown end."""
    if isinstance(atom, Call):
        return _interval_of_call(atom.fn, bounds(atom.a), bounds(atom.b))
    top = bounds(atom.extent)[1] if atom.extent is not None else None
    return atom.lo, None if top is None else max(top - 1, atom.lo)


def _is_provably_below(e: Dim, d: Dim) -> bool:
    """Return True if ``0 <= e < d`` is provable."""
    lo, hi = bounds(e)
    if lo is None or lo < 0:
        return False
    low_d = bounds(d)[0]
    if hi is not None and low_d is not None and hi < low_d:
        return True
    atom = lone_atom(e)
    if isinstance(atom, Sym):
        return atom.extent == d
    return atom is not None and atom.fn == "%" and atom.b == d


def _interval_of_product(x: Interval, y: Interval) -> Interval:
    """Return the interval of products of a number in ``x`` and one in ``y``."""
    (a, b), (c, d) = x, y
    if a is not None and c is not None and a >= 0 and c >= 0:
        return a * c, (None if b is None or d is None else b * d)
    if a is None or b is None or c is None or d is None:
        return None, None
    corners = [a * c, a * d, b * c, b * d]
    return min(corners), max(corners)


def _interval_of_call(fn: str, x: Interval, y: Interval) -> Interval:
    """Return the interval of ``fn`` (``//``, ``%``, ``max``, ``min``) on operands in the intervals ``x`` and ``y``."""
    (a, b), (c, d) = x, y
    match fn:
        case "//" if c is not None and c > 0 and a is not None and a >= 0:
            return (0 if d is None else a // d), (None if b is None else b // c)
        case "//" if c is not None and c > 0 and c == d:
            return (None if a is None else a // c), (None if b is None else b // c)
        case "%" if c is not None and c > 0:
            top = None if d is None else d - 1
            if a is not None and a >= 0 and b is not None:
                top = b if top is None else min(b, top)
            return 0, top
        case "max":
            low = max((n for n in (a, c) if n is not None), default=None)
            return low, (None if b is None or d is None else max(b, d))
        case "min":
            high = min((n for n in (b, d) if n is not None), default=None)
            return (None if a is None or c is None else min(a, c)), high
    return None, None


def expr_of_atom(atom: Atom) -> Expr:
    """Return the dim expression that consists of a single atom (symbol or call)."""
    return Expr(0, (((atom,), 1),))


def lone_atom(e: Dim) -> Atom | None:
    """Return the atom (symbol or call) if ``e`` is a single one with factor 1, else None."""
    match e:
        case Expr(const=0, terms=(((atom,), 1),)):
            return atom
    return None


def _divide_monomial(monomial: Monomial, by: Monomial) -> Monomial | None:
    """Return the factors of ``monomial`` without those of ``by``, or None if one of these is missing."""
    rest = list(monomial)
    for atom in by:
        if atom not in rest:
            return None
        rest.remove(atom)
    return tuple(rest)


def _quotient_and_remainder(e: Expr, d: Dim) -> tuple[Dim, Dim] | None:
    """Return quotient and remainder ``(q, r)`` with ``e == d*q + r`` and provably ``0 <= r < d``, or None."""
    if isinstance(d, Expr):
        if d.const or len(d.terms) != 1:
            return (1, 0) if e == d else None
        ((by, k),) = d.terms
    else:
        by, k = (), int(d)
    if k <= 0:
        return None
    q: dict[Monomial, int] = {}
    r: dict[Monomial, int] = {}
    const_q, const_r = divmod(e.const, k) if not by else (0, e.const)
    for monomial, c in e.terms:
        rest = _divide_monomial(monomial, by)
        if rest is not None and c % k == 0:
            if rest:
                q[rest] = c // k
            else:
                const_q += c // k
        else:
            r[monomial] = c
    quotient, remainder = _make_sum(const_q, q), _make_sum(const_r, r)
    return (quotient, remainder) if _is_provably_below(remainder, d) else None


def _aligned_quotient(e: Expr, d: int) -> tuple[int, Dim, Dim] | None:
    """Return ``(g, q, r)`` with ``e == g*q + r`` and ``0 <= r < g`` for a proper divisor ``g`` of ``d``, or None.

    Then ``e // d == q // (d // g)`` and ``e % d == g*(q % (d // g)) + r``.
    """
    for g in sorted({abs(c) for _, c in e.terms if 1 < abs(c) < d and d % abs(c) == 0}, reverse=True):
        split = _quotient_and_remainder(e, g)
        if split and isinstance(split[0], Expr):
            return g, *split
    return None


@memoized
def floordiv(a: Dim, b: Dim) -> Dim:
    """Return ``a // b``, rounded down; ``b`` must be positive where it is evaluated."""
    if not isinstance(a, Expr) and not isinstance(b, Expr):
        return int(a) // int(b)
    if b == 1 or a == 0:
        return a
    if isinstance(a, Expr):
        split = _quotient_and_remainder(a, b)
        if split:
            return split[0]
        if not isinstance(b, Expr):
            whole = {m: c // b for m, c in a.terms if c % b == 0}
            if whole:  # (b*x + y) // b == x + y // b holds for every sign
                rest = _make_sum(a.const, {m: c for m, c in a.terms if c % b})
                return _sum_of_dims(_make_sum(0, whole), floordiv(rest, b))
            aligned = _aligned_quotient(a, b)
            if aligned:
                g, q, _ = aligned
                return floordiv(q, b // g)
            inner = lone_atom(a)
            if isinstance(inner, Call) and inner.fn == "//" and isinstance(inner.b, int):
                return floordiv(inner.a, inner.b * b)
    elif _is_provably_below(a, b):
        return 0
    return Expr(0, (((Call("//", a, b),), 1),))


@memoized
def mod(a: Dim, b: Dim) -> Dim:
    """Return ``a % b`` with the sign of ``b``; ``b`` must be positive where it is evaluated."""
    if not isinstance(a, Expr) and not isinstance(b, Expr):
        return int(a) % int(b)
    if b == 1 or a == 0:
        return 0
    if isinstance(a, Expr):
        split = _quotient_and_remainder(a, b)
        if split:
            return split[1]
        if not isinstance(b, Expr):
            rest = _make_sum(a.const % b, {m: c % b for m, c in a.terms if c % b})
            if rest != a:
                return mod(rest, b)
            aligned = _aligned_quotient(a, b)
            if aligned:
                g, q, r = aligned
                return mod(q, b // g) * g + r
    elif _is_provably_below(a, b):
        return a
    return Expr(0, (((Call("%", a, b),), 1),))


def maximum(a: Dim, b: Dim) -> Dim:
    """Return the larger of two dims."""
    return _min_or_max_of_dims("max", a, b)


def minimum(a: Dim, b: Dim) -> Dim:
    """Return the smaller of two dims."""
    return _min_or_max_of_dims("min", a, b)


def _min_or_max_of_dims(fn: str, a: Dim, b: Dim) -> Dim:
    """Return the minimum or maximum; a dim alone if bounds of the difference decide it."""
    lo, hi = bounds(_sum_of_dims(a, b, -1))
    if lo is not None and lo >= 0:
        return a if fn == "max" else b
    if hi is not None and hi <= 0:
        return b if fn == "max" else a
    return Expr(0, (((Call(fn, *sorted((a, b), key=str)),), 1),))


def ceildiv(a: Dim, b: Dim) -> Dim:
    """Return ``a / b`` rounded up."""
    return floordiv(a + b - 1, b)


def product(dims: Iterable[Dim]) -> Dim:
    """Return the product of ``dims`` (1 for none)."""
    one: Dim = 1
    return reduce(_product_of_dims, dims, one)


def is_static(shape: Iterable[Dim]) -> bool:
    """Return True if all dims are plain integers."""
    return all(not isinstance(d, Expr) for d in shape)


def static(e: Dim) -> int:
    """Return the static dim ``e`` as an int; the caller has checked that it is one.

    Raises
    ------
    TypeError
        If ``e`` is an expression.
    """
    if isinstance(e, Expr):
        raise TypeError(f"{e} is not a number")
    return int(e)
