"""Integers in CUDA templates have names: numbers of the hardware stand above the functions, with their source."""

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.ir

TEMPLATES = Path(__file__).parents[2] / "aotc/kernels/cuda/templates"
PLAIN = (-1, 0, 1, 2)

# Files that still have such integers, and how many: the layouts of tensor core fragments in emitted code. A file that
# is not listed has none. A number here only gets smaller.
UNNAMED = {
    "attention/decode_steps.py": 14,
    "attention/mma_steps.py": 68,
    "attention/softmax_steps.py": 40,
    "attention/wgmma_steps.py": 21,
    "gemm/computed_operands.py": 8,
    "gemm/epilogue.py": 12,
    "gemm/epilogue_layout.py": 6,
    "gemm/im2col_loads.py": 1,
    "gemm/mma_steps.py": 66,
    "gemm/register_operands.py": 35,
    "gemm/tiles.py": 6,
    "gemm/wgmma_steps.py": 24,
    "steps.py": 47,
}


def unnamed(path):
    """Return the line of each integer in a function, except for defaults of fields and the numbers of :data:`PLAIN`."""
    functions = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef)]
    constants = {id(n): n for f in functions for n in ast.walk(f) if isinstance(n, ast.Constant)}.values()
    return [n.lineno for n in constants if type(n.value) is int and n.value not in PLAIN]


@pytest.mark.parametrize("path", sorted(TEMPLATES.rglob("*.py")), ids=lambda p: str(p.relative_to(TEMPLATES)))
def test_integers_have_names(path):
    lines, most = unnamed(path), UNNAMED.get(str(path.relative_to(TEMPLATES)), 0)
    assert len(lines) <= most, f"{path.name}: {len(lines)} integers without a name, at most {most}, in lines {lines}"
    assert len(lines) == most, f"{path.name}: {len(lines)} integers without a name; write that number in UNNAMED"
