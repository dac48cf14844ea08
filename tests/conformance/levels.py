"""One case at every optimization level: the levels agree with one another, and each with XLA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from aotc.frontend.importer import import_raw
from aotc.frontend.mlir import fetch
from aotc.ir.opset import CALLS, CONTROL_FLOW, OPS
from aotc.ir.semantics.run import interpret
from aotc.ir.tensor.ir import walk
from aotc.tools.agreement import is_float
from conformance.agreement import SLACK, UNSTABLE_SORT, Reference, Verdict, compare
from conformance.case import Case, by_xla, compiled, reference, run_compiled

LEVELS = (0, 1, 2, 3)


def disagreement(case: Case) -> str:
    """Return what is wrong with a case at some level, or an empty string.

    Integers, and results of programs whose ops only move or compare, are the same bits at every level. Other floats are
    within the bounds that hold beside XLA; those of level 0 beside XLA or beside the ops' references, one by one: it
    rounds after each op, where XLA and the other levels multiply and add at once.
    """
    with jax.enable_x64(case.x64):
        jitted, args, want = by_xla(case)
        exactly = partial(reference, case, jitted, args, want)
        made = {level: run_compiled(compiled(jitted, args, "cpu", level), args) for level in LEVELS}
        exact = case.group != UNSTABLE_SORT and _only_moves(jitted, args)
        for level, got in made.items():
            if case.group != UNSTABLE_SORT and (found := _different(got, made[2], exact)):
                return f"O{level} and O2: {found}"
            verdict = compare(case.group, args, got, want, exactly)
            if verdict.problem and level == 0:
                verdict = _beside_its_ops(case, jitted, args, got, exactly)
            if verdict.problem:
                return f"O{level}: {verdict.problem}"
    return ""


def _beside_its_ops(case: Case, jitted: Any, args: Sequence[Any], got: list[np.ndarray], exactly: Reference) -> Verdict:
    """Compare results with those of the ops' references, and the errors of both."""
    apart = interpret(import_raw(fetch(jitted, args, {})), *jax.tree.leaves(args))
    verdict = compare(case.group, args, got, apart, exactly)
    return replace(verdict, problem="") if 0 < verdict.worst <= verdict.xla + SLACK else verdict


def _only_moves(jitted: Any, args: Sequence[Any]) -> bool:
    """Does every op of the program give the same bits however it is computed?"""
    module = import_raw(fetch(jitted, args, {}))
    names = {op.name for f in module.functions.values() for op in walk(f.body)} - CALLS - CONTROL_FLOW
    return all(OPS[name].tolerance == 0 for name in names)


def _different(got: list[np.ndarray], want: list[np.ndarray], exact: bool) -> str:
    for n, (a, b) in enumerate(zip(got, want, strict=True)):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return f"result {n} is {a.dtype}{a.shape} and {b.dtype}{b.shape}"
        if (exact or not is_float(a)) and a.tobytes() != b.tobytes():
            return f"result {n} differs in its bits"
    return ""
