"""Operations that move elements and their readers with symbolic sizes: every pair and its gradient, on every level.

XLA is the oracle: it compiles each function anew for the sizes of a call. Exports of JAX refuse sizes that are 0, but
with a size of 1 what is cut off or halved has no elements.
"""

import jax
import numpy as np
import pytest
from support.sizes.movements import MOVES, NAMES, SHAPES, arguments, exported, function_of

import aotc
from aotc.vmfb.errors import CallError

SAMPLE = [
    "gradient of sums, roll by 1", "gradient of softmax, roll by 1", "gradient of largest, roll of rows",
    "normalized, pad on both sides by sizes", "gradient of sums so far, all but the first",
    "gradient of sums so far, the second half", "sums of columns, dynamic slice",
    "gradient of sums of columns, the first half",
    "gradient of sums of columns, scatter", "gradient of product, pad by less than nothing",
]  # fmt: skip
"""Of each fault that the whole suite has found, and some more."""
LEVELS = (0, 1, 2, 3)


def check(name: str, level: int) -> None:
    """Compare a program with XLA for all sizes."""
    made = exported(name)
    if made is None:
        return
    module = aotc.load(aotc.compile(made, cache=False, opt_level=level, verify_each=level == 2), threads=1)
    function = jax.jit(function_of(name))
    for x in arguments():
        if not x.size:
            with pytest.raises(CallError, match="Expected value >= 1"):
                module(x)
            continue
        found, wanted = np.asarray(module(x)), np.asarray(function(x))
        message = f"{name}, level {level}, sizes {x.shape}"
        assert found.shape == wanted.shape, message
        scale = 1 + np.abs(wanted).max(initial=0)  # sums of products cancel
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5 * scale, err_msg=message)


@pytest.mark.cpu
@pytest.mark.parametrize("name", SAMPLE)
def test_movement_ops_of_symbolic_sizes_match_jax(name):
    check(name, 2)


@pytest.mark.slow
@pytest.mark.cpu
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("move", MOVES)
def test_readers_of_moved_elements_and_their_gradients_match_jax(move, level):
    for name in NAMES:
        if name.endswith(f", {move}"):
            check(name, level)


@pytest.mark.slow
@pytest.mark.cudasim
@pytest.mark.parametrize("move", MOVES)
def test_readers_of_moved_elements_compile_for_a_gpu(move):
    for name in NAMES:
        if name.endswith(f", {move}") and (made := exported(name)) is not None:
            assert aotc.compile(made, target="cuda:sm_90", cache=False, verify_each=True)


def test_the_tested_sizes_include_0_1_and_larger_ones():
    sizes = {n for shape in SHAPES for n in shape}
    assert {0, 1} <= sizes
    assert max(sizes) > 16
