"""Plans: how a region becomes a kernel, as values that print and read back.

A plan holds every number and choice that a lowering would otherwise make while it writes statements: which loops, how
many rows or columns at a time, which values are stored between loops. A planner makes it once, ``lower_region``
hands it to the lowering of its class, and the kernel carries its text::

    RowBlockPlan(kept=(0,), reduced=(1,), inner=((1,),), block=0, together=(), at_once=4, ...)

Axes are numbers of the region's iteration space, values of the region have their names, operands their numbers.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import ClassVar

from aotc.ir.loop.forms.tiling import Tiling, Window


@dataclass(frozen=True, slots=True)
class RegionPlan:
    """Base of all plans and of their parts; ``str`` is a text that :func:`parse_plan` reads back.

    A plan for tensor cores also has the :class:`Tiling` of its kernel, as it is.
    """

    CLASSES: ClassVar[dict[str, type]] = {"Tiling": Tiling, "Window": Window}

    def __init_subclass__(cls) -> None:
        RegionPlan.CLASSES[cls.__name__] = cls


def parse_plan(text: str) -> RegionPlan:
    """Return the plan whose ``str`` is ``text``.

    Raises
    ------
    ValueError
        If ``text`` is no plan; the error names what was found.
    """
    try:
        plan = _value(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError) as error:
        raise ValueError(f"{text!r} is no plan: {error}") from None
    if not isinstance(plan, RegionPlan):
        raise ValueError(f"{text!r} is no plan")
    return plan


def _value(node: ast.expr) -> object:
    match node:
        case ast.Call(func=ast.Name(id=name), args=[], keywords=fields) if name in RegionPlan.CLASSES:
            return RegionPlan.CLASSES[name](**{f.arg: _value(f.value) for f in fields if f.arg is not None})
        case ast.Tuple(elts=parts):
            return tuple(map(_value, parts))
        case ast.Constant(value=value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(value))):
            return -value
    raise ValueError(f"{ast.unparse(node)!r} is no part of a plan")
