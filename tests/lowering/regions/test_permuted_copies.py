"""Copies that permute three or more axes: the loop of contiguous reads is just outside that of contiguous writes."""

import itertools

import jax
import numpy as np
import pytest

pytest.importorskip("numba")

import aotc
from aotc.frontend.importer import import_model
from aotc.ir.loop.ir import For, walk
from aotc.lowering.lower import lower
from aotc.lowering.plans.cpu_loops import FEW_ACROSS
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.targets import TARGETS

pytestmark = pytest.mark.cpu


def permuted(shape, axes, function=lambda x: x):
    return lambda x: function(x).transpose(axes), (jax.ShapeDtypeStruct(shape, "float32"),)


def loops_of(function, args):
    """Return the loop variables of the only kernel, outermost first."""
    target = TARGETS["cpu:x86-64-v4"]
    options = Options(target=target.name)
    model = import_model(jax.export.export(jax.jit(function))(*args))
    (kernel,) = lower(run_passes(model, options), target, options).kernels
    return [s.var for s in walk(kernel.body) if isinstance(s, For)]


def test_the_loop_along_the_operand_is_next_to_the_innermost():
    assert loops_of(*permuted((8, 8, 8, 8, 8), (4, 3, 2, 1, 0)))[-2:] == ["i0", "i4"]
    assert loops_of(*permuted((8, 12, 10, 16, 6), (3, 1, 4, 0, 2)))[-2:] == ["i2", "i4"]


def test_contiguous_copies_keep_their_order():
    assert loops_of(*permuted((8, 12, 10, 64), (1, 2, 0, 3)))[-1] == "i3"


@pytest.mark.parametrize("last", [FEW_ACROSS.value, FEW_ACROSS.value + 1])
def test_rows_of_few_elements_keep_their_order(last):
    inner = loops_of(*permuted((last, 30, 31, 16), (3, 1, 2, 0)))[-2:]
    assert (inner == ["i0", "i3"]) is (last > FEW_ACROSS.value)


def test_regions_that_compute_keep_their_order():
    function, args = permuted((8, 8, 8, 8, 8), (4, 3, 2, 1, 0), lambda x: x + 1)
    assert loops_of(function, args)[-2:] != ["i0", "i4"]


@pytest.mark.parametrize("dtype", ["float32", "int8", "complex128"])
def test_permutations_of_four_axes_match_numpy(dtype):
    x = np.arange(5 * 8 * 4 * 9).reshape(5, 8, 4, 9).astype(dtype)
    orders = [*itertools.permutations(range(4))]
    with jax.enable_x64(True):
        bundle = aotc.compile(lambda x: [x.transpose(axes) for axes in orders], x, verify_each=True)
    module = aotc.load(bundle)
    for axes, got in zip(orders, module.invoke("main", x), strict=True):
        np.testing.assert_array_equal(got, x.transpose(axes))


def test_permutations_of_symbolic_sizes_match_numpy():
    shape = jax.export.symbolic_shape("a, b, 7, 6")
    exported = jax.export.export(jax.jit(lambda x: x.transpose(3, 1, 2, 0)))(jax.ShapeDtypeStruct(shape, "float32"))
    module = aotc.load(aotc.compile(exported))
    for a, b in ((1, 1), (5, 9), (16, 3)):
        x = np.arange(a * b * 42, dtype="float32").reshape(a, b, 7, 6)
        np.testing.assert_array_equal(module.invoke("main", x)[0], x.transpose(3, 1, 2, 0))
