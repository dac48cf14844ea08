"""The dims algebra against brute force: every identity it uses must hold for all values."""

from __future__ import annotations

import operator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aotc.ir.dims.algebra import bounds, ceildiv, floordiv, is_static, maximum, minimum, mod, product, sym
from aotc.ir.dims.compare import decide_relation, upper_bound_in_loops
from aotc.ir.dims.symbols import evaluate, substitute, symbols
from aotc.lowering.analysis.index_maps import delinearize, linearize

pytestmark = pytest.mark.ir

NAMES = ("a", "b", "c")
SMALL = st.integers(-7, 7)
FUNCTIONS = {
    "+": (lambda x, y: x + y, lambda x, y: x + y),
    "-": (lambda x, y: x - y, lambda x, y: x - y),
    "*": (lambda x, y: x * y, lambda x, y: x * y),
    "max": (maximum, max),
    "min": (minimum, min),
}


def leaf(bounded: bool):
    """Return leaves ``(expression, meaning)``; a bounded ``i`` is below 4, ``j`` below ``b``."""
    leaves = [SMALL.map(lambda n: (n, lambda values: n))]
    leaves += [st.just((sym(n), lambda values, n=n: values[n])) for n in NAMES]
    if bounded:
        leaves.append(st.just((sym("i", 0, 4), lambda values: values["i"])))
        leaves.append(st.just((sym("j", 0, sym("b")), lambda values: values["j"])))
    return st.one_of(leaves)


def extend(children):
    """Return an operator applied to children, division and remainder by positive numbers or symbols included."""

    def combine(fn, x, y):
        build, meaning = FUNCTIONS[fn]
        return build(x[0], y[0]), lambda values: meaning(x[1](values), y[1](values))

    def divide(x, by, remainder):
        divisor = by if isinstance(by, int) else sym(by)
        number = (lambda values: by) if isinstance(by, int) else (lambda values: values[by])
        if remainder:
            return mod(x[0], divisor), lambda values: x[1](values) % number(values)
        return floordiv(x[0], divisor), lambda values: x[1](values) // number(values)

    divisors = st.one_of(st.integers(1, 6), st.sampled_from(NAMES))
    return st.one_of(
        st.builds(combine, st.sampled_from(sorted(FUNCTIONS)), children, children),
        st.builds(divide, children, divisors, st.booleans()),
    )


EXPRESSIONS = st.recursive(leaf(bounded=True), extend, max_leaves=6)
VALUES = st.tuples(*(st.integers(1, 9) for _ in NAMES), st.integers(0, 3), st.integers(0, 8)).map(
    lambda t: {"a": t[0], "b": t[1], "c": t[2], "i": t[3], "j": t[4] % t[1]}
)


@settings(max_examples=600, deadline=None)
@given(EXPRESSIONS, VALUES)
def test_canonicalized_dims_have_the_same_value(pair, values):
    expression, meaning = pair
    assert evaluate(expression, values) == meaning(values)


@settings(max_examples=300, deadline=None)
@given(EXPRESSIONS, VALUES)
def test_bounds_contain_every_value(pair, values):
    expression, meaning = pair
    low, high = bounds(expression)
    number = meaning(values)
    assert low is None or low <= number
    assert high is None or number <= high


RELATIONS = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(EXPRESSIONS, EXPRESSIONS, VALUES)
def test_decided_comparisons_hold_for_every_value(left, right, values):
    for relation, holds in RELATIONS.items():
        decided = decide_relation(relation, left[0], right[0])
        assert decided in (None, holds(left[1](values), right[1](values)))


def test_comparisons_are_decided_by_bounds():
    i, n = sym("i", 0, 4), sym("n", 1)
    assert [decide_relation(relation, i, 4) for relation in RELATIONS] == [False, True, True, True, False, False]
    assert [decide_relation(relation, n, 1) for relation in RELATIONS] == [None, None, False, None, None, True]
    assert [decide_relation(relation, n, n) for relation in RELATIONS] == [True, False, False, True, False, True]


@settings(max_examples=300, deadline=None)
@given(EXPRESSIONS, VALUES)
def test_the_largest_value_in_loops_is_an_upper_bound(pair, values):
    """Of the loops ``i``, of 4 iterations, and ``j``, of ``b``."""
    expression, meaning = pair
    bound = upper_bound_in_loops(expression, {"i": 4, "j": sym("b")})
    if bound is not None:
        assert not {s.name for s in symbols(bound)} & {"i", "j"}
        assert meaning(values) <= evaluate(bound, values)


