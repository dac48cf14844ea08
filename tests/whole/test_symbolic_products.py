"""Matmuls of sizes that only a call knows: planned as tiles, right at all sizes, reading and writing within bounds.

Each program is compiled once for symbolic sizes and called with many. Arguments and results lie between guards: what is
read beyond an argument is NaN, what is written beyond a result is seen. The oracle is NumPy in float64 or complex128.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import export

import aotc
from aotc.frontend.importer import import_model
from aotc.ir.dims.algebra import static
from aotc.ir.dims.symbols import evaluate
from aotc.lowering.lower import lower
from aotc.lowering.plans.region_plan import parse_plan
from aotc.lowering.program.schedule import CommandBufferEncoder
from aotc.lowering.regions.lower_region import lower_region
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.targets import TARGETS, resolve_targets
from aotc.vmfb.abi import Slots, operand_value
from aotc.vmfb.commands import decode_commands
from aotc.vmfb.host.machine import cpu_features

pytestmark = pytest.mark.cpu
GUARD = 4096
"""Elements before and after each array: more than a panel is wide."""
SIZES = (1, 2, 3, 7, 13, 14, 15, 16, 17, 29, 31, 32, 33, 64, 97, 128, 131)
DTYPES = {
    "f32": (np.float32, 1e-5), "f64": (np.float64, 1e-13), "i32": (np.int32, 0), "f16": (np.float16, 2e-3),
    "bf16": (ml_dtypes.bfloat16, 2e-2), "c64": (np.complex64, 1e-5), "c128": (np.complex128, 1e-13),
}  # fmt: skip
"""For each dtype: NumPy's, and the bound of an error relative to the largest element of the result."""


class Program(NamedTuple):
    """A function of arrays, and the dims of its arguments; a number is a size that is known."""

    function: Callable[..., Any]
    shapes: tuple[str, ...]


def relu_of_layer(x: Any, y: Any, b: Any) -> Any:
    return jnp.maximum(x @ y + b, 0)


PROGRAMS = {
    "square": Program(lambda x, y: x @ y, ("n,n", "n,n")),
    "all": Program(lambda x, y: x @ y, ("m,k", "k,n")),
    "rows": Program(lambda x, y: x @ y, ("m,300", "300,250")),
    "columns": Program(lambda x, y: x @ y, ("40,70", "70,n")),
    "terms": Program(lambda x, y: x @ y, ("40,k", "k,70")),
    "gram": Program(lambda x: x @ x.T, ("n,40",)),
    "transposed left": Program(lambda x, y: x.T @ y, ("k,m", "k,n")),
    "transposed right": Program(lambda x, y: x @ y.T, ("m,k", "n,k")),
    "batch": Program(lambda x, y: x @ y, ("3,m,k", "3,k,n")),
    "batches": Program(lambda x, y: x @ y, ("b,n,24", "b,24,n")),
    "slices": Program(lambda x, y: x[:, 1:] @ y[1:], ("m,k+1", "k+1,n")),
    "epilogue": Program(relu_of_layer, ("m,k", "k,n", "n")),
    "transposed result": Program(lambda x, y: (x @ y).T * 2, ("m,k", "k,n")),
    "empty": Program(lambda x, y: x @ y, ("m-1,k-1", "k-1,n-1")),
    "two": Program(lambda x, y: (x @ y + 1) @ y, ("n,n", "n,n")),
}
CALLS = [(n, n, n) for n in SIZES] + [
    (1, 500, 33), (5, 64, 200), (200, 3, 65), (29, 129, 97), (33, 1, 5), (1, 4, 40), (40, 4, 1), (57, 300, 260),
    (20, 1024, 70), (33, 515, 31),
]  # fmt: skip
"""Numbers of rows, terms and columns; the last but one has rows that share cache sets. "empty" has
one less of each."""


def dims_of(shape: str, sizes: dict[str, int]) -> tuple[int, ...]:
    return tuple(int(eval(d, {}, sizes)) for d in shape.split(","))


@functools.cache
def exported(name: str, dtype: str) -> export.Exported:
    """Return a program as JAX exports it."""
    scope, kind = export.SymbolicScope(), DTYPES[dtype][0]
    types = [jax.ShapeDtypeStruct(export.symbolic_shape(s, scope=scope), kind) for s in PROGRAMS[name].shapes]
    with jax.enable_x64(True):
        return export.export(jax.jit(PROGRAMS[name].function))(*types)


