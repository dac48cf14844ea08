"""Random programs whose values are read several times, at several places; and a count of their scalar operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from aotc.frontend.importer import import_raw
from aotc.frontend.mlir import fetch
from aotc.ir.loop.ir import Kernel
from aotc.ir.loop.run import run_kernel
from aotc.ir.opset import EXPENSIVE
from aotc.ir.tensor.ir import Module
from aotc.lowering.cost_model.work import DEAR_WORK
from aotc.lowering.regions.lower_region import lower_region
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.targets import resolve_targets
from aotc.vmfb.dtypes import to_numpy

ROWS, COLUMNS = 6, 8
Make = Callable[[np.random.Generator, Any, Any], Any]


def _rolled(rng: np.random.Generator, x: Any, y: Any) -> Any:
    """Return a concatenation of two slices."""
    axis = int(rng.integers(2))
    k = int(rng.integers(1, x.shape[axis]))
    first, second = lax.slice_in_dim(x, k, None, axis=axis), lax.slice_in_dim(y, 0, k, axis=axis)
    return jnp.concatenate([first, second], axis)


def _shifted(rng: np.random.Generator, x: Any, y: Any) -> Any:
    """Return a slice with padding around it."""
    axis = int(rng.integers(2))
    k = int(rng.integers(1, 3))
    widths = [(0, 0), (0, 0)]
    widths[axis] = (k, 0) if rng.integers(2) else (0, k)
    begin = 0 if widths[axis][0] else k
    return jnp.pad(lax.slice_in_dim(x, begin, begin + x.shape[axis] - k, axis=axis), widths)


def _taken(rng: np.random.Generator, x: Any, y: Any) -> Any:
    places = rng.integers(0, x.shape[0], (x.shape[0], 1)).astype("int32")
    numbers = lax.GatherDimensionNumbers((1,), (0,), (0,))
    return lax.gather(x, places, numbers, (1, x.shape[1]), mode="clip")


def _turned(rng: np.random.Generator, x: Any, y: Any) -> Any:
    return x.T.reshape(x.shape) if rng.integers(2) else x.reshape(x.shape[::-1]).T


def _less_its_sum(rng: np.random.Generator, x: Any, y: Any) -> Any:
    axis = int(rng.integers(2))
    return y - x.sum(axis, keepdims=True) / x.shape[axis]


def _scaled(rng: np.random.Generator, x: Any, y: Any) -> Any:
    """Return rows times a row."""
    return x * jnp.broadcast_to(y[int(rng.integers(y.shape[0]))], x.shape)


MAKERS: tuple[Make, ...] = (
    lambda rng, x, y: x + y,
    lambda rng, x, y: x * y,
    lambda rng, x, y: jnp.maximum(x, y),
    lambda rng, x, y: jnp.minimum(x, y),
    lambda rng, x, y: jnp.where(x < y, x, -y),
    lambda rng, x, y: jnp.tanh(x),
    lambda rng, x, y: jnp.exp(-jnp.abs(x)),
    lambda rng, x, y: x[::-1],
    lambda rng, x, y: x[:, ::-1],
    _rolled, _shifted, _taken, _turned, _less_its_sum, _scaled,
)  # fmt: skip


def random_program(seed: int, count: int) -> tuple[Callable[..., Any], list[np.ndarray]]:
    """Return a function of ``count`` steps over recent values, and arguments for it."""

    def function(x: Any, y: Any) -> tuple[Any, ...]:
        rng = np.random.default_rng(seed)
        values = [x, y]
        for _ in range(count):
            recent = values[-4:]
            a, b = (recent[int(rng.integers(len(recent)))] for _ in range(2))
            values.append(MAKERS[int(rng.integers(len(MAKERS)))](rng, a, b))
        return tuple(values[-2:])

    rng = np.random.default_rng(seed)
    return function, [rng.standard_normal((ROWS, COLUMNS)).astype("float32") for _ in range(2)]


class FusedProgram:
    """A program after fusion at a level, with a kernel for each region.

    Attributes
    ----------
    executed : Counter of str
        Number of executions of each scalar operation in the last run.
    """

    def __init__(self, function: Callable[..., Any], arguments: Sequence[np.ndarray], level: int) -> None:
        (target,) = resolve_targets("cpu:x86-64-v3")
        options = Options(opt_level=level, target=target.name)
        self.module: Module = run_passes(import_raw(fetch(function, tuple(arguments), {}), options=options), options)
        private = {n: f for n, f in self.module.functions.items() if not f.public}
        self.executed: Counter[str] = Counter()
        self.kernels: dict[str, Kernel] = {n: lower_region(f, target) for n, f in private.items()}

    def run(self, arguments: Sequence[np.ndarray]) -> tuple[list[np.ndarray], int]:
        """Return the results, and the cost of the executed scalar operations by the cost table."""
        (main,) = (f for f in self.module.functions.values() if f.public)
        values = dict(zip(main.body.params, arguments, strict=True))
        executed: Counter[str] = Counter()
        for op in main.body.ops:
            if op.name == "constant":
                values[op.result] = np.broadcast_to(op.attrs["value"], op.result.type.shape)
            elif op.name == "reshape":
                values[op.result] = values[op.operands[0]].reshape(op.result.type.shape)
            else:
                results = [np.zeros(v.type.shape, to_numpy(v.type.dtype)) for v in op.results]
                inputs = [np.ascontiguousarray(values[v]) for v in op.operands]
                run_kernel(self.kernels[op.attrs["callee"]], [*inputs, *results], executed=executed)
                values.update(zip(op.results, results, strict=True))
        self.executed = executed
        work = sum(n * (DEAR_WORK.value if name in EXPENSIVE else 1) for name, n in executed.items())
        return [values[v] for v in main.body.results], work
