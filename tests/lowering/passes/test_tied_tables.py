"""A table that is multiplied with and gathered from is in a bundle once: its rows come from the product's panels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aotc
from aotc.frontend.importer import import_model
from aotc.lowering.lower import lower
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.targets import resolve_targets
from aotc.vmfb.dtypes import to_numpy

pytestmark = pytest.mark.cpu

IDS = np.array([[3, 299, 7], [0, 17, 128]], np.int32)


def numbers(*shape, seed=0, dtype="f32"):
    return np.random.default_rng(seed).standard_normal(shape).astype(to_numpy(dtype))


def tied(table, transposed):
    """Return a model that gathers rows of a table and multiplies with it."""

    def model(ids):
        x = jnp.asarray(table)[ids]
        return x, x @ table.T if transposed else jnp.einsum("...d,vd->...v", x, table)

    return model


def constant_bytes(model, *args, target="cpu:x86-64-v4-bf16"):
    (found,) = resolve_targets(target)
    chosen = Options(target=found.name)
    return lower(run_passes(import_model(model, *args), chosen), found, chosen).constants.arrays


def times_kept(table, model, *args, **options):
    """Return how often the bytes of a table, or more, are among the constants."""
    return sum(array.nbytes >= table.nbytes for _, array, _ in constant_bytes(model, *args, **options))


def close(found, want, dtype="f32"):
    error = np.abs(np.asarray(found, "f8") - want).max() / np.abs(want).max()
    assert error < {"f32": 1e-5, "f64": 1e-12}.get(dtype, 1e-2)


@pytest.mark.parametrize("shape", [(300, 128), (1000, 130), (129, 33)])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f64"])
@pytest.mark.parametrize("transposed", [False, True])
def test_gathered_rows_equal_the_rows_of_the_table(shape, dtype, transposed):
    table, ids = numbers(*shape, dtype=dtype), IDS % shape[0]
    with jax.enable_x64(dtype == "f64"):
        model = tied(table, transposed)
        rows, logits = aotc.load(aotc.compile(jax.jit(model), ids)).invoke("main", ids)
        kept = times_kept(table, model, ids)
    np.testing.assert_array_equal(rows, table[ids])
    close(logits, table[ids].astype("f8") @ table.astype("f8").T, dtype)
    assert kept == 1


@pytest.mark.parametrize("target", ["cpu:x86-64-v2", "cpu:x86-64-v3", "cpu:x86-64-v4", "cpu:x86-64-v4-bf16"])
def test_each_cpu_target_stores_the_table_once(target):
    table = numbers(1000, 64)
    assert times_kept(table, tied(table, False), IDS, target=target) == 1


@pytest.mark.parametrize("dtype", [np.int32, np.int16, np.int8, np.uint8, np.uint32])
def test_gathers_beyond_the_table_are_clamped(dtype):
    table = numbers(300, 128)

    def model(ids):
        dims = jax.lax.GatherDimensionNumbers((1,), (0,), (0,))
        x = jax.lax.gather(jnp.asarray(table), ids[:, None], dims, (1, 128), mode="promise_in_bounds")
        return x, x @ table.T

    info = np.iinfo(dtype)
    ids = np.array([info.min, 0, 5, min(299, info.max), info.max], dtype)
    rows, _ = aotc.load(aotc.compile(jax.jit(model), ids)).invoke("main", ids)
    np.testing.assert_array_equal(rows, table[np.clip(ids.astype("i8"), 0, 299)])


def test_a_decoding_loop_gathers_from_the_panels():
    table = numbers(500, 64)

    def model(token):
        def step(token, _):
            x = jnp.tanh(jnp.asarray(table)[token])
            token = jnp.argmax(x @ table.T, -1).astype(jnp.int32)
            return token, x

        return jax.lax.scan(step, token, None, 6)

    token = np.array([3, 499, 0, 77], np.int32)
    got = aotc.load(aotc.compile(jax.jit(model), token)).main(token)
    want = jax.jit(model)(token)
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_allclose(got[1], want[1], rtol=1e-6)
    assert times_kept(table, model, token) == 1


def test_symbolic_numbers_of_gathered_rows_match_numpy():
    table = numbers(300, 128)
    ids = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n"), jnp.int32)
    main = aotc.load(aotc.compile(jax.jit(tied(table, False)), ids)).main
    for n in (1, 5, 64):
        given = np.arange(n, dtype=np.int32)
        rows, logits = main(given)
        np.testing.assert_array_equal(rows, table[given])
        assert logits.shape == (n, 300)


def test_results_are_right_if_a_slice_also_reads_the_tied_table():
    table = numbers(300, 128)

    def model(ids, at):
        x = jnp.asarray(table)
        return x[ids], x[ids] @ table.T, jax.lax.dynamic_slice(x, (at, at), (4, 5))

    rows, _, part = aotc.load(aotc.compile(jax.jit(model), IDS, np.int32(2))).invoke("main", IDS, np.int32(2))
    np.testing.assert_array_equal(rows, table[IDS])
    np.testing.assert_array_equal(part, table[2:6, 2:7])


def test_gathers_from_another_table_are_right():
    table, other = numbers(300, 128), numbers(300, 128, seed=5)
    model = lambda ids: (jnp.asarray(other)[ids], jnp.asarray(other)[ids] @ table.T)
    rows, _ = aotc.load(aotc.compile(jax.jit(model), IDS)).invoke("main", IDS)
    np.testing.assert_array_equal(rows, other[IDS])
    assert times_kept(table, model, IDS) == 2


def test_nan_infinity_and_negative_zero_are_gathered_bit_for_bit():
    table = numbers(300, 128)
    table[3, 5], table[17, 0], table[0, 1] = np.nan, -np.inf, -0.0
    rows, _ = aotc.load(aotc.compile(jax.jit(tied(table, False)), IDS)).invoke("main", IDS)
    assert rows.tobytes() == table[IDS].tobytes()


@pytest.mark.parametrize("transposed", [False, True])
def test_the_embedded_source_does_not_repeat_the_table(transposed):
    """Also where JAX made another constant of the transpose."""
    table = numbers(1000, 64)
    model = jax.jit(tied(table, transposed))
    data, bare = (aotc.compile(model, IDS, source=source, cache=False) for source in (True, False))
    assert len(data) - len(bare) < table.nbytes / 10
    assert aotc.upgrade(data) == data
