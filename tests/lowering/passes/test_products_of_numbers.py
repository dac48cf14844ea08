"""Products of integers and of complex numbers, by tiles and as loops: beside NumPy's, integers modulo 2 ** bits."""

import jax
import numpy as np
import pytest
from support.differential import integers, normal

import aotc

INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
SHAPES = {
    "loops": ((3, 5), (5, 4)),
    "tiles": ((37, 65), (65, 48)),
    "one row": ((1, 300), (300, 64)),
    "one column": ((64, 300), (300, 1)),
    "a number": ((1, 500), (500, 1)),
    "few columns": ((200, 130), (130, 3)),
    "small ones in a batch": ((90, 4, 4), (90, 4, 4)),
    "a batch": ((5, 20, 24), (5, 24, 33)),
}


@pytest.fixture(autouse=True)
def sixty_four_bits():
    with jax.enable_x64(True):
        yield


def compiled(function, *arrays):
    (got,) = aotc.load(aotc.compile(jax.jit(function), *arrays, source=False)).invoke("main", *arrays)
    return got


def whole(dtype, *shape, seed=0):
    """Return numbers all over the range of ``dtype``."""
    kind = np.iinfo(dtype)
    return np.random.default_rng(seed).integers(kind.min, kind.max, shape, dtype, endpoint=True)


def complex_(dtype, *shape, seed=0):
    return (normal(*shape, seed=seed) + 1j * normal(*shape, seed=seed + 50)).astype(dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", INTEGERS)
def test_integer_matmuls_wrap_like_numpy(dtype, shape):
    x, y = (whole(dtype, *sizes, seed=n) for n, sizes in enumerate(SHAPES[shape]))
    np.testing.assert_array_equal(compiled(lambda x, y: x @ y, x, y), x @ y)


@pytest.mark.parametrize(("left", "right", "result"), [
    ("uint8", "uint8", "int32"), ("int8", "int8", "int16"), ("int8", "int8", "int64"), ("uint8", "int8", "int8"),
    ("int16", "int16", "int32"), ("int32", "int32", "int64"), ("uint32", "uint32", "uint64"),
])  # fmt: skip
def test_integer_matmuls_accumulate_in_the_result_dtype(left, right, result):
    x, y = whole(left, 40, 260), whole(right, 260, 36, seed=1)
    got = compiled(lambda x, y: jax.lax.dot(x, y, preferred_element_type=result), x, y)
    np.testing.assert_array_equal(got, x.astype(result) @ y.astype(result))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64"])
@pytest.mark.parametrize("groups", [1, 2])
def test_integer_convolutions_match_int64_modulo_2_to_the_bits(dtype, groups):
    form = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "feature_group_count": groups}
    x, w = whole(dtype, 1, 7, 8, 24), whole(dtype, 3, 3, 24 // groups, 20, seed=1)
    wide = [a.astype("int64") for a in (x, w)]
    run = lambda x, w: jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", **form)
    np.testing.assert_array_equal(compiled(run, x, w), np.asarray(jax.jit(run)(*wide)).astype(dtype))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex_matmuls_match_numpy(dtype, shape):
    x, y = (complex_(dtype, *sizes, seed=n) for n, sizes in enumerate(SHAPES[shape]))
    want = x.astype("complex128") @ y.astype("complex128")
    limit = 20 * np.finfo(dtype).eps * np.abs(want).max()
    np.testing.assert_allclose(compiled(lambda x, y: x @ y, x, y), want, rtol=0, atol=limit)


@pytest.mark.parametrize("left", ["x", "x.T", "x.conj().T"])
@pytest.mark.parametrize("right", ["y", "y.T", "y.conj().T"])
@pytest.mark.parametrize(("rows", "columns"), [(33, 40), (1, 40), (33, 1)])
def test_complex_matmuls_of_transposes_match_numpy(left, right, rows, columns):
    function = eval(f"lambda x, y: {left} @ {right}")
    x, y = (complex_("complex64", *sizes, seed=n) for n, sizes in enumerate(((rows, 65), (65, columns))))
    x, y = (a.T.copy() if "T" in how else a for a, how in ((x, left), (y, right)))
    np.testing.assert_allclose(compiled(function, x, y), function(x, y), rtol=0, atol=1e-4)


def test_complex_and_integer_matmuls_with_constants_and_symbolic_sizes_match_numpy():
    w, n = complex_("complex64", 48, 40, seed=3), integers(24, 20, low=-99, high=99)
    x, m = complex_("complex64", 7, 48), integers(7, 24, low=-99, high=99)
    np.testing.assert_allclose(compiled(lambda x: x @ w, x), x @ w, rtol=0, atol=1e-4)
    (b,) = jax.export.symbolic_shape("b")
    for matrix, rows in ((w, x), (n, m)):
        form = jax.ShapeDtypeStruct((b, rows.shape[1]), rows.dtype)
        exported = jax.export.export(jax.jit(lambda x, w=matrix: x @ w))(form)
        module = aotc.load(aotc.compile(exported.mlir_module_serialized, source=False))
        for part in (rows, rows[:1]):
            np.testing.assert_allclose(module.invoke("main", part)[0], part @ matrix, rtol=0, atol=1e-4)


@pytest.mark.parametrize("axis", [0, 1, None])
def test_complex_sums_match_numpy(axis):
    x = complex_("complex64", 37, 301)
    want = x.astype("complex128").sum(axis)
    np.testing.assert_allclose(compiled(lambda x: x.sum(axis), x), want, rtol=0, atol=1e-3)
