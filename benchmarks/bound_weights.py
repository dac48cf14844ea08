"""Weights that are in the bundle, bound once, and given to each call: python benchmarks/bound_weights.py [--gpu].

One thread of the CPU, or a GPU with ``--gpu``, where all arrays lie there. Calls in turn; medians of us, and of the
ratios to weights in the bundle, round by round. On a CPU its time counts, on a GPU that of a call of many one behind
the other, of which none is waited for. ``max`` is the largest difference between the three.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_zoo import ZOO, Case, attention, block_weights, feed_forward, layer_norm, normal, weight

import aotc

SECONDS = 6
BEHIND = 30


def product(rows: int, size: int) -> Case:
    """One product."""
    return Case(lambda w, x: x @ w, weight(size, size), (normal(rows, size),))


def mlp(rows: int, size: int, layers: int) -> Case:
    """Products, each with a bias and a relu behind it."""
    weights = [(weight(size, size), normal(size)) for _ in range(layers)]

    def function(weights: Any, x: Any) -> Any:
        for w, b in weights:
            x = jax.nn.relu(x @ w + b)
        return x

    return Case(function, weights, (normal(rows, size),))


def bert(rows: int, layers: int, dim: int = 768, heads: int = 12) -> Case:
    """Blocks of BERT-base, one sequence."""

    def function(blocks: Any, x: Any) -> Any:
        for b in blocks:
            x = layer_norm(x + attention(x, b, heads), *b["n1"])
            x = layer_norm(x + feed_forward(x, b), *b["n2"])
        return x

    return Case(function, [block_weights(dim, np.float32) for _ in range(layers)], (normal(1, rows, dim),))


def convs(images: int, layers: int) -> Case:
    """Convolutions of 3 x 3 taps, of 32 x 32 pixels of 64 channels."""

    def function(weights: Any, x: Any) -> Any:
        for w in weights:
            x = jnp.maximum(
                jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")), 0
            )
        return x

    return Case(function, [weight(3, 3, 64, 64) for _ in range(layers)], (normal(images, 32, 32, 64),))


CPU: dict[str, Callable[[], Case]] = {
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


def ways(case: Case, target: str, baked: bool) -> dict[str, Callable[[], Any]]:
    """Return the calls by what they are called."""
    on_gpu = target != "cpu"
    options: dict[str, Any] = {"results": "device"} if on_gpu else {}
    threads = None if on_gpu else 1
    jitted = jax.jit(case.function)
    data = aotc.compile(jitted, case.weights, *case.inputs, target=target, bind=("args[0]",), source=False)
    both = aotc.load(data, threads=threads)
    bound = both.bind({"args[0]": case.weights})
    flat, inputs = jax.tree.leaves(case.weights), list(case.inputs)
    found: dict[str, Callable[[], Any]] = {}
    if baked:
        held = jax.tree.map(jnp.asarray, case.weights)  # an array of NumPy cannot be indexed by a traced one
        whole = jax.jit(partial(case.function, held))
        module = aotc.load(aotc.compile(whole, *inputs, target=target, source=False), threads=threads)
        own = [module.put(x) for x in inputs] if on_gpu else inputs
        found["in the bundle"] = lambda: module.invoke("main", *own, **options)
    if on_gpu:
        flat, inputs = [both.put(np.asarray(x)) for x in flat], [both.put(x) for x in inputs]
    found["bound"] = lambda: bound.invoke(*inputs, **options)
    found["given"] = lambda: both.invoke("main", *flat, *inputs, **options)
    return found


def on_cpu(call: Callable[[], Any]) -> float:
    """Return the time of the processor that a call takes, in us."""
    begin = time.thread_time()
    call()
    return (time.thread_time() - begin) * 1e6


def on_gpu(call: Callable[[], Any]) -> float:
    """Return us of a call of many that are waited for together."""
    from aotc.vmfb.devices.cuda import driver

    driver.call("cuCtxSynchronize")
    begin = time.perf_counter()
    for _ in range(BEHIND):
        kept = call()
    driver.call("cuCtxSynchronize")
    took = (time.perf_counter() - begin) / BEHIND * 1e6
    del kept
    return took


def measure(name: str, case: Case, target: str, seconds: float, baked: bool) -> None:
    """Print the line of a model."""
    calls = ways(case, target, baked)
    timed = on_cpu if target == "cpu" else on_gpu
    results = [np.asarray(jax.tree.leaves(call())[0], np.float64) for call in calls.values()]
    worst = max(float(np.abs(r - results[0]).max()) for r in results)
    for call in calls.values():
        timed(call)
    rounds = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(rounds) < 5:
        rounds.append([timed(call) for call in calls.values()])
    columns = []
    for n, what in enumerate(calls):
        took = statistics.median(row[n] for row in rounds)
        ratio = statistics.median(row[n] / row[0] for row in rounds)
        columns.append(f"{what} {took:8.1f} us {ratio:6.3f}")
    print(f"{name:24} {', '.join(columns)}   max {worst:.1e}, {len(rounds)} rounds", flush=True)


def main() -> None:
    """Run what the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of names of models")
    parser.add_argument("--gpu", action="store_true", help="on a GPU of architecture 9.0")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each model")
    parser.add_argument("--no-bundle", action="store_true", help="leave out weights in the bundle: bound counts as 1")
    given = parser.parse_args()
    for name, make in (GPU if given.gpu else CPU).items():
        if not given.names or any(part in name for part in given.names):
            target = "cuda:sm_90" if given.gpu else "cpu"
            measure(name, make(), target, given.seconds, not given.no_bundle)


if __name__ == "__main__":
    main()
