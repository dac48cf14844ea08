"""Attributes that may hold symbolic sizes are read through typed functions, so that mypy refuses to compare them."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from aotc.ir.dims.algebra import Expr
from aotc.ir.opset.dim_attributes import DIM_ATTRIBUTES

ROOT = Path(__file__).parents[2] / "aotc"
NOT_ATTRIBUTES = {"function.attrs", "f.attrs", "self.function.attrs", "called.attrs", "row", "p.options"}
"""What has entries of these names that are no dims of an op: functions, rows of tables, options of LAPACK."""
READERS = {"aotc/ir/opset/dim_attributes.py"}
NAMES = {name for op, names in DIM_ATTRIBUTES.items() for name in names if op != "bind_dim"}
"""``dim`` of ``bind_dim`` is a symbol; of other ops it is the number of an axis."""


def untyped_reads(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield ``attrs["low"]`` and ``attrs.get("low")`` of attributes that hold dims."""
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(value=base, slice=ast.Constant(value=str(name)), ctx=ast.Load()) if name in NAMES:
                pass
            case ast.Call(func=ast.Attribute(value=base, attr="get"), args=[ast.Constant(value=str(name)), *_]) if (
                name in NAMES
            ):
                pass
            case _:
                continue
        if ast.unparse(base) not in NOT_ATTRIBUTES:
            yield node


@pytest.mark.parametrize("operator", ["__lt__", "__le__", "__gt__", "__ge__"])
def test_dim_expressions_define_no_order(operator):
    assert getattr(Expr, operator) is getattr(object, operator)


@pytest.mark.parametrize("folder", ["ir", "lowering"])
def test_dims_in_attributes_are_read_with_their_type(folder):
    found = [
        f"{path.relative_to(ROOT.parent)}:{node.lineno}: {ast.unparse(node)}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        if str(path.relative_to(ROOT.parent)) not in READERS
        for node in untyped_reads(ast.parse(path.read_text()))
    ]
    assert not found, "read these by a function of aotc.ir.opset.dim_attributes:\n" + "\n".join(found)
