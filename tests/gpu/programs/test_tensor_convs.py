"""Convolutions as tensor cores of GPUs take them: what the pass makes of them means the same."""

import numpy as np
import pytest
from lowering.test_passes import inputs_of

from aotc.ir.semantics.run import interpret
from aotc.ir.semantics.verify import verify
from aotc.ir.tensor.text import parse_module
from aotc.lowering.passes.pack_contractions.pack_contractions import pack_contractions
from aotc.options import Options

pytestmark = pytest.mark.ir

PADDED = """module @main {{
func public @main(%x: {dtype}[{x}], %w: {dtype}[{w}]) {{
  %value = constant {{value = dense("{dtype}", (), [{value}])}} : {dtype}[]
  %p = pad %x, %value {{low = {low}, high = {high}, interior = {interior}}} : {dtype}[{padded}]
  %y = conv %p, %w {{strides = {strides}, rhs_dilation = {gaps}, feature_groups = {groups}}} : {dtype}[{y}]
  return %y
}}
}}
"""


def module(x, w, low=(1, 1), high=(1, 1), strides=(1, 1), gaps=(1, 1), groups=1, value=0.0, interior=0, dtype="f32"):
    """Return a convolution of what is padded, and its shapes as text."""
    inside = [(n - 1) * (interior + 1) + 1 for n in x[1:-1]]
    padded = (x[0], *(a + n + b for a, n, b in zip(low, inside, high)), x[-1])
    pixels = [(n - (t - 1) * g - 1) // s + 1 for n, t, g, s in zip(padded[1:-1], w, gaps, strides)]
    shapes = {"x": x, "w": w, "padded": padded, "y": (x[0], *pixels, w[-1])}
    return parse_module(PADDED.format(
        **{name: ", ".join(map(str, s)) for name, s in shapes.items()}, value=value, strides=strides, gaps=gaps,
        low=(0, *low, 0), high=(0, *high, 0), interior=(0, *[interior] * len(low), 0), groups=groups, dtype=dtype,
    ))  # fmt: skip


# Arguments of :func:`module`, the op that is left, and what it has to say.
CASES = {
    "padded, in parts": (
        ((1, 4, 4, 256), (3, 3, 256, 32)),
        {},
        "conv",
        {"padding": ((1, 1), (1, 1)), "parts": 9},
    ),
    "stored padding of the last dim": (
        ((1, 9, 10, 3), (7, 7, 3, 32)),
        {"low": (2, 2), "high": (3, 3), "strides": (2, 2)},
        "conv",
        {"padding": ((2, 3), (0, 0)), "strides": (2, 2)},
    ),
    "rows of a product": (
        ((2, 16, 32, 3), (16, 16, 3, 24)),
        {"low": (0, 0), "high": (0, 0), "strides": (16, 16)},
        "matmul",
        {},
    ),
    "depthwise": (((1, 5, 6, 8), (3, 3, 1, 8)), {"groups": 8}, "conv", {"padding": ((1, 1), (1, 1))}),
    "other padding than zeros": (((1, 4, 4, 32), (3, 3, 32, 32)), {"value": 1.0}, "conv", {"padding": None}),
    "zeros between elements": (((1, 4, 4, 32), (3, 3, 32, 32)), {"interior": 1}, "conv", {"padding": None}),
}


@pytest.mark.parametrize("name", CASES)
def test_convolutions_for_tensor_cores(name):
    shapes, others, op, attrs = CASES[name]
    before = module(*shapes, **others)
    assert verify(before) == []
    after = pack_contractions(before, Options(target="cuda:sm_90a"))
    assert [f.message for f in verify(after)] == []
    (made,) = (o for o in after.functions["main"].body.ops if o.name in ("conv", "matmul"))
    assert made.name == op
    assert {name: made.attrs.get(name) for name in attrs} == attrs
    arrays = inputs_of(before)
    (want,), (found,) = interpret(before, *arrays), interpret(after, *arrays)
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-4 * np.abs(want).max())


def test_a_convolution_of_many_slices_is_joined_where_that_halves_them():
    """The channels of 16 images, of each of 56 x 56 taps: the gradient of a kernel."""
    after = pack_contractions(module((8, 58, 58, 16), (56, 56, 16, 64), (0, 0), (0, 0)), Options(target="cuda:sm_90a"))
    (made,) = (o for o in after.functions["main"].body.ops if o.name == "conv")
    assert made.attrs["parts"] > 1
