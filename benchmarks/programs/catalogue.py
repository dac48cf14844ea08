"""Builders of the programs of ``benchmarks models slower``, and their table by name.

A builder returns a function and its arguments; weights are arguments. It imports its own library.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.programs.models import normal

Program = tuple[Callable[..., Any], tuple[Any, ...]]
PROGRAMS: dict[str, Callable[[], Program]] = {}


def program(builder: Callable[[], Program]) -> Callable[[], Program]:
    """Add a builder to :data:`PROGRAMS` under its name."""
    PROGRAMS[builder.__name__] = builder
    return builder


def trained(loss: Callable[..., Any], weights: Any, optimizer: Any, *inputs: np.ndarray) -> Program:
    """Return a training step: it returns the loss, new weights and new state of the optimizer."""
    leaves, tree = jax.tree.flatten(weights)
    state, state_tree = jax.tree.flatten(optimizer.init(weights))

    def step(leaves: Any, state: Any, *inputs: Any) -> Any:
        import optax

        weights = jax.tree.unflatten(tree, leaves)
        value, gradient = jax.value_and_grad(loss)(weights, *inputs)
        change, new = optimizer.update(gradient, jax.tree.unflatten(state_tree, state), weights)
        return value, jax.tree.leaves(optax.apply_updates(weights, change)), jax.tree.leaves(new)

    return step, ([np.asarray(x) for x in leaves], [np.asarray(x) for x in state], *inputs)


def mlp(weights: Any, x: Any) -> Any:
    """Compute a perceptron of tanh layers."""
    for w, b in weights[:-1]:
        x = jnp.tanh(x @ w + b)
    return x @ weights[-1][0] + weights[-1][1]


def perceptron(*sizes: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return weights and biases of a perceptron with layers of these ``sizes``."""
    pairs = enumerate(pairwise(sizes))
    return [(normal(a, b, seed=i, scale=a**-0.5), normal(b, seed=i + 50, scale=0.1)) for i, (a, b) in pairs]
