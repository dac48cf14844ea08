"""Compare bundles compiled with and without their own measured costs: ``python benchmarks/measured_costs.py``.

Each model is compiled, profiled, and compiled again with the record. Both bundles are loaded in one process and called
in turn, round by round; the ratio is the median over the rounds of the ratio of the quickest calls, with to without.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from math import exp, log
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

GRAPHS = 12  # of dense layers, some side by side


def programs() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Return programs of several kernels, in which order, claims and threads matter, beside the models."""
    import jax
    import jax.numpy as jnp
    from models import normal

    def diamond(x: Any, w: Any) -> Any:
        left, right = jnp.tanh(x @ w), jnp.sort(x, 1)
        return (left @ w + right).sum(1)

    def layers(x: Any, w: Any) -> Any:
        for n in range(GRAPHS):
            x = jax.nn.softmax(jnp.tanh(x @ w) + jnp.cumsum(x, 0), n % 2)
        return x

    def small(x: Any) -> Any:
        return [jnp.sort(x * n) for n in range(1, 17)]

    def scan(x: Any, w: Any) -> Any:
        return jax.lax.scan(lambda c, y: (jnp.tanh(c @ w + y), c.sum(1)), x, jnp.stack([x] * 20))

    x, w = normal(256, 256), normal(256, 256, scale=0.05)
    return {
        "diamond": (diamond, (x, w)), "layers": (layers, (x, w)), "sorts": (small, (x[0],)),
        "scan": (scan, (x[:32], w)),
        "gather": (lambda x, i: jnp.sin(x[i]) @ x.T, (x, abs(x[:, 0] * 99).astype("int32") % 256)),
        "sums": (lambda x: [x.sum(0), x.sum(1), x.max(), jnp.argmax(x, 1)], (normal(1000, 1000),)),
    }  # fmt: skip


def quickest(call: Callable[[], Any], seconds: float) -> float:
    """Return the time of the quickest call."""
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def ratio_of(function: Any, inputs: tuple[Any, ...], args: argparse.Namespace) -> tuple[float, float]:
    """Return the time without costs, and the ratio with them to that."""
    import aotc

    plain = aotc.compile(function, *inputs)
    record = aotc.load(plain, threads=1).profile("main", *inputs)
    modules = [aotc.load(data, threads=args.threads) for data in (plain, aotc.compile(function, *inputs, costs=record))]
    rounds = []
    for number in range(args.rounds):
        order = (0, 1) if number % 2 else (1, 0)
        found = {k: quickest(lambda m=modules[k]: m.invoke("main", *inputs), args.seconds) for k in order}
        rounds.append((found[0], found[1]))
    return statistics.median(a for a, _ in rounds), statistics.median(b / a for a, b in rounds)


def main() -> None:
    """Read the command line; measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="of benchmarks/models.py and of this file; default: these")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.1, help="per bundle and round")
    args = parser.parse_args()
    from models import MODELS

    every = programs()
    ratios = {}
    for name in args.models or [*every, "tiny_add", "softmax_rows", "matmul_512", "mlp_bf16", "int8_mlp"]:
        model = MODELS[name]() if name in MODELS else None
        function, inputs = (model.function, model.inputs) if model else every[name]
        seconds, ratios[name] = ratio_of(function, inputs, args)
        print(f"{name:<14} {1e6 * seconds:10.1f} us without, {ratios[name]:.3f} of that with", flush=True)
    mean = exp(sum(map(log, ratios.values())) / len(ratios))
    print(json.dumps({"geometric mean": round(mean, 4), "most": round(max(ratios.values()), 4)}))


if __name__ == "__main__":
    main()
