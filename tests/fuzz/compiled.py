"""Changed StableHLO that the compiler accepts, compiled at one of its levels, run, and held beside XLA.

Where XLA refuses a module, jaxlib's interpreter of StableHLO is the reference; it ends its process at what it does not
know, which is its own matter. The modules are those of ``modules.py``, by the same numbers.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

import aotc
from aotc.diagnostics import CompileError
from aotc.frontend.contexts import make_context
from aotc.frontend.mlir import fetch
from aotc.frontend.xla import run_xla
from aotc.vmfb.dtypes import to_numpy
from aotc.vmfb.errors import CallError
from fuzz.children import not_ours
from fuzz.modules import input_of, mutant

__all__ = ["PATIENCE", "case", "input_of"]
PATIENCE = 60.0  # seconds: XLA and LLVM start within it on a busy machine
SOLVERS = ("cholesky", "triangular_solve")  # of a singular matrix they may give anything that is not finite
LARGEST = 10**6  # elements of an argument
ULPS = 64  # what another order of sums, or another formula, may cost, of the largest value
WIDEST = 0.05  # the same for types of few bits, but never less than one of their steps


def case(number: int) -> str:
    """Compile, run and compare one mutant."""
    text = mutant(number)
    try:
        data = aotc.compile(text, verify_each=True, jobs=1, opt_level=number % 4)
    except CompileError:
        return "refused"
    module = aotc.load(data, threads=1 + number % 2)
    arrays = arguments_of(module, number, any(name in text for name in SOLVERS))
    if arrays is None:
        return "accepted, too large to run"
    try:
        found = module.invoke("main", *arrays)
    except CallError:
        return "accepted, CallError"
    except KeyboardInterrupt:
        if "while" in text:
            return "a loop of the model, which Ctrl-C ended"
        raise
    by, wanted = reference(text, arrays)
    if not by:
        return "runs, without a reference"
    for n, (one, other) in enumerate(zip(found, wanted, strict=True)):
        compare(np.asarray(one), np.asarray(other), f"result {n} beside {by}\n{text}")
    return f"right beside {by}"


def arguments_of(module: Any, number: int, solved: bool) -> list[np.ndarray] | None:
    """Return small values for what ``main`` takes, regular ones for matrices that are ``solved``; None if large."""
    rng = np.random.default_rng(number)
    arrays = []
    for argument in module.main.signature.arguments:
        shape = [d if isinstance(d, int) else 3 for d in argument["dims"]]
        if np.prod(shape) > LARGEST:
            return None
        dtype = to_numpy(argument["dtype"])
        low = 0 if dtype.kind in "bu" else -2
        values = rng.integers(low, 4, shape)
        if solved and len(shape) > 1 and shape[-1] == shape[-2]:
            values = values @ np.swapaxes(values, -1, -2) + 8 * np.eye(shape[-1], dtype=int)
        arrays.append((values * (0.75 if dtype.kind not in "biu" else 1)).astype(dtype))
    return arrays


def reference(text: str, arrays: list[np.ndarray]) -> tuple[str, list[np.ndarray]]:
    """Return who computed it and what; nobody and nothing if nobody can."""
    with not_ours():
        try:
            return "XLA", run_xla(fetch(text), arrays)
        except CompileError:
            pass
        with make_context():
            try:
                values = [ir.DenseElementsAttr.get(np.ascontiguousarray(a)) for a in arrays]
                return "the interpreter", [np.array(v) for v in stablehlo.eval_module(ir.Module.parse(text), values)]
            except Exception:  # whatever MLIR raises at what it does not take
                return "", []


def compare(found: np.ndarray, wanted: np.ndarray, what: str) -> None:
    """Integers are equal, floats to within :data:`ULPS`."""
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), what
    if found.dtype.kind in "biu" and found.dtype.isbuiltin:
        np.testing.assert_array_equal(found, wanted, err_msg=what)
        return
    wide = "c16" if found.dtype.kind == "c" else "f8"
    left, right = found.astype(wide), wanted.astype(wide)
    try:
        step = float(ml_dtypes.finfo(found.dtype).eps)
    except ValueError:  # an integer of few bits
        step = 0.0
    tolerance = max(step, min(ULPS * step, WIDEST))
    largest = float(np.max(np.abs(right[np.isfinite(right)]), initial=0))
    np.testing.assert_allclose(left, right, rtol=tolerance, atol=tolerance * max(largest, 1.0), err_msg=what)
