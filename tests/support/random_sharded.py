"""Random functions over random meshes with random shardings."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from support.sharded_models import Sharded

MESHES = (
    {"x": 2}, {"x": 4}, {"x": 8}, {"x": 2, "y": 2}, {"x": 2, "y": 4}, {"x": 4, "y": 2}, {"x": 2, "y": 2, "z": 2},
    {"x": 1, "y": 3}, {"x": 3, "y": 2},
)  # fmt: skip
SIZES = (6, 8, 12, 16, 24)


def random_spec(rng, mesh, shape):
    """Return a random sharding of an array of ``shape``: each axis partitions a dim that it divides, or none."""
    dims = [[] for _ in shape]
    parts = [1] * len(shape)
    for axis in rng.permutation(list(mesh)):
        fitting = [d for d, n in enumerate(shape) if n % (parts[d] * mesh[axis]) == 0]
        if fitting and rng.random() < 0.7:
            d = int(rng.choice(fitting))
            dims[d].append(str(axis))
            parts[d] *= mesh[axis]
    return P(*(tuple(axes) or None for axes in dims))


class _Steps:
    """Random steps, each a function of the previous values, with the shapes of these."""

    def __init__(self, rng, mesh, shapes):
        self.rng, self.mesh, self.shapes, self.steps = rng, mesh, list(shapes), []

    def add(self):
        rng = self.rng
        n = int(rng.integers(len(self.shapes)))
        shape = self.shapes[n]
        kinds = ["unary", "binary", "product", "sum", "transposed", "softmax", "joined", "sliced", "cut", "loop"]
        kind = str(rng.choice(kinds))
        match kind:
            case "unary":
                f = [jnp.tanh, jnp.sin, lambda x: x * 0.5 + 1, jax.nn.relu][rng.integers(4)]
                self._step(lambda v: f(v[n]), shape)
            case "binary":
                others = [k for k, s in enumerate(self.shapes) if s == shape]
                m = int(rng.choice(others))
                f = [jnp.add, jnp.multiply, jnp.maximum, jnp.subtract][rng.integers(4)]
                self._step(lambda v: f(v[n], v[m]) * 0.5, shape)
            case "product" if len(shape) == 2:
                fitting = [k for k, s in enumerate(self.shapes) if len(s) == 2 and s[0] == shape[1]]
                if fitting:
                    m = int(rng.choice(fitting))
                    self._step(lambda v: v[n] @ v[m] / shape[1], (shape[0], self.shapes[m][1]))
            case "sum" if len(shape) > 1:
                axis = int(rng.integers(len(shape)))
                f = [jnp.mean, jnp.max][rng.integers(2)]
                self._step(lambda v: f(v[n], axis, keepdims=True) + v[n] * 0.1, shape)
            case "transposed" if len(shape) > 1:
                perm = tuple(int(i) for i in rng.permutation(len(shape)))
                self._step(lambda v: v[n].transpose(perm), tuple(shape[i] for i in perm))
            case "softmax":
                self._step(lambda v: jax.nn.softmax(v[n], -1), shape)
            case "joined":
                self._step(lambda v: jnp.concatenate([v[n], v[n] * 2], 0)[1 : 1 + shape[0]], shape)
            case "sliced" if shape[0] > 6:
                self._step(lambda v: v[n][1:7], (6, *shape[1:]))
            case "cut":
                spec = random_spec(rng, self.mesh, shape)
                self._step(lambda v: lax.with_sharding_constraint(v[n], spec), shape)
            case "loop":
                turns = int(rng.integers(1, 4))
                self._step(lambda v: lax.fori_loop(0, turns, lambda i, x: jnp.tanh(x - jnp.mean(x)), v[n]), shape)

    def _step(self, step, shape):
        self.steps.append(step)
        self.shapes.append(shape)


def random_case(seed):
    """Return a random function with its mesh, shardings and arguments."""
    rng = np.random.default_rng(seed)
    mesh = MESHES[rng.integers(len(MESHES))]
    shapes = [tuple(int(n) for n in rng.choice(SIZES, rng.integers(1, 4))) for _ in range(rng.integers(1, 4))]
    made = _Steps(rng, mesh, shapes)
    while len(made.steps) < 3 + seed % 6:
        made.add()
    kept = sorted({len(made.shapes) - 1, int(rng.integers(len(shapes), len(made.shapes)))})
    steps = tuple(made.steps)

    def run(whole):
        def function(*args):
            values = list(args)
            for step in steps:
                values.append(step(values))
            return tuple(values[k] for k in kept)

        if not whole:
            return function

        def without_shardings(*args):
            constraint = lax.with_sharding_constraint
            lax.with_sharding_constraint = lambda x, spec: x
            try:
                return function(*args)
            finally:
                lax.with_sharding_constraint = constraint

        return without_shardings

    args = tuple(rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    ins = tuple(random_spec(rng, mesh, shape) for shape in shapes)
    outs = tuple(random_spec(rng, mesh, made.shapes[k]) for k in kept) if rng.random() < 0.5 else None
    return Sharded(run(False), args, mesh, ins, outs, run(True), most=1e-5)