def test_the_end_of_a_causal_loop_has_a_static_bound():
    rows = {"row": sym("s"), "z": 8}
    row, z = sym("row", 0, sym("s")), sym("z", 0, 8)
    assert upper_bound_in_loops(minimum(1024, row + 1), rows) == 1024
    assert upper_bound_in_loops(row + 1, rows) == sym("s")
    assert upper_bound_in_loops(minimum(1000, (z % 4 + 1) * 256), rows) == 1000
    assert upper_bound_in_loops((z % 4 + 1) * 256, rows) == 1024
    assert upper_bound_in_loops(z // 2, rows) == 3
    assert upper_bound_in_loops(sym("n") - row, rows) is None


@settings(max_examples=300, deadline=None)
@given(EXPRESSIONS, EXPRESSIONS, VALUES)
def test_equal_expressions_have_equal_values(left, right, values):
    if left[0] == right[0]:
        assert left[1](values) == right[1](values)
    difference = left[0] - right[0]
    assert evaluate(difference, values) == left[1](values) - right[1](values)


@settings(max_examples=200, deadline=None)
@given(EXPRESSIONS, EXPRESSIONS, VALUES)
def test_substitution_replaces_the_value_of_a_symbol(outer, inner, values):
    if not is_static([inner[0]]) and "a" not in {s.name for s in symbols(inner[0])} and inner[1](values) > 0:
        replaced = substitute(outer[0], {"a": inner[0]})
        assert evaluate(replaced, values) == outer[1]({**values, "a": inner[1](values)})


@settings(max_examples=200, deadline=None)
@given(EXPRESSIONS)
def test_dims_parse_back_from_their_text(pair):
    from aotc.ir.tensor.text import parse_dim

    expression, _ = pair
    names = {s.name: s for s in (symbols(expression) if not isinstance(expression, int) else ())}
    plain = substitute(expression, {n: sym(n) for n in names})
    assert parse_dim(str(plain)) == plain


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (lambda b, i: (b + 1) * 2, lambda b, i: 2 * b + 2),
        (lambda b, i: (4 * b + 3) // 4, lambda b, i: b),
        (lambda b, i: (4 * b + i) // 4, lambda b, i: b),
        (lambda b, i: (4 * b + i) % 4, lambda b, i: i),
        (lambda b, i: 4 * (b // 4) + b % 4, lambda b, i: b),
        (lambda b, i: 4 * ((b + 3) // 4) + (b + 3) % 4, lambda b, i: b + 3),
        (lambda b, i: 48 * ((i + 128 * b) // 48) + (i + 128 * b) % 48, lambda b, i: i + 128 * b),
        (lambda b, i: 12 * ((5 * b + 7) // 4) + 3 * ((5 * b + 7) % 4) + i, lambda b, i: 15 * b + 21 + i),
        (lambda b, i: 6 * ((8 * b + i // 2) // 6) + (8 * b + i // 2) % 6, lambda b, i: 8 * b + i // 2),
        (lambda b, i: (b * 6) // 3, lambda b, i: 2 * b),
        (lambda b, i: (b * (b + 1)) - b * b, lambda b, i: b),
        (lambda b, i: maximum(b + 1, b), lambda b, i: b + 1),
        (lambda b, i: ceildiv(8 * b, 4), lambda b, i: 2 * b),
        (lambda b, i: (b // 2) // 3, lambda b, i: b // 6),
    ],
)
def test_dims_are_simplified(found, expected):
    b, i = sym("b"), sym("i", 0, 4)
    assert found(b, i) == expected(b, i)


@pytest.mark.parametrize("shape", [(2,) * 14, (3, 2, 2, 5, 2), (2, 7), (4, 2, 1, 2, 2), (sym("n"), 2, 3, 2)], ids=str)
def test_quotient_and_remainder_recombine_to_the_number(shape):
    i = sym("i", 0, product(shape))
    assert linearize(delinearize(i, shape), shape) == i
    assert sum(c * mod(floordiv(i, 2**n), 2) for n, c in enumerate([1, 2, 4, 8])) + 16 * floordiv(i, 16) == i


def test_quotients_and_remainders_of_different_numbers_do_not_recombine():
    i, p = sym("i", 0, 128), sym("p")
    x = i + 128 * p
    for other, by in ((x + 1, 48), (i + 33 * p, 48), (x, 49)):
        assert "//" in str(48 * (x // 48) + other % by)


def test_evaluation_names_a_symbol_without_a_value():
    with pytest.raises(KeyError, match="n"):
        evaluate(sym("b") + sym("n"), {"b": 1})


def test_a_divisor_of_several_factors_is_in_parentheses():
    """``p // 2*b`` is ``(p // 2)*b`` to whoever reads it back."""
    b, p = sym("b"), sym("p")
    for e in (p // (2 * b), p % (3 * b * b), (p * 2) // (b * 5) + 1):
        assert eval(str(e), {"b": 3, "p": 100}) == evaluate(e, {"b": 3, "p": 100})
