"""A class name has one owner: whoever reads it knows which class is meant."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

pytestmark = pytest.mark.ir

ROOT = Path(__file__).parents[2]

# Names with two owners, and why neither is renamed.
SHARED = {
    "Target": "what is compiled for; and the operand of a branch, whose name docs/bytecode.md and errors print",
}


def owners():
    """Each class name with the files that define a class of that name."""
    files = defaultdict(set)
    for path in sorted(p for folder in ("aotc", "cli") for p in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                files[node.name].add(str(path.relative_to(ROOT)))
    return files


def test_a_class_name_has_one_owner():
    """Of the classes of one file, those inside of functions too, several may share a private name."""
    shared = {name: sorted(files) for name, files in owners().items() if len(files) > 1 and name not in SHARED}
    assert not shared, "rename one: say what it is a Reader, a Report or a Frame of"


def test_each_shared_class_name_has_two_owners():
    files = owners()
    assert [name for name in SHARED if len(files[name]) < 2] == []
