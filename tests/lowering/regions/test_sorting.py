"""Sorting by keys and by comparisons, and the k largest, beside ``jax.lax`` and NumPy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support.differential import LEVELS, check, integers, normal

import aotc
from aotc.frontend.importer import import_model
from aotc.ir.tensor.ir import walk
from aotc.lowering.analysis.sort_keys import sort_keys

pytestmark = pytest.mark.cpu

lax = jax.lax
FLOATS = ["float16", "bfloat16", "float32"]
SMALL = ["float4_e2m1fn", "float8_e3m4", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e8m0fnu"]
INTEGERS = ["int8", "int16", "int32", "uint8", "uint16", "uint32"]


def values(n, dtype, seed=0):
    """Return values with many equal ones; floats with zeros of both signs, infinities and NaN of both signs."""
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.integers(0, 2, n).astype(bool)
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    if kind.kind in "iu":
        limits = np.iinfo(kind)
        wide = rng.integers(limits.min, limits.max, n, dtype=kind, endpoint=True)
        return np.where(rng.random(n) < 0.5, wide, kind.type(7))
    x = np.round(rng.standard_normal(n) * 100).astype("float64")
    odd = [0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan]
    return np.where(rng.random(n) < 0.3, rng.choice(odd, n), x).astype(kind)


def same_bits(function, *args, **options):
    """Compare with ``jax.jit`` bit by bit; XLA changes the NaN of small floats."""
    got = aotc.load(aotc.compile(function, *args, verify_each=True, **options)).invoke("main", *args)
    for a, b in zip(got, jax.tree.leaves(jax.jit(function)(*args)), strict=True):
        b = np.asarray(b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if a.dtype.name in SMALL:
            np.testing.assert_array_equal(a.astype("float32"), b.astype("float32"))
        else:
            assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, *SMALL, "bool"])
def test_sorts_of_all_dtypes_are_stable_and_match_jax(dtype):
    """Equal keys, -0.0 and 0.0 and all NaN among them, keep their order: the second operand shows it."""
    x, place = values(700, dtype), np.arange(700, dtype="int32")
    same_bits(lambda x, i: (lax.sort((x, i), num_keys=1), jnp.sort(x), jnp.argsort(x, descending=True)), x, place)


@pytest.mark.parametrize("dtype", ["float64", "int64", "uint64"])
def test_sorts_of_64_bit_dtypes_match_jax(dtype):
    with jax.enable_x64(True):
        x, place = values(900, dtype), np.arange(900)
        same_bits(lambda x, i: (lax.sort((x, i), num_keys=1), lax.top_k(x, 100)), x, place)


SHAPES = [(1,), (0,), (2, 0), (0, 300), (127,), (128,), (3, 300), (300, 3), (2, 200, 3), (5000,)]


@pytest.mark.parametrize("shape", SHAPES)
def test_sorts_along_every_axis_match_jax(shape):
    x, i = normal(*shape), integers(*shape, low=-3, high=4)
    for axis in range(len(shape)):
        same_bits(lambda x, i: lax.sort((i, x), axis, num_keys=1), x, i)  # noqa: B023 (called at once)


@pytest.mark.parametrize("level", LEVELS)
def test_sorts_match_jax_at_every_level(level):
    check(lambda x: (jnp.sort(x * 2), jnp.argsort(x, 0), lax.top_k(x + 1, 70)), [normal(200, 300)], level)


def test_sorts_with_several_keys_match_jax():
    a, b, c = values(3000, "int8"), values(3000, "float32"), values(3000, "uint16")
    same_bits(lambda a, b, c: lax.sort((a, b, c), num_keys=3), a, b, c)
    same_bits(lambda a, b, c: lax.sort((a > 0, b.astype("bfloat16"), c), num_keys=2), a, b, c)
    same_bits(lambda b, c: lax.sort((lax.complex(b[:400], b[1:401]), c[:400]), num_keys=1), b, c)


def test_sorted_reversed_and_constant_rows_match_jax():
    """Bytes that are the same in all elements, sorted rows, and reversed ones."""
    up = np.arange(1000)
    rows = np.stack([up, up[::-1], up * 0 - 5, up % 3 << 20]).astype("int32")
    same_bits(lambda x: (jnp.sort(x, 1), jnp.argsort(x, 1), jnp.sort(x.T, 0)), rows)


def test_sorts_of_symbolic_length_match_jax():
    def sort(x):
        return jnp.sort(x, 0), jnp.argsort(x, 1), lax.sort((x, x * 2), 1, num_keys=1)

    data = aotc.compile(sort, jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, m"), "float32"))
    for shape in ((1, 1), (5, 2), (400, 3), (2, 900)):
        x = normal(*shape)
        for a, b in zip(aotc.load(data).invoke("main", x), jax.tree.leaves(sort(x)), strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_comparator_without_sort_keys_is_applied():
    """By distance from 3, larger ones first; then one that looks at another operand."""
    text = """
