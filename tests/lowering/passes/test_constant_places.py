"""A gather or a scatter at one place that is known when compiling is a slice, or padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.differential import check, normal

from aotc.frontend.importer import import_model
from aotc.ir.tensor.ir import walk
from aotc.lowering.passes.canonicalize.canonicalize import canonicalize
from aotc.lowering.passes.fold_constants import fold_constants
from aotc.lowering.passes.inline import inline
from aotc.options import Options

X = normal(4, 5, 6)
BOTH = lax.GatherDimensionNumbers((0, 1), (2,), (0, 2))

KNOWN = {
    "take": (lambda x: jnp.take(x, 2, axis=1), [X]),
    "take-of-one": (lambda x: jnp.take(x, np.array([3]), axis=2), [X]),
    "clamped": (lambda x: lax.gather(x, jnp.array([9, -4]), BOTH, (2, 3, 1), mode="clip"), [X]),
    "gradient": (jax.grad(lambda x: jnp.sum(jnp.take(x, 2, axis=1) ** 2 * jnp.take(x, 1, axis=1))), [X]),
    "largest": (lambda u: jnp.full((4, 6), 2, "float32").at[:, 3].max(u), [normal(4)]),
    "complex": (lambda u: jnp.zeros((4, 6), "complex64").at[1:3, 2].add(u), [normal(2).astype("complex64")]),
    "negative-zeros": (lambda u: jnp.full((4, 6), -0.0, "float32").at[1].add(u), [normal(6)]),
    "outside": (lambda u: jnp.zeros((4, 6)).at[7].add(u, mode="drop"), [normal(6)]),
}
UNKNOWN = {
    "several": (lambda x: jnp.take(x, np.array([3, 1]), axis=2), [X]),
    "argument": (lambda x, i: jnp.take(x, i, axis=1), [X, np.int32(3)]),
    "into-an-argument": (lambda x, u: x.at[1].add(u), [normal(4, 6), normal(6)]),
}


def places(function, arguments):
    """The gathers and scatters that are left."""
    module = fold_constants(inline(import_model(function, *arguments), Options()), Options())
    for _ in range(2):
        module = canonicalize(module, Options())
    return [op.name for f in module.functions.values() for op in walk(f.body) if op.name in ("gather", "scatter")]


@pytest.mark.ir
@pytest.mark.parametrize("name", KNOWN)
def test_gathers_at_constant_indices_become_slices(name):
    assert not places(*KNOWN[name])


@pytest.mark.ir
@pytest.mark.parametrize("name", UNKNOWN)
def test_gathers_at_other_indices_remain(name):
    assert places(*UNKNOWN[name])


@pytest.mark.cpu
@pytest.mark.parametrize("name", [*KNOWN, *UNKNOWN])
def test_gathers_at_constant_and_other_indices_match_xla(name):
    check(*{**KNOWN, **UNKNOWN}[name], 2)
