"""Functions of Fourier transforms: their names, what they mean, and their vectors of every length."""

import ast

import numpy as np
import pytest

import aotc
from aotc.ir.loop.forms.fft import Transform, fft_stages, run_transform
from aotc.ir.loop.forms.records import read_record
from aotc.kernels.emit.vector.fft import FftFunction
from aotc.kernels.emit.vector.fft_passes import group_passes, iteration_space_of_pass

TARGETS = ["cpu:x86-64-v2", "cpu:x86-64-v3", "cpu"]
ROWS = [(2,), (6,), (30,), (64,), (143,), (500,), (512,), (343,), (256,), (1024,), (2048,), (4096,), (4000,), (32768,)]
COLUMNS = [(4, 2), (30, 3), (12, 16), (64, 33), (100, 10)]


def written(transform: Transform, vector_bytes: int, permutes: bool = False) -> str:
    """Return the assembly of a transform's function and of what it names."""
    return "\n".join(FftFunction(transform, vector_bytes, permutes).symbols().values())


@pytest.mark.ir
@pytest.mark.parametrize(
    "transform",
    [
        Transform("f32", (8, 4), False, 1.0),
        Transform("f64", (13,), True, 1 / 13),
        Transform("f32", (3, 2), False, 1.0, False, 16, 10, 10),
        Transform("f32", (3, 2), True, 1 / 6, pitch=16),
        Transform("f64", (8, 3), False, 1.0, real=True),
    ],
)
def test_a_transform_reads_back(transform):
    assert read_record(ast.parse(str(transform), mode="eval").body, {"Transform": Transform}) == transform


@pytest.mark.ir
def test_what_a_transform_means_of_neighbours_whose_number_is_told():
    x = (np.arange(24) * 1j + np.arange(24)[::-1]).astype("c8")
    out = np.full(24, 7, "c8")
    transform = Transform("f32", (3, 2), True, 0.5, pitch=4)
    arrays = [x, np.zeros(8, "f4"), out, np.zeros(transform.work, "f4"), np.int64([3]), np.int64([4])]
    run_transform(transform, arrays)
    found = out.reshape(6, 4)
    np.testing.assert_allclose(found[:, :3], 3 * np.fft.ifft(x.reshape(6, 4)[:, :3], axis=0), rtol=1e-6)
    assert (found[:, 3] == 7).all()


@pytest.mark.ir
def test_vectors_are_no_longer_than_the_machine_has_them_but_for_pairs():
    text = written(Transform("f32", (8, 8, 8), False, 1.0), vector_bytes=32)
    assert "<8 x float>" in text
    assert "<16 x float>" in text  # real and imaginary parts side by side
    assert "<32 x float>" not in text
    assert text.count("fadd contract") == text.count("fadd ")


@pytest.mark.ir
@pytest.mark.parametrize(
    ("radices", "passes"),
    [
        ((8, 8, 8, 8), [1, 3]),
        ((13, 8, 8, 4, 4), [1, 2, 1, 1]),
        ((8, 8), [1, 1]),
        ((8, 4, 4), [1, 1, 1]),
        ((7, 7, 7), [1, 1, 1]),
    ],
)
def test_passes_of_radix_8_share_a_butterfly(radices, passes):
    assert [len(together) for together in group_passes(fft_stages(radices))] == passes
    text = written(Transform("f32", radices, False, 1.0), vector_bytes=64)
    assert text.count("switch") == 2 * sum(n > 1 for n in passes)


@pytest.mark.parametrize("lanes", [2, 4, 8, 16])
@pytest.mark.ir
def test_vectors_of_passes_that_share_are_whole(lanes):
    for first in range(2, 14):
        for radices in ((first, 8, 8), (first, 8, 8, 8), (first, 8, 8, 2)):
            together = next(found for found in group_passes(fft_stages(radices)) if len(found) > 1)
            assert {iteration_space_of_pass(stage, lanes).lanes for stage in together} == {lanes}


@pytest.mark.ir
def test_an_order_is_named_where_radices_leave_registers():
    def orders(radices, vector_bytes=64, permutes=True):
        text = written(Transform("f32", radices, False, 1.0), vector_bytes, permutes)
        return text.count("private constant <16 x i32>"), text.count("= load <16 x i32>")

    assert orders((8, 8, 8)) == (4, 6)  # to part numbers and to weave two each, and to join the two that weave
    assert orders((8, 8, 8), permutes=False) == orders((8, 8, 8), vector_bytes=32) == orders((7, 7, 7)) == (0, 0)


@pytest.mark.cpu
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("shape", "axis"), [*((s, 0) for s in ROWS), *((s, 0) for s in COLUMNS), ((3, 60, 5), 1)])
@pytest.mark.parametrize("dtype", ["c8", "c16"])
def test_vectors_of_every_length(target, shape, axis, dtype):
    import jax
    import jax.numpy as jnp

    random = np.random.default_rng(0)
    x = (random.normal(size=shape) + 1j * random.normal(size=shape)).astype(dtype)
    with jax.enable_x64(dtype == "c16"):
        module = aotc.load(aotc.compile(lambda x: jnp.fft.fft(x, axis=axis), x, target=target), threads=1)
    want = np.fft.fft(x.astype("c16"), axis=axis)
    (found,) = module.invoke("main", x)
    bound = 4 * np.finfo("f4" if dtype == "c8" else "f8").eps * max(np.log2(shape[axis]), 1)
    assert np.abs(found - want).max() <= bound * np.abs(want).max()


@pytest.mark.cpu
def test_neighbours_do_not_touch_each_other():
    import jax.numpy as jnp

    x = np.full((12, 10), np.nan, "c8")
    x[:, :5] = np.arange(60).reshape(12, 5)
    module = aotc.load(aotc.compile(lambda x: jnp.fft.fft(x, axis=0), x), threads=1)
    (found,) = module.invoke("main", x)
    np.testing.assert_allclose(found[:, :5], np.fft.fft(x[:, :5], axis=0), rtol=1e-4, atol=1e-3)
    assert np.isnan(found[:, 5:]).all()


@pytest.mark.cpu
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape", [(4,), (16,), (26,), (96,), (250,), (1000,), (3, 60), (4096,)])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_spectra_of_real_numbers(target, shape, dtype):
    import jax
    import jax.numpy as jnp

    x = np.random.default_rng(0).normal(size=shape).astype(dtype)
    with jax.enable_x64(dtype == "f8"):
        module = aotc.load(aotc.compile(jnp.fft.rfft, x, target=target), threads=1)
    (found,) = module.invoke("main", x)
    want = np.fft.rfft(x.astype("f8"))
    assert np.abs(found - want).max() <= 4 * np.finfo(dtype).eps * np.log2(shape[-1]) * np.abs(want).max()
    assert found.shape == want.shape
