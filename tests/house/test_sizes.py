"""Files and functions are short."""

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.ir

ROOT = Path(__file__).parents[2]
LINES_OF_A_FILE = 700  # aim at 400: a longer file holds one idea that does not divide (decision 181)
LINES_OF_A_FUNCTION = 60


def files(*folders):
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def test_files_are_short():
    lengths = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in files("aotc", "cli", "tests")}
    long = [f"{name} has {count} lines" for name, count in lengths.items() if count > LINES_OF_A_FILE]
    assert not long, f"more than {LINES_OF_A_FILE} lines:\n" + "\n".join(long)


def test_functions_are_short():
    """From ``def`` to the last line, the docstring counted."""
    long = []
    for path in files("aotc", "cli", "tests"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                count = (node.end_lineno or 0) - node.lineno + 1
                if count > LINES_OF_A_FUNCTION:
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name} has {count} lines")
    assert not long, f"more than {LINES_OF_A_FUNCTION} lines:\n" + "\n".join(long)
