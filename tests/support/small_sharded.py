"""Small sharded models, compiled once in a process, and their results on one device."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import aotc

MESHES = {2: {"model": 2}, 4: {"data": 2, "model": 2}}


def layer(params, x, *, scale):
    """Apply a dense layer."""
    h = jax.nn.relu(x @ params["w1"])
    y = h @ params["w2"] * scale
    return {"y": y, "norms": [jnp.sum(y * y, axis=1), jnp.sum(h, axis=0)], "rows": (x.shape[0] + jnp.int32(0),)}


def spin(x, count):
    """Exchange data ``count`` times."""
    return jax.lax.fori_loop(0, count, lambda _, v: v - jnp.mean(v, axis=0, keepdims=True) * 0.5, x)


def specs(size):
    rows = "data" if size == 4 else None
    params = {"w1": P(None, "model"), "w2": P("model", None)}
    return (params, P(rows, None)), {"scale": P()}


@cache
def bundle(size):
    """Return a bundle with the functions ``main`` and ``spin`` for 2 or 4 ranks."""
    mesh, (params, x) = MESHES[size], specs(size)[0]
    shape = jax.ShapeDtypeStruct
    weights = {"w1": shape((16, 32), "f4"), "w2": shape((32, 16), "f4")}

    def main(params, x, scale):
        """A layer."""
        return layer(params, x, scale=scale)

    return aotc.compile(
        {"main": main, "spin": spin},
        args={"main": (weights, shape((8, 16), "f4"), shape((), "f4")), "spin": (shape((8, 4), "f4"), shape((), "i4"))},
        mesh=mesh,
        in_shardings={"main": (params, x, P()), "spin": (P("model", None), P())},
    )


def arguments(seed=0):
    """Return whole arguments of ``main``."""
    random = np.random.default_rng(seed)
    weights = {"w1": random.standard_normal((16, 32), "f4"), "w2": random.standard_normal((32, 16), "f4")}
    return weights, random.standard_normal((8, 16), "f4"), np.float32(0.25)


def expected(params, x, scale):
    """Return the results of ``main`` on one device."""
    return jax.tree.map(np.asarray, jax.jit(layer)(params, x, scale=scale))


def assert_close(found, wanted):
    """Assert that two trees of arrays agree, also in their structure."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted)):
        assert isinstance(a, np.ndarray)
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, 1e-5, 1e-5)
