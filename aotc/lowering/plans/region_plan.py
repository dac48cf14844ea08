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

from aotc.ir.loop.forms.records import read_record
from aotc.ir.loop.forms.tile_forms import TileForm
from aotc.ir.loop.forms.tiling import TILING_CLASSES


@dataclass(frozen=True, slots=True)
class RegionPlan:
    """Base of all plans and of their parts; ``str`` is a text that :func:`parse_plan` reads back.

    A plan for tensor cores also has the tiling of its kernel, as it is.
    """

    CLASSES: ClassVar[dict[str, type]] = {**TILING_CLASSES, "TileForm": TileForm}

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
        plan = read_record(ast.parse(text, mode="eval").body, RegionPlan.CLASSES)
    except (SyntaxError, TypeError) as error:
        raise ValueError(f"{text!r} is no plan: {error}") from None
    except ValueError as error:
        raise ValueError(f"{error} is no part of a plan") from None
    if not isinstance(plan, RegionPlan):
        raise ValueError(f"{text!r} is no plan")
    return plan

