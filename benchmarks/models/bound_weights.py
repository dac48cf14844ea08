"""Weights in the bundle, bound once, or per call.

On the CPU one thread, in processor time. With ``--target cuda:sm_90`` asynchronous calls of a GPU back to back, with
all arrays in its memory. The ratio is to weights in the bundle (``--no-bundle``: to bound weights).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter, thread_time
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer

import aotc
from benchmarks import options, report, timing
from benchmarks.programs.gpu_models import ZOO, Case, attention, block_weights, feed_forward, layer_norm, normal, weight

CALLS = 30  # of a sample on a GPU


def product(rows: int, size: int) -> Case:
    """Return one matmul with its weights."""
    return Case(lambda w, x: x @ w, weight(size, size), (normal(rows, size),))


def mlp(rows: int, size: int, layers: int) -> Case:
    """Return matmuls, each followed by a bias and a ReLU."""
    weights = [(weight(size, size), normal(size)) for _ in range(layers)]

    def function(weights: Any, x: Any) -> Any:
        for w, b in weights:
            x = jax.nn.relu(x @ w + b)
        return x

    return Case(function, weights, (normal(rows, size),))


def bert(rows: int, layers: int, dim: int = 768, heads: int = 12) -> Case:
    """Return blocks of BERT-base for one sequence."""

    def function(blocks: Any, x: Any) -> Any:
        for b in blocks:
            x = layer_norm(x + attention(x, b, heads), *b["n1"])
            x = layer_norm(x + feed_forward(x, b), *b["n2"])
        return x

    return Case(function, [block_weights(dim, np.float32) for _ in range(layers)], (normal(1, rows, dim),))


def convs(images: int, layers: int) -> Case:
    """Return convolutions of 3 x 3 on images of 32 x 32 pixels and 64 channels."""

    def function(weights: Any, x: Any) -> Any:
        for w in weights:
            x = jnp.maximum(
                jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")), 0
            )
        return x

    return Case(function, [weight(3, 3, 64, 64) for _ in range(layers)], (normal(images, 32, 32, 64),))


CPU: dict[str, Callable[[], Case]] = {
    "1 x 64 x 64": partial(product, 1, 64),
    "1 x 4096 x 4096": partial(product, 1, 4096),
    "64 x 1024 x 1024": partial(product, 64, 1024),
    "mlp 32 x 512, 4 layers": partial(mlp, 32, 512, 4),
    "bert block, 128": partial(bert, 128, 1),
    "4 convolutions": partial(convs, 1, 4),
}
GPU: dict[str, Callable[[], Case]] = {
    "64 x 1024 x 1024": partial(product, 64, 1024),
    "mlp 512 x 1024, 8 layers": partial(mlp, 512, 1024, 8),
    "bert 128, 4 blocks": partial(bert, 128, 4),
    "4 convolutions": partial(convs, 16, 4),
    **{name: ZOO[name] for name in ("bert 8x128", "resnet50 b16", "mlp 128 bf16")},
}


def calls_of(case: Case, target: str, baked: bool) -> dict[str, Callable[[], Any]]:
    """Return the calls of a case, by the location of its weights."""
    on_gpu = target != "cpu"
    flags: dict[str, Any] = {"results": "device"} if on_gpu else {}
    threads = None if on_gpu else 1
    jitted = jax.jit(case.function)
    data = aotc.compile(jitted, case.weights, *case.inputs, target=target, bind=("args[0]",), source=False)
    both = aotc.load(data, threads=threads)
    bound = both.bind({"args[0]": case.weights})
    flat, inputs = jax.tree.leaves(case.weights), list(case.inputs)
    calls: dict[str, Callable[[], Any]] = {}
    if baked:
        weights = jax.tree.map(jnp.asarray, case.weights)  # an array of NumPy cannot be indexed by a traced one
        whole = jax.jit(partial(case.function, weights))
        module = aotc.load(aotc.compile(whole, *inputs, target=target, source=False), threads=threads)
        own = [module.put(x) for x in inputs] if on_gpu else inputs
        calls["in the bundle"] = lambda: module.invoke("main", *own, **flags)
    if on_gpu:
        flat, inputs = [both.put(np.asarray(x)) for x in flat], [both.put(x) for x in inputs]
    calls["bound"] = lambda: bound.invoke(*inputs, **flags)
    calls["passed"] = lambda: both.invoke("main", *flat, *inputs, **flags)
    return calls


def run(
    only: options.Only = "",
    rounds: options.Rounds = 50,
    target: options.Target = "cpu",
    no_bundle: Annotated[bool, typer.Option("--no-bundle", help="Leave out weights in the bundle.")] = False,
) -> None:
    """Print a row for each model and place of its weights."""
    gpu = target.startswith("cuda")
    timed: dict[str, Any] = {"clock": thread_time, "batch": 1}
    if gpu:
        from aotc.vmfb.devices.cuda import driver

        timed = {"clock": perf_counter, "batch": CALLS, "wait": lambda: driver.call("cuCtxSynchronize")}
    table = report.Table("model, weights", report.us("call"), report.ratio("of first"), report.Column("difference"))
    known = GPU if gpu else CPU
    for name in options.select(known, only):
        calls = calls_of(known[name](), target, not no_bundle)
        results = {key: np.asarray(jax.tree.leaves(call())[0], np.float64) for key, call in calls.items()}
        times = timing.interleaved(calls, rounds=rounds, **timed)
        first = next(iter(calls))
        for key in calls:
            difference = float(np.abs(results[key] - results[first]).max())
            table.add(f"{name}, {key}", times.median(key), times.ratio(key, first), difference)
