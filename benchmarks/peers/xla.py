"""XLA's CPU backend through ``jax.jit``, ahead of time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.peers.adapter import Loaded

MODULE, INSTALL = "jax", "jax"


def prepare(name: str, folder: Path, precision: str) -> dict[str, float]:
    """Do nothing: XLA compiles when it loads."""
    return {}


def load(folder: Path, inputs: list[Any], facts: dict[str, Any], threads: int, precision: str) -> Loaded:
    """Return a call of the compiled model on inputs on JAX's device."""
    import jax

    exported = jax.export.deserialize(bytearray((folder / "model.jaxexp").read_bytes()))
    args, kwargs = jax.tree.unflatten(exported.in_tree, [jax.device_put(x) for x in inputs])
    call = jax.jit(exported.call).lower(*args, **kwargs).compile()
    return lambda: jax.block_until_ready(jax.tree.leaves(call(*args, **kwargs))), None
