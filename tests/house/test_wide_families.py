"""The families of which ``make test`` runs a part exist, and the part has each value of each parameter."""

import ast
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.wide_families import WIDE, left_out, without_slow

pytestmark = pytest.mark.ir

TESTS = Path(__file__).parents[1]


def test_each_family_is_a_parametrized_function():
    for name in WIDE:
        file, _, function = name.partition("::")
        found = [n for n in ast.walk(ast.parse((TESTS / file).read_text())) if getattr(n, "name", "") == function]
        assert found, name
        assert any("parametrize" in ast.unparse(d) for d in found[0].decorator_list), name


class Case(SimpleNamespace):
    """A case as pytest collects it."""

    __hash__ = object.__hash__

    def get_closest_marker(self, name):
        return self.slow if name == "slow" else None


def cases(sizes, family=None, slow=False):
    """Return a case for each combination of parameters with so many values."""
    return [
        Case(
            nodeid=f"tests/{family or min(WIDE)}[{'-'.join(map(str, at))}]",
            callspec=SimpleNamespace(params=dict(zip("abc", at))), slow=slow,
        )
        for at in product(*map(range, sizes))
    ]  # fmt: skip


def test_a_third_of_a_family_with_one_parameter_remains():
    items = cases([300])
    assert 80 <= 300 - len(left_out(items)) <= 120
    assert len(left_out(cases([1]))) == len(left_out(cases([300], "ir/test_other.py::test"))) == 0
    assert all(len(left_out(cases([n]))) < n for n in range(1, 20))


@pytest.mark.parametrize("sizes", [(20, 15), (2, 3), (40, 2), (3, 4, 5)])
def test_an_eighth_of_a_parameter_product_remains_with_every_value(sizes):
    items = cases(sizes)
    out = left_out(items)
    kept = [i.callspec.params for i in items if i not in out]
    assert all({k[name] for k in kept} == set(range(n)) for name, n in zip("abc", sizes))
    assert len(kept) <= len(items) / 8 + sum(sizes)


def test_parameters_of_one_decorator_count_as_one():
    items = cases([300])
    for item in items:
        item.callspec.params["b"] = item.callspec.params["a"]
    assert 80 <= 300 - len(left_out(items)) <= 120


def test_slow_cases_do_not_count_as_a_value():
    items = cases([4, 5])
    slow = cases([2, 5], slow=True)
    assert not set(map(id, slow)) & set(map(id, left_out([*slow, *items])))
    assert len(left_out([*slow, *items])) == len(left_out(items))


@pytest.mark.parametrize(
    ("slow", "left"), [([], []), ([False, True, False], [0, 2]), ([True, True], [0]), ([False], [0])]
)
def test_without_slow_cases_each_function_has_a_case(slow, left):
    calls = [SimpleNamespace(marks=[pytest.mark.ir.mark, *[pytest.mark.slow.mark] * one]) for one in slow]
    assert without_slow(calls) == [calls[n] for n in left]
