"""What a model of the zoo is: a function of its inputs, the inputs, and the weights that it holds."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np


class Model(NamedTuple):
    """``function(*inputs)`` is the model; its ``weights`` are counted for the page, the function has them."""

    function: Callable[..., Any]
    inputs: tuple[np.ndarray, ...]
    weights: Any


class Entry(NamedTuple):
    """A row of the page: where the model is from, what it is, and ``build(small)``."""

    library: str
    what: str
    build: Callable[[bool], Model]


ZOO: dict[str, Entry] = {}
ONES = re.compile("scale|gamma|weight|var")
EMBEDDING = re.compile("embedding")


def model(library: str, what: str) -> Callable[[Callable[[bool], Model]], Callable[[bool], Model]]:
    """Add a builder to :data:`ZOO` under its name."""

    def add(build: Callable[[bool], Model]) -> Callable[[bool], Model]:
        ZOO[build.__name__] = Entry(library, what, build)
        return build

    return add


def normal(*shape: int) -> np.ndarray:
    """Return normal numbers."""
    return np.random.default_rng(0).standard_normal(shape).astype("float32")


def tokens(high: int, *shape: int) -> np.ndarray:
    """Return integers below ``high``."""
    return np.random.default_rng(0).integers(0, high, shape).astype("int32")


def seeded(shapes: Any, outputs_last: bool = True) -> Any:
    """Return weights for a tree of shapes: of libraries that make them one by one, this takes a hundredth of the time.

    Sums stay about as large as what is summed; biases are near 0, scales and variances near 1, as after training.
    """
    random = np.random.default_rng(7)

    def one(path: Any, leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return np.zeros(leaf.shape, leaf.dtype)
        shape, name = tuple(leaf.shape), jax.tree_util.keystr(path[-1:])
        x = random.standard_normal(shape, "float32")
        if len(shape) < 2:
            x = 0.05 * x + bool(ONES.search(name))
        elif not EMBEDDING.search(name):
            x *= float(np.prod(shape[:-1] if outputs_last else shape[1:])) ** -0.5
        return x.astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(one, shapes)
