"""Integers in CUDA templates have names: numbers of the hardware stand above the functions, with their source."""

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.ir

TEMPLATES = Path(__file__).parents[2] / "aotc/kernels/cuda/templates"
PLAIN = (-1, 0, 1, 2)


def unnamed(path):
    """Return the line of each integer in a function, except for defaults of fields and the numbers of :data:`PLAIN`."""
    functions = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef)]
    constants = {id(n): n for f in functions for n in ast.walk(f) if isinstance(n, ast.Constant)}.values()
    return [n.lineno for n in constants if type(n.value) is int and n.value not in PLAIN]


@pytest.mark.parametrize("path", sorted(TEMPLATES.rglob("*.py")), ids=lambda p: str(p.relative_to(TEMPLATES)))
def test_integers_of_cuda_templates_have_names(path):
    lines = unnamed(path)
    assert not lines, f"{path.name}: integers without a name in lines {lines}; see fragments.py and threads.py"
