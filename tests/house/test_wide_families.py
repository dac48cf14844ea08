"""The families of which ``make test`` runs a third exist."""

import ast
from pathlib import Path

import pytest
from support.wide_families import WIDE, is_left_out

pytestmark = pytest.mark.ir

TESTS = Path(__file__).parents[1]


def test_each_family_is_a_parametrized_function():
    for name in WIDE:
        file, _, function = name.partition("::")
        found = [n for n in ast.walk(ast.parse((TESTS / file).read_text())) if getattr(n, "name", "") == function]
        assert found, name
        assert any("parametrize" in ast.unparse(d) for d in found[0].decorator_list), name


def test_a_third_of_a_family_is_left():
    name = sorted(WIDE)[0]
    left = [n for n in range(300) if not is_left_out(f"tests/{name}[{n}]")]
    assert 80 <= len(left) <= 120
    assert not is_left_out("tests/ir/test_other.py::test[1]")
