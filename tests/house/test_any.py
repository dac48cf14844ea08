"""``Any`` stands for values of other libraries and of callers, never for classes of this project."""

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.ir

ROOT = Path(__file__).parents[2]

# Parameters of type Any, by package, at most: objects of jaxlib, gRPC and typer, arrays of callers, values of manifests
# and JSON. A number here only gets smaller.
PARAMETERS = {
    "aotc": 5,
    "aotc/driver": 3,
    "aotc/frontend": 395,
    "aotc/ir": 18,
    "aotc/kernels": 165,
    "aotc/lowering": 4,
    "aotc/serve": 40,
    "aotc/source": 4,
    "aotc/tools": 11,
    "aotc/vmfb": 127,
    "cli": 4,
    "cli/commands": 11,
    "cli/shared": 4,
}


def package(path):
    """Return the package whose parameters are counted together: a folder of ``aotc`` or ``cli``."""
    parts = path.relative_to(ROOT).parts
    return "/".join(parts[:2]) if len(parts) > 2 else parts[0]


def parameters_of_any(path):
    """Return the line of each parameter whose annotation is ``Any`` or ``Any | None``."""
    tree = ast.walk(ast.parse(path.read_text()))
    functions = [n for n in tree if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    every = (a for f in functions for a in (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs))
    return [a.lineno for a in every if a.annotation and ast.unparse(a.annotation) in ("Any", "Any | None")]


def test_the_number_of_parameters_typed_any_does_not_grow():
    found = {}
    for path in sorted([*ROOT.glob("aotc/**/*.py"), *ROOT.glob("cli/**/*.py")]):
        if lines := parameters_of_any(path):
            found[package(path)] = found.get(package(path), 0) + len(lines)
    more = {name: (n, PARAMETERS.get(name, 0)) for name, n in found.items() if n > PARAMETERS.get(name, 0)}
    assert not more, f"parameters of type Any, and the most: {more}; name the class, or a Protocol"
