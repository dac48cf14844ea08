"""One value less in a memory that is too full: made again where it is read later, or kept on the host until then.

Before::

    y = exp(x); big = f(x); z = g(big); w = y + z
After, if ``y`` is made again (:mod:`.recompute`), or moved (:mod:`.spill`)::

    big = f(x); z = g(big); y2 = exp(x); w = y2 + z       // y too, if somebody read it before big
    y = exp(x); h = transfer y; big = f(x); z = g(big); y2 = transfer h; w = y2 + z
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from aotc.ir.tensor_ir import Function, Region
from aotc.lowering.analysis.costs.model import Costs
from aotc.lowering.program.order_ops import Alive, Functions, Kernels, SpaceOf
from aotc.lowering.program.recompute import recomputed
from aotc.lowering.program.spill import spilled


def relieved(
    function: Function, functions: Functions, kernels: Kernels, finder: Callable[[Function], SpaceOf], costs: Costs,
    space: int, spills: bool, suffix: str,
) -> Function | None:  # fmt: skip
    """Return ``function`` with less at the worst moment of memory ``space``, or None if nothing helps.

    Parameters
    ----------
    finder : callable
        Returns what tells the memory of each value of a function.
    spills : bool
        May values wait in the process's memory?
    suffix : str
        Of the names of new values, of which a function has each once.
    """

    def model_of(body: Region, form: Function) -> Alive:
        return Alive(body, functions, kernels, finder(form), only=space)

    model = model_of(function.body, function)
    before = model.strain(function.body.ops)
    candidates = [*recomputed(model, costs), *(spilled(model, function) if spills else ())]
    for candidate in sorted(candidates, key=lambda c: c.price):
        body = candidate.make(suffix)
        made = replace(function, body=body)
        if model_of(body, made).strain(body.ops) < before:
            return made
    return None
