"""Items share a long axis: each has a part of every segment between the tests of rolls, pads and joined parts."""

import jax.numpy as jnp
import numpy as np
import pytest
from lowering.program.test_carried_buffers import CPU, lowered

import aotc
from aotc.ir.loop.ir import Apply, Store, walk

pytestmark = pytest.mark.cpu


def rolled(xp, x):
    return (xp.roll(x, 1, -1) + xp.roll(x, -1, -1)) * np.float32(0.5)


def rolled_far(xp, x):
    return xp.roll(x, 4096, -1) * xp.roll(x, -5000, -1) + x


def padded(xp, x):
    widths = [(0, 0)] * (x.ndim - 1)
    return xp.pad(x, [*widths, (3, 4097)]) + xp.pad(x, [*widths, (4100, 0)])


def joined(xp, x):
    return xp.concatenate([x[..., :5], x * 2, x[..., -4095:]], -1) + 1


FUNCTIONS = [rolled, rolled_far, padded, joined]


@pytest.mark.parametrize("shape", [(16384,), (20479,), (20481,), (65536 + 1,), (3, 40000)])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_rolls_pads_and_joins_along_long_axes_match_numpy(function, shape):
    x = np.random.default_rng(0).integers(-99, 99, shape).astype(np.float32)
    (got,) = aotc.load(aotc.compile(lambda x: function(jnp, x), x, guard=True)).invoke("main", x)
    np.testing.assert_array_equal(got, function(np, x))


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_elements_inside_a_segment_have_no_bounds_tests(function):
    _, steps, _ = lowered(lambda x: function(jnp, x), (np.zeros(1 << 18, np.float32),), CPU)
    (kernel,) = steps.kernels.values()
    stored = [s.value for s in walk(kernel.body) if isinstance(s, Store)]
    assert stored
    assert not any(isinstance(v, Apply) and "select" in str(v) for v in stored)
