"""Plans: records of how a region becomes a kernel, which print as text and can be parsed.

A plan contains every decision of a lowering: the loops, the rows or columns at a time, the values stored between loops.
A *planner* creates the plan of a region. ``lower_region`` passes it to the lowering function for the plan's class,
which emits the statements without further decisions. The kernel contains the plan as text::

    RowBlockPlan(kept=(0,), reduced=(1,), inner=((1,),), block=0, together=(), at_once=4, ...)

In a plan, axes are numbers of axes of the region's iteration space, values are names, and operands are numbers.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import ClassVar

from aotc.ir.loop.forms.records import read_record
from aotc.ir.loop.forms.tile_forms import TileForm
from aotc.ir.loop.forms.tiling import TILING_CLASSES


@dataclass(frozen=True, slots=True)
class RegionPlan:
    """Base of all plans and of their parts; :func:`parse_plan` parses the text of ``str``.

    A plan for tensor cores also contains the tiling of its kernel.
    """

    CLASSES: ClassVar[dict[str, type]] = {**TILING_CLASSES, "TileForm": TileForm}

    def __init_subclass__(cls) -> None:
        RegionPlan.CLASSES[cls.__name__] = cls


def parse_plan(text: str) -> RegionPlan:
    """Parse the text of a region plan, as ``str`` prints it.

    Raises
    ------
    ValueError
        If ``text`` is not a plan; the error has the invalid part.
    """
    try:
        plan = read_record(ast.parse(text, mode="eval").body, RegionPlan.CLASSES)
    except (SyntaxError, TypeError) as error:
        raise ValueError(f"{text!r} is not a plan: {error}") from None
    except ValueError as error:
        raise ValueError(f"{error} is not a part of a plan") from None
    if not isinstance(plan, RegionPlan):
        raise ValueError(f"{text!r} is not a plan")
    return plan

