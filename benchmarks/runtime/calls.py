"""Ways to call a module.

One thread, in processor time. The ratio is to the first row of a group.
"""

from __future__ import annotations

from time import thread_time

import jax.numpy as jnp
import numpy as np

import aotc
from benchmarks import options, report, timing

Group = tuple[int, dict[str, timing.Call]]
"""Calls of a sample, and the calls."""


def tiny() -> Group:
    """Return calls of an addition of four numbers, which measure the overhead of a call."""
    x = np.ones(4, np.float32)
    data = aotc.compile(lambda x, y: x + y, x, x)
    module, limited = aotc.load(data, threads=1), aotc.load(data, threads=1, max_in_flight=2, timeout=60)
    tree = aotc.load(aotc.compile(lambda p: {"a": p["w"] + p["b"]}, {"w": x, "b": x}), threads=1)
    return 2000, {
        "invoke": lambda: module.invoke("main", x, x),
        "module(x, y)": lambda: module(x, x),
        "module(x, y=y)": lambda: module(x, y=x),
        "module({'w': x, 'b': y})": lambda: tree({"w": x, "b": x}),
        "submit, result": lambda: module.submit("main", x, x).result(),
        "with limits": lambda: limited(x, x),
    }  # fmt: skip


def weights() -> Group:
    """Return calls of four layers of 512 with 32 rows, by the location of their weights."""
    rng = np.random.default_rng(0)
    params = [{"w": rng.standard_normal((512, 512)).astype("f4") / 23, "b": np.zeros(512, "f4")} for _ in range(4)]
    x = rng.standard_normal((32, 512)).astype("f4")

    def mlp(params: list[dict[str, np.ndarray]], x: np.ndarray) -> jnp.ndarray:
        for layer in params:
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        return x

    inside = aotc.load(aotc.compile(lambda x: mlp(params, x), x), threads=1)
    passed = aotc.load(aotc.compile(mlp, params, x, bind=["params"]), threads=1)
    own = aotc.load(aotc.compile(mlp, params, x, bind=["params"], weights="unpacked"), threads=1)
    bound = passed.bind({"params": params})
    return 20, {
        "constants": lambda: inside(x), "bound": lambda: bound(x), "weights of its own": lambda: own(x),
        "passed to each call": lambda: passed(params, x),
    }  # fmt: skip


def states() -> Group:
    """Return calls that write a row of 64 numbers into a cache of a megabyte."""
    cache, row, n = np.zeros((4096, 64), np.float32), np.ones(64, np.float32), np.array(3, np.int32)

    def step(cache: jnp.ndarray, n: jnp.ndarray, row: jnp.ndarray) -> dict[str, jnp.ndarray]:
        return {"cache": cache.at[n].set(row), "y": row.sum()}

    module = aotc.load(aotc.compile(step, cache, n, row, state=["cache"]), threads=1)
    separate = aotc.load(aotc.compile(step, cache, n, row), threads=1).state("cache")
    state, mine = module.state("cache"), cache.copy()
    return 300, {
        "invoke, donate=True": lambda: module.invoke("main", mine, n, row, donate=True),
        "state": lambda: state(n, row), "state, not compiled as one": lambda: separate(n, row),
    }  # fmt: skip


GROUPS = {"addition": tiny, "mlp": weights, "cache": states}


def run(only: options.Only = "", rounds: options.Rounds = 15) -> None:
    """Print a row for each way."""
    table = report.Table("group: call", report.us("call"), report.ratio("of first"))
    for name in options.select(GROUPS, only):
        batch, calls = GROUPS[name]()
        times = timing.interleaved(calls, rounds=rounds, clock=thread_time, batch=batch)
        first = next(iter(calls))
        for key in calls:
            table.add(f"{name}: {key}", times.median(key), times.ratio(key, first))
