"""Programs whose stages read values twice: a sorting network, controlled-NOT gates, the gradient of a circuit.

Fusion that ignores the number of readers of a value doubles their work at each stage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def sorting_network(x: Any) -> Any:
    """Sort by a bitonic network."""
    n = x.shape[0]
    for k in (2**i for i in range(1, n.bit_length())):
        for j in (k >> i for i in range(1, k.bit_length())):
            y = x.reshape(n // (2 * j), 2, j)
            low, high = jnp.minimum(y[:, 0], y[:, 1]), jnp.maximum(y[:, 0], y[:, 1])
            up = ((np.arange(n) & k) == 0).reshape(y.shape)[:, 0]
            x = jnp.stack([jnp.where(up, low, high), jnp.where(up, high, low)], axis=1).reshape(n)
    return x


def controlled_nots(x: Any, gates: int) -> Any:
    """Apply controlled-NOT gates to each qubit and its neighbour, ``gates`` times."""
    bits = x.shape[0].bit_length() - 1
    for c in range(gates):
        state = x.reshape((2,) * bits)
        zero, one = jnp.take(state, 0, axis=c), jnp.flip(jnp.take(state, 1, axis=c), axis=c)
        x = jnp.stack([zero, one], axis=c).reshape(-1)
    return x


def energy(angles: Any) -> Any:
    """Return the energy of a state after a rotation of each qubit, with gates in between."""
    bits = angles.shape[0]
    x = jnp.zeros(2**bits, "complex64").at[0].set(1)
    for q in range(bits):
        c, s = jnp.cos(angles[q]), jnp.sin(angles[q])
        y = x.reshape(2**q, 2, -1)
        x = jnp.stack([c * y[:, 0] - s * y[:, 1], s * y[:, 0] + c * y[:, 1]], axis=1).reshape(-1)
        x = controlled_nots(x, bits - 1)
    return jnp.sum(jnp.abs(x) ** 2 * (np.arange(2**bits) % 3).astype("float32"))


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "sorting network of 32": (sorting_network, (32,)),
    "11 gates on 16 qubits": (lambda x: controlled_nots(x, 11), (2**16,)),
    "15 gates on 16 qubits": (lambda x: controlled_nots(x, 15), (2**16,)),
    "gradient of 12 qubits": (jax.grad(energy), (12,)),
}
