"""A pass is one file, one function, one row of the table and one folder of golden cases, all of one name."""

import ast
from pathlib import Path

import pytest

from aotc.pipeline import PASSES

pytestmark = pytest.mark.ir

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "aotc" / "lowering" / "passes"
GOLDEN = ROOT / "tests" / "golden" / "passes"
NAMES = sorted({step.run.__name__ for step in PASSES})


def passes_in(path):
    """Names of the public functions of a file that take a module and options and return a module."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            types = [ast.unparse(a.annotation) for a in node.args.args if a.annotation]
            if types == ["Module", "Options"] and ast.unparse(node.returns or ast.Constant(None)) == "Module":
                yield node.name


def test_each_pass_is_the_function_named_like_its_file():
    for step in PASSES:
        name = step.run.__name__
        package = f"aotc.lowering.passes.{name}"
        assert step.run.__module__ in (package, f"{package}.{name}"), "a file, or a folder with a file, of its name"


def test_every_pass_file_is_in_the_pass_table():
    files = {path.stem: list(passes_in(path)) for path in FOLDER.rglob("*.py")}
    assert {name: functions for name, functions in files.items() if functions} == {name: [name] for name in NAMES}


def test_every_pass_has_golden_cases():
    assert sorted(path.name for path in GOLDEN.iterdir() if any(path.iterdir())) == NAMES
    for name in NAMES:
        assert len(list((GOLDEN / name).glob("*.txt"))) >= 3, f"write a case: {GOLDEN / name}/SHOWS_WHAT.txt"


def test_every_pass_file_has_a_docstring():
    for step in PASSES:
        text = ast.get_docstring(ast.parse((ROOT / (step.run.__module__.replace(".", "/") + ".py")).read_text()))
        assert text, step.name
