"""Chains of commands with and without tile dependences.

Each program is compiled three times: every command waits for its whole predecessors; each waits for tiles where
possible; and as the compiler decides. The ratio is to the first form. For one thread the processor time counts: the
difference then shows the effect of caches.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter, thread_time
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from jax import lax

import aotc
from aotc.lowering.program import tile_dependences as tile_edges
from benchmarks import options, report, timing

NHWC, NCHW = ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")
FORMS: dict[str, Callable[..., bool] | None] = {"whole": lambda *_: False, "tiles": lambda *_: True, "default": None}


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    """Return the type of an f32 array."""
    return jax.ShapeDtypeStruct(shape, "float32")


def conv_pool(x: jax.Array, w: jax.Array) -> jax.Array:
    """Compute a convolution with its activation, and a pooling."""
    y = jnp.maximum(lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NHWC), 0)
    return lax.reduce_window(y, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def conv_pool_first(x: jax.Array, w: jax.Array) -> jax.Array:
    """Compute a convolution with its activation, and a pooling, with channels first."""
    y = jnp.maximum(lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NCHW), 0)
    return lax.reduce_window(y, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")


def conv_pool_conv(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    """Compute two convolutions with a pooling between them."""
    return lax.conv_general_dilated(conv_pool(x, w), v, (1, 1), "SAME", dimension_numbers=NHWC)


def rows(x: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
    """Compute softmax, layer norm and gelu; long rows need several kernels."""
    y = jax.nn.softmax(x, axis=-1)
    mean = y.mean(-1, keepdims=True)
    y = (y - mean) / jnp.sqrt(((y - mean) ** 2).mean(-1, keepdims=True) + 1e-5) * scale + shift
    return jax.nn.gelu(y)


def sorted_rows(x: jax.Array) -> jax.Array:
    """Compute row-wise regions that cannot be fused with each other."""
    return jnp.cumsum(jnp.sort(jnp.cumsum(x, -1), -1), -1)


def layers(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """Compute two layers of a perceptron."""
    return jnp.maximum(jnp.maximum(x @ a, 0) @ b, 0)


PROGRAMS: dict[str, tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]] = {
    "conv_pool": (conv_pool, [f32(1, 224, 224, 16), f32(3, 3, 16, 32)]),
    "conv_pool_thin": (conv_pool, [f32(1, 448, 448, 3), f32(3, 3, 3, 16)]),
    "conv_pool_first": (conv_pool_first, [f32(1, 16, 224, 224), f32(32, 16, 3, 3)]),
    "conv_pool_first_thin": (conv_pool_first, [f32(1, 3, 448, 448), f32(16, 3, 3, 3)]),
    "conv_pool_conv": (conv_pool_conv, [f32(1, 112, 112, 16), f32(3, 3, 16, 32), f32(3, 3, 32, 32)]),
    "rows": (rows, [f32(64, 1 << 17), f32(1 << 17), f32(1 << 17)]),
    "rows_in_one": (rows, [f32(4096, 1024), f32(1024), f32(1024)]),
    "sorted_rows": (sorted_rows, [f32(4096, 256)]),
    "few_rows": (rows, [f32(5, 1 << 17), f32(1 << 17), f32(1 << 17)]),
    "layers": (layers, [f32(512, 512), f32(512, 1024), f32(1024, 512)]),
}


def compile_forms(name: str) -> dict[str, bytes]:
    """Compile a program with each form of dependences."""
    function, types = PROGRAMS[name]
    model = jax.jit(function).lower(*types).as_text()
    found, chosen = {}, tile_edges.tile_edge_pays
    for form, pays in FORMS.items():
        tile_edges.tile_edge_pays = pays or chosen
        try:
            found[form] = aotc.compile(model, cache=False)
        finally:
            tile_edges.tile_edge_pays = chosen
    return found


def measure(name: str, forms: dict[str, bytes], threads: int, rounds: int) -> timing.Times:
    """Return the times of each form, after a comparison of the results."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(t.shape).astype(np.float32) for t in PROGRAMS[name][1]]
    modules = {form: aotc.load(data, threads=threads) for form, data in forms.items()}
    results = {form: [np.asarray(r) for r in m.invoke("main", *arrays)] for form, m in modules.items()}
    for got in results.values():
        assert all(np.array_equal(x, y) for x, y in zip(got, results["whole"], strict=True)), "the results differ"
    calls = {form: lambda m=module: m.invoke("main", *arrays) for form, module in modules.items()}
    return timing.interleaved(calls, rounds=rounds, clock=thread_time if threads == 1 else perf_counter)


def run(
    only: options.Only = "",
    rounds: options.Rounds = 60,
    threads: Annotated[str, typer.Option(help="Numbers of threads, separated by commas.")] = "1,2",
) -> None:
    """Print a row for each program and number of threads."""
    columns = [report.ms("whole"), report.ms("tiles"), report.ms("default")]
    table = report.Table("program, threads", *columns, report.ratio("tiles/whole"), report.ratio("def/whole"))
    for name in options.select(PROGRAMS, only, smallest="sorted_rows"):
        forms = compile_forms(name)
        for count in map(int, threads.split(",")):
            times = measure(name, forms, count, rounds)
            ratios = [times.ratio(form, "whole") for form in ("tiles", "default")]
            table.add(f"{name}, {count}", *map(times.median, forms), *ratios)
