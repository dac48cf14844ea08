"""One owner of the words of command buffers, and of slots."""

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.ir

ROOT = Path(__file__).parents[2]
EXECUTOR = [
    f"aotc/kernels/cpu/executor/{part}.py"
    for part in ("scheduler", "control", "run_graph", "stress", "tile_graph", "words")
]
OWNERS = ("aotc/vmfb/abi.py", "aotc/vmfb/commands.py", *EXECUTOR)
ENCODED = ("aotc/vmfb", "aotc/lowering/program", "aotc/lowering/lower.py", "aotc/driver/assemble.py", "cli", "docs")

# Positions in headers, and lengths of them.
POSITIONS = ("NODE_", "GRAPH_", "WHILE_", "CASE_", "PLACE_", "COMMAND_", "TILE_", "TILED_")
COMMAND_POSITIONS = ("KIND", "KERNEL", "ITEMS", "GRAIN", "PREDECESSORS", "SUCCESSORS", "PLACES", "DIMS")

# Names of what holds words or pointers, and of a function's arguments: all other slots come after theirs.
WORDS = ("code", "head", "header", "node", "slots", "words")
ARGUMENTS = ("arguments", "params", "ranks")


def positions(tree):
    """Yield the positions of header words that a module takes from ``abi``."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module == "aotc.vmfb.abi":
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "abi":
            names = [node.attr]
        yield from (n for n in names if n.startswith(POSITIONS) or n in COMMAND_POSITIONS)


def arithmetic(tree):
    """Yield the expressions that count words, as ``words[at + 2]``, or slots, as ``len(arguments) + n``."""
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(value=value, slice=index) if name_of(value) in WORDS and is_counted(index):
                yield ast.unparse(node)
            case ast.BinOp(left=left, right=right, op=ast.Add() | ast.Sub()) if is_count(left) or is_count(right):
                yield ast.unparse(node)


def name_of(node):
    """Return the last part of a dotted name: ``words`` of ``self._words``."""
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name.lstrip("_")


def is_counted(index):
    """Tell whether an index is computed, or a number but that of the first or the last word."""
    names = {node.id for node in ast.walk(index) if isinstance(node, ast.Name)}
    if "id" in names:  # the words of a Python object, in which its array's address is
        return False
    fixed = isinstance(index, ast.Constant) and isinstance(index.value, int) and index.value > 0
    return fixed or any(isinstance(node, ast.BinOp) for node in ast.walk(index))


def is_count(node):
    """Tell whether an expression is the number of a function's arguments."""
    match node:
        case ast.Call(func=ast.Name(id="len"), args=[ast.Subscript(slice=ast.Constant(value=key))]):
            return key in ARGUMENTS
        case ast.Call(func=ast.Name(id="len"), args=[values]):
            return name_of(values) in ARGUMENTS
    return name_of(node) == "arguments"


def trees(folders):
    """Yield path and syntax tree of each module that is not an owner."""
    for folder in folders:
        root = ROOT / folder
        for path in [root] if root.is_file() else sorted(root.rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if name not in OWNERS:
                yield name, ast.parse(path.read_text())


def test_word_positions_are_used_only_by_their_owners():
    wrong = [f"{name} uses {p}" for name, tree in trees(("aotc", "cli", "docs")) for p in positions(tree)]
    assert not wrong, "read with aotc.vmfb.commands.decode_commands, write with aotc.vmfb.commands.encode_commands"


def test_word_and_slot_arithmetic_is_only_in_its_owners():
    wrong = [f"{name}: {text}" for name, tree in trees(ENCODED) for text in arithmetic(tree)]
    assert not wrong, "words have their reader in aotc.vmfb.commands, slots are those of aotc.vmfb.abi.Slots"


@pytest.mark.parametrize(
    "text",
    [
        "words[at + 2]",
        "self._words[at + 1 : end]",
        "head[5]",
        "slots[count - 1]",
        "len(arguments) + len(results) + 1",
        "len(entry['arguments']) + number",
        "plan.arguments + len(plan.results)",
        "len(function.body.params) + n",
    ],
)
def test_arithmetic_on_word_counts_is_found(text):
    assert list(arithmetic(ast.parse(text)))


@pytest.mark.parametrize("text", ["words[at]", "slots[place]", "code[-1][:1]", "[*arguments, *results]", "n + 1"])
def test_other_arithmetic_is_not_reported(text):
    assert not list(arithmetic(ast.parse(text)))


@pytest.mark.parametrize("text", ["from aotc.vmfb.abi import GRAPH_HEADER", "abi.SUCCESSORS"])
def test_literal_word_positions_are_found(text):
    assert list(positions(ast.parse(text)))
