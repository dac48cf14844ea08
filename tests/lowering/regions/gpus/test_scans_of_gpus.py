"""Scans on GPUs: rows in blocks of threads, columns in threads, long ones in parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu.block_races import Races, checked
from support.differential import integers, normal
from support.gpu_program import check_gpu, gpu_program, run_gpu_program

from aotc.ir.loop.ir import Barrier, For, thread_count, walk
from aotc.ir.loop.printer import print_kernel
from aotc.lowering.plans.gpu_column_scans import COLUMN_SCAN_BLOCKS

lax = jax.lax


def window(x, operator, init, axis=-1, reverse=False):
    """A scan as StableHLO says it: a window that reaches from one end."""
    axis %= x.ndim
    n = x.shape[axis]
    sizes = [n if d == axis else 1 for d in range(x.ndim)]
    low, high = (0, n - 1) if reverse else (n - 1, 0)
    padding = [(low, high) if d == axis else (0, 0) for d in range(x.ndim)]
    return lax.reduce_window(x, jnp.asarray(init, x.dtype), operator, sizes, [1] * x.ndim, padding)


@pytest.mark.parametrize("shape", [(17,), (255,), (3, 2049), (2, 700), (5000,)])
@pytest.mark.parametrize("reverse", [False, True])
def test_row_scans_on_gpus_match_jax(shape, reverse):
    variant = check_gpu(lambda x: window(x, lax.add, 0, reverse=reverse), [normal(*shape)], factor=16)
    assert any(isinstance(s, For) and s.kind == "thread" for k in variant.kernels for s in walk(k.body))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32", "int8", "bool", "complex64"])
def test_row_scans_of_each_dtype_match_jax(dtype):
    x = jnp.asarray(integers(2, 300, low=0, high=2), dtype)
    check_gpu(lambda x: window(x, lax.max if dtype == "bool" else lax.add, 0), [x])


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("reverse", [False, True])
def test_column_scans_on_gpus_match_jax(axis, reverse):
    check_gpu(lambda x: window(x, lax.max, -jnp.inf, axis, reverse), [normal(70, 40, 3)])


@pytest.fixture
def few_are_many(monkeypatch):
    monkeypatch.setattr(type(COLUMN_SCAN_BLOCKS), "__setattr__", object.__setattr__)
    monkeypatch.setattr(COLUMN_SCAN_BLOCKS, "default", 0)


@pytest.mark.parametrize("shape", [(513, 32), (2, 130, 19), (1100, 16)])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.usefixtures("few_are_many")
def test_many_columns_are_scanned_in_one_pass(shape, reverse):
    variant = check_gpu(lambda x: window(x, lax.add, 0, -2, reverse), [integers(*shape)])
    (kernel,) = variant.kernels
    assert thread_count(kernel) > 64
    assert any(isinstance(s, Barrier) for s in walk(kernel.body))


@pytest.mark.usefixtures("few_are_many")
def test_threads_of_column_scans_do_not_race():
    _, variant = gpu_program(lambda x: window(x, lax.add, 0, 0), [np.zeros((1100, 16), "float32")])
    (kernel,) = variant.kernels
    races, random = Races(), np.random.default_rng(0)
    x, init, out = (random.normal(size=x.shape).astype("float32") for x in (*kernel.inputs, *kernel.outputs))
    checked(races)(print_kernel(kernel), [x, init, out], {})
    assert races.found == []
    np.testing.assert_allclose(out, init + np.cumsum(x, 0), rtol=1e-4, atol=1e-4)


def test_scans_of_few_columns_are_split():
    _, variant = gpu_program(lambda x: window(x, lax.add, 0, 0), [np.zeros((1100, 16), "float32")])
    assert len(variant.kernels) > 1


def test_scans_with_a_noncommutative_combiner_match_jax():
    def affine(a, b):
        return a[0] * b[0], a[1] * b[0] + b[1]

    def function(x, y):
        n = x.shape[0]
        return lax.reduce_window((x, y), (jnp.float32(1), jnp.float32(0)), affine, (n,), (1,), [(n - 1, 0)])

    x, y = normal(1000) * np.float32(0.5), normal(1000)
    got = run_gpu_program(*gpu_program(function, [x, y]), [x, y])  # XLA has no windows of two arrays on CPUs
    for a, b in zip(got, lax.associative_scan(affine, (x, y)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_scans_of_infinities_and_nan_match_jax():
    x = normal(600)
    x[[5, 300, 301, 590]] = np.inf, -np.inf, np.nan, np.inf
    check_gpu(lambda x: (window(x, lax.add, 0), window(x, lax.max, -jnp.inf)), [x], factor=4)


@pytest.mark.parametrize("size", [17, 300, 2048, 2500])
def test_scans_of_symbolic_length_match_numpy(size):
    (n,) = jax.export.symbolic_shape("n")
    exported = jax.export.export(jax.jit(lambda x: window(x, lax.add, 0)))(jax.ShapeDtypeStruct((n,), "float32"))
    x = normal(size)
    (got,) = run_gpu_program(*gpu_program(exported.serialize()), [x])
    np.testing.assert_allclose(got, np.cumsum(x, dtype="float64"), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("axis", [0, 1])
def test_long_scans_are_split(axis):
    shape = (1, 1 << 20) if axis else (4096, 512)
    _, variant = gpu_program(lambda x: window(x, lax.add, 0, axis), [np.zeros(shape, "float32")])
    assert len(variant.kernels) >= 3
