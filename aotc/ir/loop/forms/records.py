"""Records: frozen dataclasses in the loop IR whose text can be parsed back.

A record prints as the call that creates it, without the fields that have their default value::

    Tiling(template=Wgmma(transposed=True), rows=64, cols=128, stages=8)
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import fields


class TextRecord:
    """Base of frozen dataclasses whose ``repr`` omits default values, and which :func:`read_record` parses."""

    __slots__ = ()

    def __repr__(self) -> str:
        values = [(f.name, getattr(self, f.name), f.default) for f in fields(self)]  # type: ignore[arg-type]
        shown = [f"{name}={value!r}" for name, value, default in values if value != default]
        return f"{type(self).__name__}({', '.join(shown)})"


def read_record(node: ast.expr, classes: Mapping[str, type]) -> object:
    """Return the value of a syntax tree: a literal, a tuple, or a record of one of ``classes``, by name.

    Raises
    ------
    ValueError
        If a part of ``node`` is anything else; the message has its text.
    TypeError
        If a class does not have the arguments.
    """
    match node:
        case ast.Call(func=ast.Name(id=name), args=values, keywords=named) if name in classes:
            arguments = {k.arg: read_record(k.value, classes) for k in named if k.arg is not None}
            return classes[name](*(read_record(value, classes) for value in values), **arguments)
        case ast.Tuple(elts=parts):
            return tuple(read_record(part, classes) for part in parts)
        case ast.Constant(value=value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
    raise ValueError(f"{ast.unparse(node)!r}")
