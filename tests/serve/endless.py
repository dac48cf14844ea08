"""Models for hostile load: one whose results are as large as its argument, one without an end."""

import jax
import numpy as np
from jax import export

import aotc


def doubling():
    """A bundle that doubles any number of numbers."""
    x = jax.ShapeDtypeStruct(export.symbolic_shape("n"), np.float32)
    return aotc.compile(export.export(jax.jit(lambda x: x * 2))(x))


def spinning():
    """A bundle that takes as long as it is told."""

    def spin(n):
        return jax.lax.fori_loop(0, n, lambda i, x: jax.numpy.sin(x) + 1, np.ones(1000, "f4")).sum()

    return aotc.compile(spin, np.int32(0))
