"""Ways of a call: ``python benchmarks/calls.py``. One thread, its processor time, one after the other, medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

import aotc

ROUNDS = 15


def compare(title: str, ways: dict[str, Callable[[], object]], calls: int) -> None:
    """Print the median of each way, and the median of its ratio to the first."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, call in ways.items():
            call()
            start = time.thread_time()
            for _ in range(calls):
                call()
            times[name].append((time.thread_time() - start) / calls * 1e6)
    first = next(iter(times.values()))
    for name, own in times.items():
        ratio = statistics.median(a / b for a, b in zip(own, first, strict=True))
        print(f"{title}: {name:32} {statistics.median(own):8.2f} us, {ratio:.2f}")


def tiny() -> None:
    """An addition of four numbers: what a call costs by itself."""
    x = np.ones(4, np.float32)
    data = aotc.compile(lambda x, y: x + y, x, x)
    module, limited = aotc.load(data, threads=1), aotc.load(data, threads=1, max_in_flight=2, timeout=60)
    tree = aotc.load(aotc.compile(lambda p: {"a": p["w"] + p["b"]}, {"w": x, "b": x}), threads=1)
    compare("addition", {
        "invoke": lambda: module.invoke("main", x, x),
        "module(x, y)": lambda: module(x, x),
        "module(x, y=y)": lambda: module(x, y=x),
        "module({'w': x, 'b': y})": lambda: tree({"w": x, "b": x}),
        "submit, result": lambda: module.submit("main", x, x).result(),
        "with limits": lambda: limited(x, x),
    }, 2000)  # fmt: skip


def weights() -> None:
    """Four layers of 512, 32 rows: where the weights are."""
    rng = np.random.default_rng(0)
    params = [{"w": rng.standard_normal((512, 512)).astype("f4") / 23, "b": np.zeros(512, "f4")} for _ in range(4)]
    x = rng.standard_normal((32, 512)).astype("f4")

    def mlp(params: list[dict[str, np.ndarray]], x: np.ndarray) -> jnp.ndarray:
        for layer in params:
            x = jnp.tanh(x @ layer["w"] + layer["b"])
        return x

    inside = aotc.load(aotc.compile(lambda x: mlp(params, x), x), threads=1)
    given = aotc.load(aotc.compile(mlp, params, x, bind=["params"]), threads=1)
    own = aotc.load(aotc.compile(mlp, params, x, bind=["params"], weights="unpacked"), threads=1)
    bound = given.bind({"params": params})
    compare("mlp", {
        "constants": lambda: inside(x), "bound": lambda: bound(x), "weights of its own": lambda: own(x),
        "given to each call": lambda: given(params, x),
    }, 20)  # fmt: skip


def states() -> None:
    """A row of 64 numbers into a cache of a megabyte."""
    cache, row, n = np.zeros((4096, 64), np.float32), np.ones(64, np.float32), np.array(3, np.int32)

    def step(cache: jnp.ndarray, n: jnp.ndarray, row: jnp.ndarray) -> dict[str, jnp.ndarray]:
        return {"cache": cache.at[n].set(row), "y": row.sum()}

    module = aotc.load(aotc.compile(step, cache, n, row, state=["cache"]), threads=1)
    apart = aotc.load(aotc.compile(step, cache, n, row), threads=1).state("cache")
    state, mine = module.state("cache"), cache.copy()
    compare("cache", {
        "invoke, donate=True": lambda: module.invoke("main", mine, n, row, donate=True),
        "state": lambda: state(n, row), "state, not compiled as one": lambda: apart(n, row),
    }, 300)  # fmt: skip


if __name__ == "__main__":
    tiny()
    weights()
    states()
