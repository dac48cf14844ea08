"""Windows: prefix scans (cumsum and its like), large windows, and what they cost, beside ``jax.jit`` and NumPy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support.differential import LEVELS, check, integers, normal

import aotc
from aotc.frontend.importer import import_model
from aotc.ir.tensor.ir import walk
from aotc.lowering.analysis.prefix_scans import neutral_value
from aotc.options import Options
from aotc.pipeline import run_passes

pytestmark = pytest.mark.cpu

lax = jax.lax
CUMULATIVE = {"sum": lax.cumsum, "max": lax.cummax, "min": lax.cummin, "prod": lax.cumprod}
SHAPES = [
    ((40,), 0), ((1,), 0), ((3, 0), 0), ((0,), 0), ((3, 1000), 1), ((300, 5), 0), ((2, 33, 300), 1), ((70, 2, 1), 0),
]  # fmt: skip


def values(shape, dtype, seed=0):
    if dtype == "bool":
        return integers(*shape, low=0, high=2, seed=seed).astype(bool)
    x = normal(*shape, seed=seed)
    if dtype.startswith("complex"):
        return (x + 1j * normal(*shape, seed=seed + 1)).astype(dtype)
    return (x * 3).astype(getattr(ml_dtypes, dtype, dtype))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("kind", CUMULATIVE)
def test_scans_of_every_shape_match_jax(kind, reverse):
    scan = CUMULATIVE[kind]
    check(
        lambda *xs: [scan(x, axis, reverse=reverse) for x, (_, axis) in zip(xs, SHAPES)],
        [values(shape, "int32" if kind == "prod" else "float32", n) for n, (shape, _) in enumerate(SHAPES)],
        2,
    )


@pytest.mark.parametrize("level", LEVELS)
def test_scans_match_jax_at_every_level(level):
    check(
        lambda x: (jnp.cumsum(jnp.exp(x), 1) * 2, lax.cummax(x, 0, reverse=True), lax.cumlogsumexp(x, 1)),
        [normal(30, 40)],
        level,
    )


ALL = ["int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "bfloat16", "float32", "complex64"]


def test_scans_of_each_dtype_match_jax():
    kinds = [d for d in ALL if d != "complex64"]
    check(lambda *xs: [lax.cumsum(x, 0) for x in xs], [values((50, 3), d) for d in ALL], 2)
    check(lambda *xs: [lax.cummax(x, 1) for x in xs], [values((3, 50), d) for d in kinds], 2)
    check(lambda *xs: [lax.cummin(x, 0, reverse=True) for x in xs], [values((50,), d) for d in kinds], 2)


def test_scans_of_64_bit_dtypes_match_jax():
    with jax.enable_x64(True):
        check(
            lambda *xs: [(lax.cumsum(x, 0), lax.cumprod(x, 0)) for x in xs],
            [values((50, 3), d) for d in ("int64", "uint64", "float64", "complex128")],
            2,
        )


def pairs(x, y):
    """Return running (largest, where) with its own combiner of two operands."""

    def later(a, b):
        (x, i), (y, j) = a, b
        take = (y > x) | ((y == x) & (j < i))
        return jnp.where(take, y, x), jnp.where(take, j, i)

    n = x.shape[1]
    window = {"window_dimensions": (1, n), "window_strides": (1, 1), "padding": ((0, 0), (n - 1, 0))}
    return lax.reduce_window((x, y), (-jnp.inf, np.int32(2**30)), later, **window)


@pytest.mark.parametrize("length", [60, 40000])
def test_scans_of_several_operands_match_numpy(length):
    x = normal(2, length)
    got = aotc.load(aotc.compile(pairs, x, np.tile(np.arange(length, dtype="int32"), (2, 1))))(
        x, np.tile(np.arange(length, dtype="int32"), (2, 1))
    )
    np.testing.assert_array_equal(got[0], np.maximum.accumulate(x, 1))
    np.testing.assert_array_equal(np.take_along_axis(x, got[1], 1), got[0])


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("shape", "axis"), [((40000,), 0), ((2, 32771), 1), ((32768, 3), 0)])
def test_long_scans_are_split_and_match_jax(shape, axis, reverse):
    """One without a divisor near the wanted number of parts too."""
    check(
        lambda x, n: [scan(v, axis, reverse=reverse) for v in (x, n) for scan in (lax.cumsum, lax.cummax)],
        [normal(*shape), integers(*shape)],
        2,
        4,
    )


def test_a_long_scan_is_as_accurate_as_xla():
    x = (np.random.default_rng(0).random(1 << 20) + 0.1).astype("float32")
    want = np.cumsum(x.astype("float64"))
    got = aotc.load(aotc.compile(jnp.cumsum, x))(x)
    theirs = np.asarray(jax.jit(jnp.cumsum)(x))
    assert np.abs(got - want).max() <= 1.5 * np.abs(theirs - want).max()


def test_scans_have_the_same_bits_at_any_thread_count():
    x = normal(100000)
    data = aotc.compile(jnp.cumsum, x)
    one, two = (aotc.load(data, threads=n)(x) for n in (1, 2))
    np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("sizes", [(1, 1), (5, 2), (600, 7)])
def test_scans_of_symbolic_sizes_match_numpy(sizes, symbolic):
    x = normal(*sizes)
    for got, want in zip(symbolic(x), (np.cumsum(x, 0), np.maximum.accumulate(x[::-1], 0)[::-1], np.cumsum(x, 1))):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def symbolic():
    shape = jax.export.symbolic_shape("n, m")

    def scans(x):
        return lax.cumsum(x, 0), lax.cummax(x, 0, reverse=True), lax.cumsum(x, 1)

    return aotc.load(aotc.compile(scans, jax.ShapeDtypeStruct(shape, "float32")))


def pool(x, window, strides, padding="VALID", kind="sum"):
    init, operator = {"sum": (0, lax.add), "max": (-np.inf, lax.max), "min": (np.inf, lax.min)}[kind]
    return lax.reduce_window(x, np.array(init, x.dtype), operator, window, strides, padding)


def test_large_windows_match_jax():
    x, image = normal(3, 1000), normal(2, 40, 50, 3)
    check(
        lambda x: [
            pool(x, (1, 100), (1, 1)), pool(x, (1, 64), (1, 3), "SAME", "max"), pool(x, (1, 999), (1, 1), kind="min"),
            pool(x, (1, 300), (1, 1), ((0, 0), (500, 120))), pool(x, (1, 1000), (1, 1)),
            pool(x, (1, 1000), (1, 1), "SAME"),
        ], [x], 2, 4,
    )  # fmt: skip
    check(
        lambda x: [
            pool(x, (1, 9, 9, 1), (1, 1, 1, 1)), pool(x, (1, 7, 6, 1), (1, 2, 1, 1), "SAME", "max"),
            pool(x, (1, 40, 50, 1), (1, 1, 1, 1)), pool(x, (2, 8, 8, 3), (1, 1, 1, 1), "SAME", "min"),
        ], [image], 2, 4,
    )  # fmt: skip


def test_dilated_large_windows_match_jax():
    def f(x):
        return lax.reduce_window(x, 0.0, lax.add, (8, 9), (1, 2), ((3, 4), (0, 9)), (2, 1), (1, 2))

    check(f, [normal(40, 60)], 2, 4)


def test_the_initial_value_of_a_window_is_added_once():
    x = normal(4, 30)
    n = x.shape[1]
    window = {"window_dimensions": (1, n), "window_strides": (1, 1), "padding": ((0, 0), (n - 1, 0))}
    module = aotc.load(aotc.compile(lambda x, a: lax.reduce_window(x, a, lax.add, **window), x, np.float32(0.5)))
    np.testing.assert_allclose(module(x, np.float32(0.5)), np.cumsum(x, 1) + 0.5, rtol=1e-5, atol=1e-5)
    big = {"window_dimensions": (1, 1000), "window_strides": (1, 1), "padding": ((0, 0), (0, 0))}
    check(lambda x: lax.reduce_window(x, 2.0, lax.add, **big), [normal(2, 1500)], 2, 4)


def test_only_expected_windows_remain_after_the_passes():
    """The sum of the elements of all windows stays near the number of elements."""
    def seen(function, x):
        module = run_passes(import_model(function, x), Options())
        return sum(
            int(np.prod(op.results[0].type.shape)) * int(np.prod(op.attrs["window"]))
            for f in module.functions.values() for op in walk(f.body)
            if op.name == "reduce_window" and f.attrs["kind"] == "window"
        )  # fmt: skip

    x, image = normal(100000), normal(100, 100)
    assert seen(lambda x: pool(x, (500,), (1,)), x) == 0
    assert seen(lambda x: jnp.cumsum(x), x) <= 64 * 64
    assert seen(lambda x: pool(x, (10, 10), (1, 1)), image) <= 20 * image.size


@pytest.mark.parametrize(
    "dtype", ["int4", "uint8", "int32", "bool", "float8_e4m3fn", "float8_e5m2", "bfloat16", "float32"]
)
def test_neutral_values_leave_every_value_unchanged(dtype):
    from aotc.vmfb.dtypes import DTYPES, to_numpy

    name = next(n for n, d in DTYPES.items() if d.numpy == dtype)
    x = values((50,), dtype)
    for op, f in (("max", np.maximum), ("min", np.minimum)):
        neutral = neutral_value(op, name)
        assert neutral.dtype == to_numpy(name)
        np.testing.assert_array_equal(f(x.astype("float64"), neutral.astype("float64")), x.astype("float64"))
    assert neutral_value("sub", name) is None
