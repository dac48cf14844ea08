"""Rows added by a scatter on GPUs: sorted by where they go, then added in order, long runs in parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.differential import integers, normal
from support.gpu_program import check_gpu, gpu_program, run_gpu_program

pytestmark = pytest.mark.cudasim


def add(x, i, u):
    return x.at[i].add(u)


def kernels(variant, part):
    return [k for k in variant.kernels if part in k.name]


PLACES = {
    "one row": np.full(100, 7, "int32"),
    "few rows": integers(100, low=0, high=3),
    "many rows, some of them none": integers(100, low=-3, high=60),
    "none": np.full(100, 99, "int32"),
    "runs as long as parts": np.repeat(np.arange(4, dtype="int32"), 32)[:100],
    "few updates": integers(20, low=0, high=5),
}


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
@pytest.mark.parametrize("name", PLACES)
def test_scatter_adds_of_rows_are_sorted_and_match_jax(name, dtype):
    i = PLACES[name]
    with jax.enable_x64(True):
        x, u = (jnp.asarray(normal(n, 32, seed=n), dtype) for n in (50, len(i)))
        variant = check_gpu(add, [x, i, u], factor=8)
    assert len(kernels(variant, "sort")) == 1
    assert len(kernels(variant, "scatter")) == (3 if len(i) > 32 else 1)



def test_rows_whose_keys_need_64_bits_match_jax():
    shapes = ((1 << 26, 32), "float32"), ((100,), "int32"), ((100, 32), "float32")
    types = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    _, variant = gpu_program(add, types)
    assert {b.dtype for k in kernels(variant, "sort") for b in k.outputs} == {"u64"}


def test_gradients_of_embeddings_are_sorted_row_sums():
    """The windows of one row are whole rows; so are those of several dims."""
    tokens, w = integers(6, 50, low=0, high=40), normal(40, 4, 16)
    variant = check_gpu(jax.grad(lambda w, i: (w[i] ** 2).sum()), [w, tokens], factor=8)
    assert kernels(variant, "sort")


def test_updates_are_added_in_their_order():
    """Of updates to one row the first comes first, so that rounding is the same in every call."""
    big = np.float32(2.0**24)
    u = np.repeat(np.array([big, 1, -big, 1], "float32"), 32).reshape(4, 32)
    program = gpu_program(add, [np.zeros((9, 32), "float32"), np.zeros(4, "int32"), u])
    (got,) = run_gpu_program(*program, [np.zeros((9, 32), "float32"), np.zeros(4, "int32"), u])
    assert (got[0] == 1).all()
    assert not got[1:].any()


def test_short_rows_and_short_floats_use_integer_sums():
    for width, dtype in ((31, "float32"), (32, "bfloat16")):
        x, u = (jnp.asarray(normal(n, width), dtype) for n in (50, 100))
        assert not kernels(check_gpu(add, [x, PLACES["few rows"], u], factor=8), "sort")
