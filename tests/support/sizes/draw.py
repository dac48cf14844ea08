"""Random choices for families of programs: sizes around powers of two, types, values, and a limit of work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

FLOATS = ("float32", "float32", "float32", "float64", "bfloat16", "float16")
EPS = {"float32": 2**-23, "float64": 2**-52, "bfloat16": 2**-7, "float16": 2**-10}
MOST_FLOPS = 2e8
MOST_ELEMENTS = 10**6


@dataclass(frozen=True)
class Program:
    """One case.

    Attributes
    ----------
    text : str
        Description of the program, enough to reconstruct it.
    function : callable
        Function of JAX arrays.
    arguments : sequence of array
        Its arguments; ``baked`` selects those that become constants.
    terms : int
        Number of products that an element of a result sums; 0 if the results have the same bits everywhere.
    """

    text: str
    function: Callable[..., Any]
    arguments: Sequence[np.ndarray]
    terms: int
    baked: tuple[int, ...] = field(default=())


class Draw:
    """Stream of random choices, reproducible by its seed."""

    def __init__(self, *seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def one(self, *options: Any) -> Any:
        """Return one of ``options``."""
        return options[int(self.rng.integers(len(options)))]

    def maybe(self, chance: float = 0.5) -> bool:
        """Return True with probability ``chance``."""
        return bool(self.rng.random() < chance)

    def size(self, most: int, least: int = 1) -> int:
        """Return a size from ``least`` to ``most``: half of them powers of two and their neighbours."""
        most = max(most, least)
        if self.maybe():
            near = 2 ** int(self.rng.integers(0, most.bit_length())) + self.one(-1, 0, 0, 1)
        else:
            near = round(float(np.exp(self.rng.uniform(np.log(least), np.log(most + 1)))))
        return min(max(near, least), most)

    def shape(self, rank: int, most: int = MOST_ELEMENTS) -> tuple[int, ...]:
        """Return ``rank`` sizes whose product is at most ``most``, with the large size at a random place."""
        sizes: list[int] = []
        for _ in range(rank):
            sizes.append(self.size(max(most // max(int(np.prod(sizes)), 1), 1)))
        return tuple(int(n) for n in self.rng.permutation(sizes))

    def values(self, *shape: int, dtype: str = "float32", scale: float = 1.0) -> np.ndarray:
        """Return random values; integers over the whole range of their type."""
        if np.issubdtype(np.dtype(dtype) if dtype != "bfloat16" else np.float32, np.integer):
            info = np.iinfo(dtype)
            low, high = (info.min, info.max) if info.bits == 8 else (-1000, 1000)
            return self.rng.integers(max(low, info.min), high, shape, endpoint=True).astype(dtype)
        kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
        return (self.rng.standard_normal(shape) * scale).astype(kind)


def epilogue(d: Draw, out: Callable[..., Any], columns: int, dtype: str) -> tuple[str, Callable[..., Any], list[Any]]:
    """Return an epilogue of a matmul or a convolution: its text, the result, and its further arguments."""
    kind = d.one("none", "none", "bias", "relu", "both", "scale", "sum", "tanh")
    bias = d.values(columns, dtype=dtype)
    after = {
        "none": lambda y, c: y,
        "bias": lambda y, c: y + c,
        "relu": lambda y, c: jnp.maximum(y, 0),
        "both": lambda y, c: jnp.maximum(y + c, 0) * 2,
        "scale": lambda y, c: y * c,
        "sum": lambda y, c: y.sum(-1),
        "tanh": lambda y, c: jnp.tanh(y / 64),
    }[kind]
    return kind, lambda *args: after(out(*args[:-1]), args[-1]), [bias]
