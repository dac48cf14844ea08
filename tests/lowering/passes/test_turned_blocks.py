"""Regions that read across their rows turn blocks of these operands first."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.differential import normal

import aotc
from aotc.frontend.importer import import_model
from aotc.ir.loop.ir import Alloc, walk
from aotc.ir.loop.run import run_kernel
from aotc.lowering.lower import lower
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.targets import TARGETS

TARGET = TARGETS["cpu:x86-64-v3"]
CASES = {
    "sum": (lambda x, y: x.T + y, (48, 80), (80, 48)),
    "symmetric": (lambda x: x + x.T, (64, 64)),
    "both turned": (lambda x, y: (x * y).T, (96, 64), (96, 64)),
    "images to channels": (lambda x: jnp.maximum(x.transpose(0, 3, 1, 2), 0), (2, 5, 8, 32)),
    "channels to images": (lambda x, b: x.transpose(0, 2, 3, 1) * b, (2, 32, 5, 8), (32,)),
    "a batch": (lambda x: jnp.tanh(x.swapaxes(1, 2)), (3, 64, 40)),
    "halves of lines": (lambda x: x.T * 2, (40, 72)),
    "a part": (lambda x: x[3:67, 2:66].T - 1, (70, 70)),
    "rows of means": (lambda x: x.T - x.mean(1), (64, 64)),
    "a choice": (lambda x, y: jnp.where(y < x.T, x.T, 0), (32, 48), (48, 32)),
    "two results": (lambda x, y: (x.T + y, x.T - y), (32, 48), (48, 32)),
}
ELSE = {
    "few rows": (lambda x, y: x.T + y, (24, 80), (80, 24)),
    "no parts": (lambda x, y: x.T + y, (37, 83), (83, 37)),
    "as it lies": (lambda x, y: x + y, (64, 64), (64, 64)),
    "rows in turn": (lambda x: x.transpose(1, 0, 2) + 1, (32, 32, 32)),
}


def arrays_of(shapes, dtype="float32"):
    if np.dtype(dtype).kind in "iub":
        return [np.random.default_rng(0).integers(0, 2, s).astype(dtype) for s in shapes]
    return [normal(*s, seed=n, dtype=dtype) for n, s in enumerate(shapes)]


def kernels_of(function, arrays, stack=0):
    exported = jax.export.export(jax.jit(function), platforms=["cpu"])(*arrays)
    options = Options(target=TARGET.name, stack_limit=stack)
    return lower(run_passes(import_model(exported), options), TARGET.with_limits(stack, 0), options).kernels


def is_transposed(kernel):
    return any(isinstance(s, Alloc) and s.buffer.name.startswith("turned") for s in walk(kernel.body))


@pytest.mark.parametrize("name", CASES)
def test_regions_with_transposed_blocks_match_xla(name):
    function, *shapes = CASES[name]
    arrays = arrays_of(shapes)
    assert any(map(is_transposed, kernels_of(function, arrays)))
    found = aotc.load(aotc.compile(function, *arrays, verify_each=True)).invoke("main", *arrays)
    for one, want in zip(found, jax.tree.leaves(jax.jit(function)(*arrays)), strict=True):
        np.testing.assert_allclose(one, want, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", ELSE)
def test_other_regions_have_no_transposed_blocks(name):
    function, *shapes = ELSE[name]
    arrays = arrays_of(shapes)
    assert not any(map(is_transposed, kernels_of(function, arrays)))
    (found,) = aotc.load(aotc.compile(function, *arrays)).invoke("main", *arrays)
    np.testing.assert_allclose(found, jax.jit(function)(*arrays), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "float16", "bfloat16", "int32", "float64", "complex64", "complex128"]
)
def test_transposed_blocks_of_every_element_size_match_numpy(dtype):
    """A line of each is as many rows; what has 16 bytes is turned by loops."""
    with jax.enable_x64(True):
        function = lambda x, y: jnp.where(y == x.T, x.T, y)
        arrays = arrays_of([(128, 192), (192, 128)], jnp.dtype(dtype))
        assert any(map(is_transposed, kernels_of(function, arrays)))
        (found,) = aotc.load(aotc.compile(function, *arrays)).invoke("main", *arrays)
    x, y = arrays
    assert np.array_equal(found, np.where(y == x.T, x.T, y))


@pytest.mark.parametrize(("stack", "fits"), [(4096, True), (4095, False)])
def test_operands_are_transposed_only_if_blocks_fit_the_stack(stack, fits):
    """Four of 16 x 16 elements of f32."""
    arrays = arrays_of([(64, 48)] * 4)
    assert any(map(is_transposed, kernels_of(lambda *xs: sum(x.T for x in xs) * 2, arrays, stack))) == fits


@pytest.mark.parametrize("threads", [1, 3])
def test_donated_operands_of_transposed_sums_give_right_results(threads):
    """A sum in the place of its second operand, and none in that of the first, which later blocks still read."""
    x, y = arrays_of([(64, 64), (64, 64)])
    for donated in (0, 1):
        function = jax.jit(lambda x, y: x.T + y, donate_argnums=donated)
        module = aotc.load(aotc.compile(function, x, y), threads=threads)
        (found,) = module.invoke("main", x.copy(), y.copy(), donate=True)
        assert np.array_equal(found, x.T + y)


def test_the_kernel_with_transposed_blocks_matches_numpy():
    x, y = arrays_of([(48, 80), (80, 48)])
    (kernel,) = kernels_of(CASES["sum"][0], [x, y])
    out = np.zeros((80, 48), np.float32)
    run_kernel(kernel, [x, y, out])
    assert np.array_equal(out, x.T + y)


def items_of(shape, dtype="float32"):
    """How many items a copy that turns a matrix has."""
    (kernel,) = kernels_of(lambda x: x.T, arrays_of([shape], dtype))
    return kernel.grid


@pytest.mark.parametrize(
    ("shape", "items"),
    [
        ((128, 128), 1),  # a tile
        ((256, 128), 1),  # an item is up to 2 tiles side by side
        ((512, 128), 2),
        ((128, 256), 2),
        ((144, 144), 3),  # rows of items and tiles are the largest equal parts: 48
        ((16384, 64), 32),  # a row is longer than an item
        ((64, 32), 1),
        ((64, 31), 2),  # too few rows for blocks: 16 of them in an item
    ],
)
def test_transposing_copies_have_the_expected_number_of_items(shape, items):
    assert items_of(shape) == items


@pytest.mark.parametrize("dtype", ["bool", "int8", "bfloat16", "float32", "float64", "complex128"])
@pytest.mark.parametrize(
    "shape", [(128, 128), (256, 384), (512, 64), (144, 208), (40, 1000), (64, 31), (127, 129), (16384, 64)]
)
def test_transposing_copies_next_to_tile_boundaries_match_numpy(shape, dtype):
    """Of any alignment, as tiles, lines and halves of lines divide the matrix or not; at one thread and at more."""
    with jax.enable_x64(True):
        (x,) = arrays_of([shape], jnp.dtype(dtype))
        bundle = aotc.compile(lambda x: x.T, x)
    for threads in (1, 3):
        (found,) = aotc.load(bundle, threads=threads).invoke("main", x)
        assert np.array_equal(found, x.T)
