"""Sorts and top_k on GPUs: runs in blocks of threads, merged in several kernels."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.differential import close, integers, normal
from support.gpu_program import gpu_program, run_gpu_program

from aotc.lowering.passes.parallelize_gpu import merge_sort as sorts

lax = jax.lax
SMALL = 576  # bytes of shared memory: runs are short, so that few elements are several
ODD = np.array([3, np.nan, -0.0, 0.0, -np.inf, np.inf, 1, -2, np.nan, 0.0, -0.0, 1], "float32")


def check(function, args, shared=0):
    program = gpu_program(function, args, shared_memory_limit=shared)
    got = run_gpu_program(*program, [np.asarray(a) for a in args])
    want = jax.tree.leaves(jax.jit(function)(*args))
    close(got, want)
    for a, b in zip(got, want, strict=True):
        assert a.tobytes() == np.asarray(b).tobytes()
    return [k.name for k in program[1].kernels if "sort_runs" in k.name]


@pytest.mark.parametrize("size", [33, 64, 100, 257])
def test_sorts_of_every_length_have_the_expected_merge_kernels(size):
    assert len(check(jnp.sort, [normal(size)], SMALL)) == max(0, (size - 1).bit_length() - 6) + 1


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "bfloat16", "float16", "bool"])
def test_sorts_of_each_dtype_match_jax(dtype):
    check(lambda x: (jnp.sort(x), jnp.argsort(x)), [jnp.asarray(integers(2, 70, low=0, high=9), dtype)], SMALL)


def test_sorts_with_nan_and_ties_match_jax():
    x = np.concatenate([ODD, normal(40), ODD])
    check(lambda x: (jnp.argsort(x), lax.top_k(x, 20), jnp.sort(x, descending=True)), [x])


def test_sorts_of_several_arrays_and_keys_match_jax():
    x, y = integers(90, low=0, high=4), integers(90, low=0, high=3).astype("float32")
    check(lambda x, y: lax.sort((x, y, jnp.arange(90)), num_keys=2), [x, y], 2048)
    check(lambda x, y: lax.sort((x, y), num_keys=1, dimension=0), [x.reshape(45, 2), y.reshape(45, 2)], 1024)


@pytest.mark.parametrize(("shape", "k"), [((3, 100), 3), ((700,), 7), ((300,), 64), ((150,), 150), ((2, 130), 1)])
def test_top_k_on_gpus_matches_jax(shape, k):
    check(lambda x: lax.top_k(x, k), [integers(*shape, low=0, high=50).astype("float32")], 1024)


@pytest.mark.parametrize("size", [1, 33, 150])
def test_sorts_of_symbolic_length_match_numpy(size):
    (n,) = jax.export.symbolic_shape("n")
    both = jax.jit(lambda x: (jnp.sort(x), jnp.argsort(x)))
    exported = jax.export.export(both)(jax.ShapeDtypeStruct((n,), "float32"))
    x = integers(size, low=0, high=40).astype("float32")
    program = gpu_program(exported.serialize(), shared_memory_limit=1024)
    for got, want in zip(run_gpu_program(*program, [x]), (np.sort(x), np.argsort(x, kind="stable")), strict=True):
        np.testing.assert_array_equal(got, want)


# --- digit by digit ---

ROOM = 8192  # bytes of shared memory: parts of a few hundred elements


@pytest.fixture
def by_digits(monkeypatch):
    """Sort short rows digit by digit too."""
    monkeypatch.setattr(sorts, "MERGED_SORT", replace(sorts.MERGED_SORT, default=-1))
    monkeypatch.setattr(sorts, "sorted_width", lambda dtypes, target: 32)


def digit_sorts(function, args, room=ROOM):
    """Compare a function with XLA; return how many passes over a digit it takes."""
    program = gpu_program(function, args, shared_memory_limit=room)
    got = run_gpu_program(*program, [np.asarray(a) for a in args])
    for a, b in zip(got, jax.tree.leaves(jax.jit(function)(*args)), strict=True):
        assert a.tobytes() == np.asarray(b).tobytes()
    return sum("digit_sort" in k.name for k in program[1].kernels)


@pytest.mark.parametrize("dtype", ["int8", "uint16", "float16", "bfloat16", "bool", "uint8"])
def test_radix_sorts_of_each_dtype_match_jax(dtype, by_digits):
    x = jnp.asarray(integers(2, 90, low=-5, high=5) if dtype != "bool" else integers(2, 90, low=0, high=2), dtype)
    passes = digit_sorts(lambda x: (jnp.sort(x), jnp.argsort(x, descending=True)), [x])
    assert passes == 2 * max(np.asarray(x).itemsize, 1)


def test_radix_sorts_with_nan_match_jax(by_digits):
    x = np.concatenate([ODD, normal(600), ODD])  # two parts
    assert digit_sorts(jnp.argsort, [x]) == 4


def test_radix_sorts_of_several_arrays_and_keys_match_jax(by_digits):
    x, y = integers(90, low=0, high=4).astype("int8"), integers(90, low=0, high=3).astype("uint8")
    assert digit_sorts(lambda x, y: lax.sort((x, y, jnp.arange(90)), num_keys=2), [x, y]) == 2
    rows = lambda x, y: lax.sort((y, x, normal(45, 2)), num_keys=1, dimension=0)
    assert digit_sorts(rows, [x.reshape(45, 2), y.reshape(45, 2)]) == 1


def test_radix_sorts_of_many_arrays_move_only_keys_and_indices(by_digits):
    x, y = integers(3, 50, low=0, high=9).astype("int8"), normal(3, 50)
    assert digit_sorts(lambda x, y: lax.sort((x, y, y + 1, y * 2, y * 3), num_keys=1), [x, y]) == 1


@pytest.mark.parametrize("size", [1, 31, 700])
def test_radix_sorts_of_symbolic_length_match_numpy(size):
    (n,) = jax.export.symbolic_shape("n")
    exported = jax.export.export(jax.jit(jnp.argsort))(jax.ShapeDtypeStruct((n,), "int16"))
    x = integers(size, low=-40, high=400).astype("int16")
    program = gpu_program(exported.serialize(), shared_memory_limit=ROOM)
    (got,) = run_gpu_program(*program, [x])
    np.testing.assert_array_equal(got, np.argsort(x, kind="stable"))
    assert sum("digit_sort" in k.name for k in program[1].kernels) == 2
