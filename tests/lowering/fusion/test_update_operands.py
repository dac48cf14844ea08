"""What an update writes: computed in its region, or in memory where it is an op on its own, as at level 0."""

import jax
import jax.numpy as jnp
import pytest

from aotc.frontend.importer import import_raw
from aotc.frontend.mlir import fetch
from aotc.lowering.lower import lower
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.targets import resolve

lax = jax.lax


def counts(where):
    """The updates are one number, as many as the call says."""
    return jnp.zeros(5, "int32").at[where].add(jnp.ones(where.shape, "int32"))


def begin(where):
    return lax.dynamic_update_slice(where, jnp.ones(where.shape[0] - 1, "int32"), (where[0],))


@pytest.mark.ir
@pytest.mark.parametrize("level", range(4))
@pytest.mark.parametrize("target", ["cpu:x86-64-v3", "cuda:sm_90"])
@pytest.mark.parametrize("function", [counts, begin])
def test_numbers_of_unknown_count(function, target, level):
    (n,) = jax.export.symbolic_shape("n", constraints=["n >= 2"])
    exported = jax.export.export(jax.jit(function))(jax.ShapeDtypeStruct((n,), "int32"))
    options = Options(target=target, opt_level=level, verify_each=True)
    module = run_passes(import_raw(fetch(exported, (), {}), options=options), options)
    assert lower(module, resolve(target)[0], options).kernels
