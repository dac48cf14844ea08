"""Programs for GPUs on a machine without one: kernels run in the loop IR interpreter, steps as planned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from aotc.frontend.importer import import_raw
from aotc.frontend.mlir import fetch
from aotc.ir.tensor.ir import Function
from aotc.lowering.lower import Variant, lower
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.targets import resolve_targets
from support.differential import close
from support.program_run import run_program

GPU = "cuda:sm_90"


def gpu_program(
    model: Any, args: Sequence[Any] = (), level: int = 2, target: str = GPU, **options: Any
) -> tuple[Function, Variant]:
    """Return the public function of a model after all passes, and the program for a GPU."""
    chosen = Options(target=target, opt_level=level, verify_each=True, **options)
    raw = fetch(jax.jit(model) if callable(model) else model, args, {})
    module = run_passes(import_raw(raw, options=chosen, platform="cpu"), chosen)
    (function,) = (f for f in module.functions.values() if f.public)
    return function, lower(module, resolve_targets(target)[0], chosen)


def run_gpu_program(function: Function, variant: Variant, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Run the program on NumPy and return its results."""
    return run_program(variant.steps[function.name], function, variant.constants, arrays)


def check_gpu(function: Callable[..., Any], args: Sequence[Any], level: int = 2, factor: float = 1.0) -> Variant:
    """Assert that a function lowered for a GPU agrees with ``jax.jit``; return its program."""
    program = gpu_program(function, args, level)
    got = run_gpu_program(*program, [np.asarray(a) for a in jax.tree.leaves(args)])
    close(got, jax.tree.leaves(jax.jit(function)(*args)), factor)
    return program[1]
