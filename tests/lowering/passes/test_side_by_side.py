"""Fusion lets branches run side by side where one alone has not items enough for all workers."""

import jax
import jax.numpy as jnp
import pytest

from aotc.tools.explain.fusion import explain_fusion

pytestmark = pytest.mark.ir


def explained(function, *shapes, **flags):
    arguments = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    return explain_fusion(jax.jit(function), *arguments, **{"target": "cpu:x86-64-v3", **flags}).regions


def rows(x, y):
    return jax.nn.softmax(jnp.tanh(x)) + jax.nn.softmax(jnp.sin(y))


def refusals(regions):
    return [(n.ops, n.reason) for r in regions for n in r.neighbours if "would wait" in n.reason]


def test_two_long_row_regions_are_not_fused():
    regions = explained(rows, (1, 32768), (1, 32768))
    assert [r.kind for r in regions] == ["row", "row", "loop"]
    (first, second) = refusals(regions)
    assert first == second
    assert first[0] == ("add",)
    assert first[1].endswith("us")


@pytest.mark.parametrize("shape", [(64, 4096), (1, 64)], ids=["many rows", "little work"])
def test_row_regions_without_gain_are_fused(shape):
    regions = explained(rows, shape, shape)
    assert [r.kind for r in regions] == ["row", "row"]
    assert not refusals(regions)


def test_large_matmuls_do_not_prevent_fusion():
    """The diamond: each product fills every core, so that the sum costs nothing where the second is stored."""
    regions = explained(lambda a: a @ a + (a + a) @ a, (1024, 1024))
    assert regions[-1].ops[-1] == "add"
    assert not refusals(regions)


def test_a_region_that_waits_for_another_is_fused():
    """The second branch needs the first, too: nothing runs beside it."""
    regions = explained(lambda x: (y := jax.nn.softmax(jnp.tanh(x))) + jax.nn.softmax(jnp.sin(y)), (1, 32768))
    assert not refusals(regions)


def test_gpus_fuse_without_this_rule():
    assert not refusals(explained(rows, (1, 32768), (1, 32768), target="cuda:sm_90"))
