"""A gather of single elements computes its indices itself: of those beside each other it reads one each time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.differential import check, integers, normal

from aotc.frontend.importer import import_model
from aotc.options import Options
from aotc.pipeline import run_passes

pytestmark = pytest.mark.cpu

X, THREE = normal(24, 40), integers(24, 40, low=0, high=3)
CASES = {
    "choose": (lambda i, x: jnp.choose(i, [x, x * 2, x + 1], mode="clip"), [THREE, X]),
    "elements of rows": (lambda i, x: x[jnp.arange(24)[:, None], i], [THREE, X]),
    "moved": (lambda i, x: x[jnp.arange(24)[:, None] + i - 1, jnp.arange(40) - i], [THREE, X]),
    "beyond the ends": (lambda i, x: x[i * 30 - 40, i * 50 - 60], [THREE, X]),
}


@pytest.mark.parametrize("name", CASES)
def test_gathers_compute_their_indices_in_one_dispatch(name):
    function, arrays = CASES[name]
    exported = jax.export.export(jax.jit(function), platforms=["cpu"])(*arrays)
    module = run_passes(import_model(exported), Options(target="cpu:x86-64-v3"))
    ops = [op for f in module.functions.values() if "kind" in f.attrs for op in f.body.ops]
    assert "concatenate" in [op.name for op in ops]
    (main,) = (f for f in module.functions.values() if "kind" not in f.attrs)
    assert len([op for op in main.body.ops if op.name == "dispatch"]) == 1
    check(function, arrays, 2)


def test_indices_read_as_data_too_match_jax():
    """Rows of indices that a loop reads as data have their tests."""
    pairs = np.stack([THREE, THREE], -1)
    check(lambda i, x: (x[i[..., 0], i[..., 1]], jnp.concatenate([i, i + 1], -1).sum(0)), [pairs, X], 2)
