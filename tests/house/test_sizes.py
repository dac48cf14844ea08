"""Files and functions are short."""

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.ir

ROOT = Path(__file__).parents[2]
LINES_OF_A_FILE = 700  # aim at 400: a longer file holds one idea that does not divide (decision 181)
LINES_OF_A_FUNCTION = 60
PARAMETERS = 8  # of a function; a class's own and the options of a command or of `load` are not counted

WITH_MANY_PARAMETERS = ("aotc/kernels/cpu/executor/stress.py",)
COMMANDS = ("cli/commands", "aotc/vmfb/module.py")


def files(*folders):
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def test_files_are_short():
    lengths = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in files("aotc", "cli", "tests")}
    long = [f"{name} has {count} lines" for name, count in lengths.items() if count > LINES_OF_A_FILE]
    assert not long, f"more than {LINES_OF_A_FILE} lines:\n" + "\n".join(long)


def test_functions_are_short():
    """From ``def`` to the last line, the docstring counted; of a command without the declarations of its options."""
    long = []
    for path in files("aotc", "cli", "tests"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                count = (node.end_lineno or 0) - node.lineno + 1
                if node.name == "command" and str(path.relative_to(ROOT)).startswith(COMMANDS):
                    count = (node.end_lineno or 0) - node.body[0].lineno + 1
                if count > LINES_OF_A_FUNCTION:
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name} has {count} lines")
    assert not long, f"more than {LINES_OF_A_FUNCTION} lines:\n" + "\n".join(long)


def parameters(node):
    """The number of a function's parameters, but for the object or class of a method."""
    given = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return len(given) - (given[:1] in (["self"], ["cls"]))


def test_functions_have_few_parameters():
    many = []
    for path in files("aotc", "cli"):
        name = str(path.relative_to(ROOT))
        if not name.startswith((*WITH_MANY_PARAMETERS, *COMMANDS)):
            nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef)]
            found = [n for n in nodes if parameters(n) > PARAMETERS and n.name != "__init__"]
            many += [f"{name}:{n.lineno} {n.name} has {parameters(n)}" for n in found]
    assert not many, f"more than {PARAMETERS} parameters:\n" + "\n".join(many)


SATELLITE = 60  # lines below which a module is part of its only reader, if both are in one folder


def test_small_modules_have_several_importers():
    """A short module with one reader in its own folder is part of that file, unless it is imported when first used."""
    names = {".".join(path.with_suffix("").parts): path for path in (p.relative_to(ROOT) for p in files("aotc", "cli"))}
    readers: dict[str, set[str]] = {name: set() for name in names}
    for name, path in names.items():
        for imported, deferred in imports_of(ast.parse((ROOT / path).read_text())):
            if imported in readers and imported != name:
                readers[imported] |= {name, "a later import"} if deferred else {name}
    small = []
    for name, path in names.items():
        lines = len((ROOT / path).read_text().splitlines())
        if lines < SATELLITE and path.name not in ("__init__.py", "__main__.py") and len(readers[name]) == 1:
            reader = names[next(iter(readers[name]))]
            if reader.parent == path.parent:
                small.append(f"{path} has {lines} lines and one reader, {reader.name}")
    assert not small, "merge with the reader or a neighbour:\n" + "\n".join(small)


def imports_of(tree):
    """Yield the names that a module may import, each with whether its import is inside a function."""
    deferred = {id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                found = [alias.name for alias in aliases]
            case ast.ImportFrom(module=str(module), names=aliases):
                found = [module, *(f"{module}.{alias.name}" for alias in aliases)]
            case ast.Constant(value=str(text)) if text.startswith(("aotc.", "cli.")):
                found = [text]
            case _:
                continue
        yield from ((name, id(node) in deferred) for name in found)
