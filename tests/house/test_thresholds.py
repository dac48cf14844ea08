"""A threshold stands above its only reader; a table keeps what several modules read (decision 251)."""

import ast
import functools
from pathlib import Path

import pytest
from support.threshold_rows import all_rows

from benchmarks.suites import parse, suites

pytestmark = pytest.mark.ir

ROOT = Path(__file__).parents[2]
TABLES = sorted(p for name in ("limits.py", "thresholds.py") for p in (ROOT / "aotc").rglob(name))


def numbers(path):
    """Return the constants of a table, with their lines."""
    found = {}
    for statement in ast.parse(path.read_text()).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)]) if name.isupper():
                found[name] = statement
    return found


@functools.cache
def trees():
    """Return the syntax trees of the product's files."""
    paths = [path for folder in ("aotc", "cli") for path in (ROOT / folder).rglob("*.py")]
    return {path: ast.parse(path.read_text()) for path in paths}


def readers(table):
    """Return the modules of the product that read each number of a table."""
    dotted = ".".join(table.relative_to(ROOT).with_suffix("").parts)
    package, _, last = dotted.rpartition(".")
    found = {}
    for path, tree in trees().items():
        imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        names = {alias.name for node in imported if node.module == dotted for alias in node.names}
        aliases = [alias for node in imported if node.module == package for alias in node.names]
        whole = {alias.asname or alias.name for alias in aliases if alias.name == last}
        attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        names |= {a.attr for a in attributes if isinstance(a.value, ast.Name) and a.value.id in whole}
        for name in names:
            found.setdefault(name, set()).add(str(path.relative_to(ROOT)))
    return found


@pytest.mark.parametrize("table", TABLES, ids=lambda p: str(p.relative_to(ROOT)))
def test_table_thresholds_have_several_readers(table):
    found = readers(table)
    alone = {name: found.get(name, set()) for name in numbers(table) if len(found.get(name, ())) < 2}
    assert not alone, "put each above its only reader"


@pytest.mark.parametrize("table", TABLES, ids=lambda p: str(p.relative_to(ROOT)))
def test_table_numbers_have_a_comment(table):
    lines = table.read_text().splitlines()
    rows = {name for name, node in numbers(table).items() if isinstance(node.value, ast.Call)}
    silent = [n for n, node in numbers(table).items() if n not in rows and not lines[node.lineno - 2].startswith("# ")]
    assert not silent, "say of what it is a number, and why it is this one, in a comment above"


def test_benchmarks_named_by_thresholds_exist():
    commands = {f"{found.module}: {found.name}": found.row.benchmark for found in all_rows() if found.row.benchmark}
    for name, command in commands.items():
        start, _, words = command.partition("python -m benchmarks ")
        assert not start, f"{name}: {command}"
        assert words, f"{name}: {command}"
        topic, suite, _ = parse(words.split())
        assert suite in suites(topic), name
