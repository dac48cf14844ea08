"""Gradients of selected elements of windows are gathers, on CPUs and GPUs.

Beside the reference: of equal elements of a padded window XLA on CPUs does not take the first.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.differential import integers, normal
from support.gpu_program import check_gpu, gpu_program, run_gpu_program

import aotc
from aotc.frontend.importer import import_model
from aotc.ir.semantics.run import interpret

lax = jax.lax


def gradient(x, g, sizes, strides, padding, select=lax.ge, add=lax.add, init=0):
    """``select_and_scatter`` as JAX binds it."""
    from jax._src.lax.windowed_reductions import _select_and_scatter

    start = jnp.asarray(init, x.dtype)
    return _select_and_scatter(x, select, sizes, strides, padding, g, start, add)


CASES = {
    "apart": ((2, 6, 8, 3), (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
    "apart, some left over": ((2, 7, 9, 3), (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
    "overlapping": ((2, 7, 8, 3), (1, 3, 3, 1), (1, 2, 2, 1), "SAME"),
    "step by step": ((2, 5, 6, 3), (1, 3, 2, 1), (1, 1, 1, 1), "SAME"),
    "gaps": ((9, 2), (2, 1), (3, 1), "VALID"),
    "far out": ((5, 2), (3, 1), (2, 1), ((2, 2), (0, 0))),
    "rows": ((4, 11), (1, 3), (1, 2), "SAME"),
    "many": ((40,), (33,), (1,), "SAME"),
    "whole": ((3, 20), (1, 20), (1, 1), "VALID"),
}


def operands(shape, sizes, strides, padding, dtype="float32"):
    x = integers(*shape, low=-2, high=3).astype(dtype)  # with ties
    if not isinstance(padding, str):
        windows = [(n + sum(p) - w) // s + 1 for n, w, s, p in zip(shape, sizes, strides, padding)]
    elif padding == "SAME":
        windows = [-(-n // s) for n, s in zip(shape, strides)]
    else:
        windows = [(n - w) // s + 1 for n, w, s in zip(shape, sizes, strides)]
    return [x, integers(*windows, low=-9, high=9, seed=1).astype(dtype)]


def bound(sizes, strides, padding, shape, **more):
    pairs = padding if not isinstance(padding, str) else lax.padtype_to_pads(shape, sizes, strides, padding)
    return lambda x, g: gradient(x, g, sizes, strides, pairs, **more)


def same(function, arrays):
    """Are the results of a CPU those of the reference, bit by bit?"""
    want = interpret(import_model(function, *arrays), *arrays)
    (got,) = aotc.load(aotc.compile(jax.jit(function), *arrays, source=False)).invoke("main", *arrays)
    np.testing.assert_array_equal(np.asarray(got), want[0])


@pytest.mark.cpu
@pytest.mark.parametrize("name", CASES)
def test_max_pool_gradients_on_cpus_match_xla(name):
    shape, *window = CASES[name]
    same(bound(*window, shape), operands(shape, *window))


@pytest.mark.cudasim
@pytest.mark.parametrize("name", CASES)
def test_max_pool_gradients_on_gpus_match_the_reference(name):
    shape, *window = CASES[name]
    function, arrays = bound(*window, shape), operands(shape, *window)
    want = interpret(import_model(function, *arrays), *arrays)
    np.testing.assert_array_equal(run_gpu_program(*gpu_program(function, arrays), arrays)[0], want[0])


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", ["int32", "float16", "bfloat16", "complex64"])
def test_pool_gradients_of_each_dtype_and_region_match_xla(dtype):
    shape, *window = CASES["overlapping"]
    select = (lambda a, b: lax.le(a.real, b.real)) if dtype == "complex64" else lax.le
    same(bound(*window, shape, select=select), operands(shape, *window, dtype))
    if dtype != "complex64":
        same(bound(*window, shape, add=lax.max, init=-3), operands(shape, *window, dtype))


@pytest.mark.cpu
def test_windows_with_nan_select_like_xla():
    """Of NaN no comparison holds: a window selects what comes after the last of them."""
    shape, *window = CASES["overlapping"]
    x, g = operands(shape, *window)
    x[:, ::3, ::2], x[1] = np.nan, -np.inf
    same(bound(*window, shape), [x, g])


@pytest.mark.cudasim
def test_pool_gradients_on_gpus_use_gathers():
    """JAX puts a frame around the array, which the kernel that reads it does without."""

    def pool(x):
        return (lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME") ** 2).sum()

    x = normal(2, 8, 8, 4)
    variant = check_gpu(jax.grad(pool), [x])
    assert not any(v.shape == (2, 9, 9, 4) for k in variant.kernels for v in (*k.inputs, *k.outputs))
    _, apart = gpu_program(bound((1, 2, 2, 1), (1, 2, 2, 1), "VALID", (2, 8, 8, 4)), [x, x[:, ::2, ::2]])
    assert len(apart.kernels) == 2
