"""What an update writes: computed in its region, or in memory where it is an op on its own, as at level 0."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.differential import check, normal

from aotc.frontend.importer import import_raw
from aotc.frontend.mlir import fetch
from aotc.lowering.lower import lower
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.targets import resolve_targets

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
def test_updates_of_symbolic_length_lower_at_each_level(function, target, level):
    (n,) = jax.export.symbolic_shape("n", constraints=["n >= 2"])
    exported = jax.export.export(jax.jit(function))(jax.ShapeDtypeStruct((n,), "int32"))
    options = Options(target=target, opt_level=level, verify_each=True)
    module = run_passes(import_raw(fetch(exported, (), {}), options=options), options)
    assert lower(module, resolve_targets(target)[0], options).kernels


@pytest.mark.cpu
@pytest.mark.parametrize("own", [True, False])
def test_values_read_from_the_updated_array_are_computed_first(own):
    """In the region of the update it would be read from a copy of all, in each turn of a loop."""

    def change(x, places, y):
        def iteration(k, x):
            part = lax.dynamic_slice(x if own else y, (places[k], 0), (3, 8))
            return lax.dynamic_update_slice(x, jnp.sin(part), (places[k], 0))

        return lax.fori_loop(0, 4, iteration, x)

    x, places, y = normal(64, 8), np.array([60, 1, 2, -70], "int32"), normal(64, 8, seed=1)
    options = Options(target="cpu:x86-64-v3")
    raw = fetch(jax.jit(change).lower(x, places, y).as_text(), (), {})
    functions = run_passes(import_raw(raw, options=options), options).functions.values()
    (update,) = (f for f in functions if f.attrs.get("kind") == "update")
    assert any(op.name == "sin" for op in update.body.ops) is not own
    check(change, [x, places, y], 2)