func.func @main(%x: tensor<300xf32>, %i: tensor<300xi32>) -> (tensor<300xf32>, tensor<300xi32>) {
  %y:2 = "stablehlo.sort"(%x, %i) <{dimension = 0 : i64, is_stable = true}> ({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>, %c: tensor<i32>, %d: tensor<i32>):
    %three = stablehlo.constant dense<3.0> : tensor<f32>
    %p = stablehlo.subtract %a, %three : tensor<f32>
    %q = stablehlo.subtract %three, %b : tensor<f32>
    %r = stablehlo.abs %p : tensor<f32>
    %s = stablehlo.abs %q : tensor<f32>
    %t = stablehlo.compare GT, %r, %s : (tensor<f32>, tensor<f32>) -> tensor<i1>
    stablehlo.return %t : tensor<i1>
  }) : (tensor<300xf32>, tensor<300xi32>) -> (tensor<300xf32>, tensor<300xi32>)
  return %y#0, %y#1 : tensor<300xf32>, tensor<300xi32>
}"""
    x, i = integers(300).astype("float32"), np.arange(300, dtype="int32")
    got = aotc.load(aotc.compile(text))(x, i)
    order = np.argsort(-np.abs(x - 3), kind="stable")
    np.testing.assert_array_equal(got[0], x[order])
    np.testing.assert_array_equal(got[1], order)


KEYED = {
    "one": (lambda x, i: lax.sort((x, i), num_keys=1), [True]),
    "two": (lambda x, i: lax.sort((x, i), num_keys=2), [True, True]),
    "real and imaginary": (lambda x, i: lax.sort((x + 1j * x, i), num_keys=1), [True, True]),
}


@pytest.mark.parametrize("name", KEYED)
def test_sort_keys_are_extracted_from_comparators(name):
    function, want = KEYED[name]
    module = import_model(function, normal(200), integers(200))
    (op,) = (op for f in module.functions.values() for op in walk(f.body) if op.name == "sort")
    keys = sort_keys(op.regions[0])
    assert keys is not None
    assert [k.ascending for k in keys] == want


DIRECTIONS = {
    "LT, %a, %b": True, "GT, %a, %b": False, "GT, %b, %a": True, "LT, %b, %a": False,
    "LE, %a, %b": None, "LT, %a, %d": None,
}  # fmt: skip


@pytest.mark.parametrize(("less", "ascending"), DIRECTIONS.items())
def test_every_comparison_direction_sorts_stably(less, ascending):
    text = f"""
func.func @main(%x: tensor<500xi32>, %i: tensor<500xi32>) -> tensor<500xi32> {{
  %y:2 = "stablehlo.sort"(%x, %i) <{{dimension = 0 : i64, is_stable = true}}> ({{
  ^bb0(%a: tensor<i32>, %b: tensor<i32>, %c: tensor<i32>, %d: tensor<i32>):
    %t = stablehlo.compare {less} : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %t : tensor<i1>
  }}) : (tensor<500xi32>, tensor<500xi32>) -> (tensor<500xi32>, tensor<500xi32>)
  return %y#1 : tensor<500xi32>
}}"""
    module = import_model(text)
    (op,) = (op for op in module.functions["main"].body.ops if op.name == "sort")
    keys = sort_keys(op.regions[0])
    if ascending is None:
        assert keys is None
        return
    assert [k.ascending for k in keys] == [ascending]
    x, i = integers(500), np.arange(500, dtype="int32")
    got = aotc.load(aotc.compile(text))(x, i)
    np.testing.assert_array_equal(got, np.argsort(x if ascending else -x, kind="stable"))


# --- top_k -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_top_k_of_all_dtypes_matches_jax(dtype):
    x = values(2000, dtype).reshape(2, 1000)
    for k in (5, 24, 25, 65, 600, 1000):
        same_bits(lambda x: lax.top_k(x, k), x)  # noqa: B023 (called at once)


@pytest.mark.parametrize("order", ["up", "down", "same", "saw"])
def test_top_k_of_rows_in_any_order_matches_jax(order):
    up = np.arange(5000)
    x = {"up": up, "down": up[::-1], "same": up * 0, "saw": up % 90}[order]
    same_bits(lambda x: (lax.top_k(x, 100), lax.top_k(x, 4999)), x.astype("float32"))


@pytest.mark.parametrize("order", ["up", "down", "same", "saw", "random"])
@pytest.mark.parametrize("n", [1, 31, 32, 33, 64, 100, 997])
def test_small_top_k_next_to_block_boundaries_matches_jax(order, n):
    """Blocks of 32 are looked at behind the first k; equal elements come in their order, whatever is read of them."""
    up = np.arange(n)
    rows = {"up": up, "down": up[::-1], "same": up * 0, "saw": up % 9, "random": values(n, "float32")}[order]
    x = np.stack([rows, rows[::-1]]).astype("float32")
    for k in {1, min(n, 3), min(n, 24), min(n, 25)}:
        same_bits(lambda x: (lax.top_k(x, k), lax.top_k(x + 1, k)[0], lax.top_k(x * 2, k)[1]), x)  # noqa: B023


def test_small_top_k_of_symbolic_sizes_matches_jax():
    shape = jax.export.symbolic_shape("b, n", constraints=["n >= 5"])
    data = aotc.compile(lambda x: lax.top_k(x, 5), jax.ShapeDtypeStruct(shape, "float32"))
    for shape in ((1, 5), (2, 36), (2, 37), (2, 38), (3, 1000)):
        x = values(shape[0] * shape[1], "float32").reshape(shape)
        for got, want in zip(aotc.load(data).invoke("main", x), lax.top_k(x, 5), strict=True):
            np.testing.assert_array_equal(got, want)


def test_top_k_of_symbolic_sizes_matches_jax():
    data = aotc.compile(
        lambda x: lax.top_k(x, 80),
        jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, n", constraints=["n >= 80"]), "float32"),
    )
    for shape in ((1, 80), (2, 80), (3, 1000)):
        x = normal(*shape)
        got = aotc.load(data)(x)
        np.testing.assert_array_equal(got[0], np.sort(x, 1)[:, ::-1][:, :80])
        np.testing.assert_array_equal(np.take_along_axis(x, got[1], 1), got[0])
