"""The cases of ``jax._src.internal_test_util.test_harnesses``, which every installed jax carries.

With 64-bit types on there are all cases of jax's default mode and those of the wide types. Each case runs in
the mode in which it exists by default.
"""

from __future__ import annotations

import importlib
import sys
from functools import cache
from typing import Any

import jax
import numpy as np

from conformance.agreement import UNSTABLE_SORT
from conformance.case import Case


def _load(x64: bool) -> list[Any]:
    """Return the harnesses of one mode; the file and jax's lists of dtypes are made anew for it."""
    with jax.enable_x64(x64):
        utilities = importlib.import_module("jax._src.test_util")
        vars(utilities.dtypes).clear()
        name = "jax._src.internal_test_util.test_harnesses"
        fresh = name not in sys.modules
        module = importlib.import_module(name)
        return list((module if fresh else importlib.reload(module)).all_harnesses)


@cache
def cases() -> tuple[Case, ...]:
    """Return all cases; those that jax itself says it cannot run carry ``skip``.

    They are sorted by name: the file's own order changes from process to process with the addresses of its dtypes.
    """
    narrow = {harness.fullname for harness in _load(False)}
    found = sorted(_load(True), key=lambda harness: harness.fullname)
    return tuple(_case(harness, harness.fullname not in narrow) for harness in found)


def _case(harness: Any, x64: bool) -> Case:
    limits = [limit for limit in harness.jax_unimplemented if limit.filter(device="cpu", dtype=harness.dtype)]
    skip = "; ".join(sorted({limit.description for limit in limits}))
    make = lambda: harness.dyn_args_maker(np.random.RandomState(42))
    group = UNSTABLE_SORT if harness.params.get("is_stable") is False else harness.group_name
    return Case(group, harness.fullname, harness.dyn_fun, make, x64, skip, harness.group_name)
