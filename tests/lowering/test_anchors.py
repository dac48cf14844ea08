"""Where the values of a region lie: fusion and lowering agree on it, and the names of a model's dims play no part."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.differential import LEVELS, check, normal

from aotc.ir.tensor.text import parse_module
from aotc.lowering.analysis.anchors import anchors_of, iteration_space, single_axis
from aotc.lowering.passes.fuse.fuse import fuse
from aotc.options import Options

lax = jax.lax
SQUARE = normal(8, 8)


def sums(*operands):
    """The sums of the rows of two arrays, by one reduction."""

    def combine(total, x):
        return total[0] + x[0], total[1] + x[1]

    return lax.reduce(operands, (np.float32(0), np.float32(0)), combine, (1,))


MODELS = {
    "absorbed-across": (lambda x: jnp.exp(x.T) + x.sum(1)[:, None], [SQUARE]),
    "absorbed-across-twice": (lambda x: jnp.exp(x.T) - x.sum(1)[:, None] * jnp.exp(x[::-1]), [SQUARE]),
    "reduced-across": (lambda x, y: sums(jnp.exp(x).T, y), [SQUARE, SQUARE + 1]),
    "reduced-beside": (lambda x, y: sums(y, jnp.exp(x).T), [SQUARE, SQUARE + 1]),
    "reduced-reversed": (lambda x: sums(x, x[::-1]), [SQUARE]),
}


@pytest.mark.cpu
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", MODELS)
def test_regions_of_square_arrays_match_jax(name, level):
    """Equal extents: where a value lies is all that tells the axes apart."""
    function, arguments = MODELS[name]
    check(function, arguments, level)


COLUMNS = """
module @main {
func public @main(%x: f32[n, W]) {
  %zero = constant {value = dense("f32", (), [0.0])} : f32[]
  %s = reduce %x, %zero {dims = (0,)} : f32[W] {
    region(%a: f32[], %b: f32[]) {
      %c = add %a, %b : f32[]
      yield %c
    }
  }
  %r = reverse %s {dims = (0,)} : f32[W]
  %y = exp %r : f32[W]
  return %y
}
}
"""


@pytest.mark.ir
@pytest.mark.parametrize("name", ["w", "i0", "i1"])
def test_a_dim_may_be_named_like_a_loop_variable(name):
    fused = fuse(parse_module(COLUMNS.replace("W", name)), Options())
    regions = [f for f in fused.functions.values() if not f.public]
    assert [f.attrs["kind"] for f in regions] == ["reduce"]


@pytest.mark.ir
def test_an_axis_is_distinct_from_a_dim_of_its_name():
    space = iteration_space((4, 1, 5))
    assert [None if (a := single_axis(e)) is None else a.number for e in space] == [0, None, 2]
    assert single_axis(space[0] + 1) is None
    assert single_axis(2 * space[0]) is None
    body = parse_module(COLUMNS.replace("W", "i0")).functions["main"].body
    anchors = anchors_of(body.ops[1], body.ops)
    (result,) = body.results
    assert anchors.reduced == {0}
    assert anchors.is_row(result)
