"""Random programs for the fuzz tests: Hypothesis draws the lines of a Python function over ``jax.lax``.

Each value carries its shape, dtype and whether it is *exact*: the same on every machine, because it was made by
integer ops, by movement, or by sums and products of small whole numbers. Ops that jump (comparisons, sorts, indices,
conversions to integers) take exact values only, so that results may be compared: exact ones bit by bit, others within
the rounding that their ``bound`` (the largest absolute value possible) allows.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from support.programs.control import branch, loop, mapped, scan_rows, several_carried
from support.programs.elements import binary, bitcast, compare, convert, iota, select, smooth, special, unary
from support.programs.indexing import advanced_index, dynamic_slice, dynamic_update_slice, gather, scatter, sort, top_k
from support.programs.movement import broadcast, concatenate, pad, reshape, reverse, sliced, spread, transpose
from support.programs.reductions import argument_of_extreme, convolution, dot, reduce, reduce_pair, scan, window
from support.programs.values import FLOATS, INTEGERS, MOST_ELEMENTS, Program, Size, Val, elements, numeric

STEPS: tuple[Callable[[Program], None], ...] = (
    unary, binary, compare, select, convert, broadcast, reshape, transpose, reduce, sliced, pad, concatenate, smooth,
    dot, gather, scatter, dynamic_slice, dynamic_update_slice, sort, scan, loop, branch, spread, reverse, bitcast,
    argument_of_extreme, reduce_pair, window, convolution, top_k, iota, scan_rows, special, advanced_index, mapped,
    several_carried,
)  # fmt: skip


@st.composite
def programs(draw: Any, symbolic: bool = False, most: int = 10) -> Program:
    """Draw a program of up to ``most`` steps."""
    p = Program(draw, symbolic)
    sizes: list[Size] = ["a", 3, "b", 1, 8] if symbolic else [3, 1, 2, 4, 8, 0, 17, 33, 130]
    shapes = [("a", "b")] if symbolic else []
    shapes += [tuple(p.choose(sizes) for _ in range(draw(st.integers(1, 3)))), (p.choose(sizes),), ()]
    for n, shape in enumerate(shapes):
        dtype = p.choose(("float32", "int32", "bool", *INTEGERS, *FLOATS) if n < len(shapes) - 2 else ("int32", "int8"))
        if elements(shape) <= MOST_ELEMENTS:
            p.values.append(Val(f"v{len(p.values)}", shape, dtype))
    p.arguments = list(p.values)
    for step in draw(st.lists(st.sampled_from(STEPS), min_size=most // 2, max_size=most)):
        if any_fits(p):
            step(p)
    made = p.values[len(p.arguments) :] or p.values
    text = "\n".join(line.partition(" = ")[2] for line in p.lines)
    unread = [v for v in made if not re.search(rf"\b{v.name}\b", text)]
    p.results = tuple(dict.fromkeys([*unread, *draw(st.lists(st.sampled_from(made), max_size=2))]))
    p.seed = draw(st.integers(0, 1000))
    return p


def any_fits(p: Program) -> bool:
    """Return True if the program has the values that every step needs."""
    return any(numeric(v) for v in p.values) and any(v.exact for v in p.values) and any(v.rank < 3 for v in p.values)
