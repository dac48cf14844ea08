"""Save what the demo needs: the exported model, an input and JAX's answer."""

import sys
from pathlib import Path

import jax
import numpy as np


def save(function, x):
    """Export ``function`` for the shape of ``x`` and write everything to the folder named on the command line."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    jitted = jax.jit(function)
    exported = jax.export.export(jitted, platforms=("cpu",))(jax.ShapeDtypeStruct(x.shape, x.dtype))
    (folder / "model.jaxexp").write_bytes(exported.serialize())
    np.save(folder / "x.npy", x)
    np.save(folder / "y_jax.npy", np.asarray(jitted(x)))
    print(f"exported to {folder}: input {x.shape} {x.dtype}")