def guarded(shape: tuple[int, ...], dtype: Any, fill: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return an array of ``shape``, and the memory around it, which is full of ``fill``."""
    size = int(np.prod(shape))
    memory = np.full(size + 2 * GUARD, fill, dtype)
    return memory[GUARD : GUARD + size].reshape(shape), memory


def arguments(shapes: list[tuple[int, ...]], dtype: str) -> list[np.ndarray]:
    rng, kind = np.random.default_rng(7), DTYPES[dtype][0]
    made = []
    for shape in shapes:
        array, _ = guarded(shape, kind, 1 << 20 if dtype == "i32" else np.nan)
        values = rng.standard_normal(shape)
        if array.dtype.kind == "c":
            values = values + 1j * rng.standard_normal(shape)
        array[...] = (8 * values if dtype == "i32" else values).astype(kind)
        made.append(array)
    return made


def wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def check(name: str, dtype: str, target: str, calls: Any = CALLS, level: int = 2, threads: int = 1) -> None:
    """Compare a program with NumPy at many sizes, with memory around each array that must not matter."""
    if not cpu_features().issuperset(TARGETS[target].features):
        pytest.skip(f"this machine does not run kernels for {target}")
    module = aotc.load(aotc.compile(exported(name, dtype), target=target, opt_level=level), threads=threads)
    for m, k, n in calls:
        sizes = {"m": m, "k": k, "n": n, "b": 2}
        given = arguments([dims_of(s, sizes) for s in PROGRAMS[name].shapes], dtype)
        numpy = functools.partial(PROGRAMS[name].function, *map(wide, given))
        with jax.enable_x64(True):
            expected = np.asarray(numpy())
        out, memory = guarded(expected.shape, given[0].dtype, 77)
        module.invoke("main", *given, out=[out])
        around = np.concatenate([memory[:GUARD], memory[memory.size - GUARD :]])
        assert np.all(around == 77), sizes
        error = np.abs(wide(out) - expected).max(initial=0)
        assert error <= DTYPES[dtype][1] * max(np.abs(expected).max(initial=0), 1), (sizes, error)


@pytest.mark.parametrize("target", ["cpu:x86-64-v3", "cpu:x86-64-v4"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_matmuls_of_symbolic_size_match_f64(name, target):
    check(name, "f32", target)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != "f32"])
def test_matmuls_of_symbolic_size_and_each_dtype_match_f64(dtype):
    for target in ("cpu:x86-64-v3", "cpu:x86-64-v4-bf16" if dtype == "bf16" else "cpu:x86-64-v4"):
        check("all", dtype, target)


def test_bf16_pairs_of_partial_vectors_match_f64():
    for name in ("transposed left", "batch", "epilogue", "columns"):
        check(name, "bf16", "cpu:x86-64-v4-bf16")


def test_matmuls_of_symbolic_size_match_at_level_0_and_on_two_threads():
    check("all", "f32", "cpu:x86-64-v3", level=0)
    check("all", "f32", "cpu:x86-64-v3", [(300, 200, 310), (131, 97, 200)], threads=2)
    check("all", "bf16", "cpu:x86-64-v4-bf16", [(300, 201, 310)], threads=2)


# --- plans --------------------------------------------------------------------


def plans(name: str, dtype: str, target: str) -> list[str]:
    """Return the plans of a program's regions, the matmuls' alone."""
    options = Options(target=target)
    module = run_passes(import_model(exported(name, dtype)), options)
    regions = [f for f in module.functions.values() if f.attrs.get("kind") == "contract"]
    (machine,) = resolve_targets(target)
    return [type(parse_plan(lower_region(f, machine).plan)).__name__ for f in regions]


@pytest.mark.parametrize(("name", "dtype", "target", "expected"), [
    ("square", "f32", "cpu:x86-64-v3", ["CopiedPanelPlan"]),
    ("square", "f64", "cpu:x86-64-v4", ["CopiedPanelPlan"]),
    ("square", "c64", "cpu:x86-64-v4", ["CopiedPanelPlan"]),
    ("square", "i32", "cpu:x86-64-v4", ["CopiedPanelPlan"]),
    ("square", "bf16", "cpu:x86-64-v4", ["CopiedPanelPlan"]),
    ("square", "bf16", "cpu:x86-64-v4-bf16", ["CopiedPanelPlan"]),
    ("square", "bf16", "cpu:x86-64-amx", ["RegisterTilePlan"]),
    ("square", "f32", "cpu:aarch64", ["CopiedPanelPlan"]),
    ("rows", "f32", "cpu:x86-64-v4", ["CopiedPanelPlan"]),
    ("columns", "f32", "cpu:x86-64-v4", ["CopiedPanelPlan"]),
    ("terms", "f32", "cpu:x86-64-v4", ["CopiedPanelPlan"]),
    ("gram", "f32", "cpu:x86-64-v4", ["RegisterTilePlan"]),
    ("transposed right", "f32", "cpu:x86-64-v4", ["RegisterTilePlan"]),
    ("two", "f32", "cpu:x86-64-v4", ["CopiedPanelPlan"] * 2),
])  # fmt: skip
def test_matmuls_of_symbolic_size_are_planned_as_tiles(name, dtype, target, expected):
    assert plans(name, dtype, target) == expected


def claims(name: str, n: int) -> list[tuple[bool, int]]:
    """Return, for each command of a program, whether one thread runs it at any size, and its claims at size ``n``."""
    (target,), options = resolve_targets("cpu:x86-64-v3"), Options(target="cpu:x86-64-v3")
    variant = lower(run_passes(import_model(exported(name, "f32")), options), target, options)
    scheduler = CommandBufferEncoder(Slots(len(PROGRAMS[name].shapes), 1), lambda kernel: 0, variant.costs)
    buffer = scheduler.encode(variant.steps["main"].steps)
    parameters = [static(evaluate(e, {"n": n})) for e in buffer.parameters]
    found = []
    for graph in decode_commands(buffer.code):
        for command in graph.commands:
            items, grain = (operand_value(x, parameters) for x in (command.items, command.grain))
            found.append((bool(graph.serial), -(-items // grain)))
    return found


def test_a_call_chooses_the_threads_of_a_matmul_by_its_size():
    assert claims("square", 16) == [(False, 1)]
    ((serial, many),) = claims("square", 500)
    assert not serial
    assert 8 <= many <= 64
