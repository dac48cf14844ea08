"""Constant matrices as integers of few bits, beside float64 and a quantiser of the test's own."""

from collections import Counter

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from typer.testing import CliRunner

import aotc
from aotc.diagnostics import CompileError
from aotc.frontend.importer import import_model
from aotc.ir.semantics.run import interpret
from aotc.ir.tensor.ir import walk
from aotc.lowering.lower import lower
from aotc.options import Options, weight_quantization
from aotc.pipeline import run_passes
from aotc.recompile import upgrade
from aotc.targets import resolve_targets
from aotc.vmfb.dtypes import to_numpy
from aotc_cli.main import app

WAYS = ("int8", "int8:64", "int4", "int4:64", "int4:24")
DTYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
# Of the largest result: what f32, or rounding the result to the model's type, makes of sums of some hundred terms.
MOST = {"f32": 2e-6, "bf16": 8e-3, "f16": 1e-3}


def rounded(w, way):
    """Return what weights (..., K, N) become, run by run, as f64."""
    bits, terms = weight_quantization(Options(quantize_weights=way))
    w = np.asarray(w).astype(np.float32)
    most, found = 2 ** (bits - 1) - 1, np.zeros(w.shape)
    for first in range(0, w.shape[-2], terms or w.shape[-2]):
        part = w[..., first : first + (terms or w.shape[-2]), :]
        scale = np.abs(part).max(axis=-2, keepdims=True) / np.float32(most)
        whole = np.round(part / np.where(scale == 0, 1, scale))
        found[..., first : first + part.shape[-2], :] = np.clip(whole, -most, most).astype(np.float64) * scale
    return found


def numbers(*shape, dtype="f32", seed=0):
    return (np.random.default_rng(seed).standard_normal(shape) / 8).astype(DTYPES[dtype])


def compiled(function, *args, **flags):
    return aotc.load(aotc.compile(jax.jit(function), *args, verify_each=True, **flags))


def close(found, want, dtype="f32"):
    assert found.shape == want.shape
    assert np.abs(found.astype("f8") - want).max() <= MOST[dtype] * max(np.abs(want).max(), 1e-30)


@pytest.mark.parametrize("rows", [1, 3, 9, 50, 400])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS)
def test_quantized_matmuls_match_matmuls_of_rounded_weights(way, dtype, rows):
    """Sizes that nothing divides; what many rows of bf16 are widened to has 8 bits."""
    w, x = numbers(517, 203, dtype=dtype), numbers(rows, 517, dtype=dtype, seed=1)
    found = compiled(lambda x: x @ w, x, quantize_weights=way).invoke("main", x)[0]
    assert found.dtype == x.dtype
    close(found, x.astype("f8") @ rounded(w, way), dtype)


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("way", ["int8", "int4:64"])
def test_quantized_layers_with_epilogues_match_at_every_level(way, level):
    w, v, x = numbers(256, 300), numbers(300, 130, seed=2), numbers(4, 256, seed=1)
    bias = numbers(300, seed=3)

    def model(x):
        return jnp.tanh(jax.nn.relu(x @ w + bias) @ v)

    found = compiled(model, x, quantize_weights=way, opt_level=level).invoke("main", x)[0]
    inner = np.maximum(x.astype("f8") @ rounded(w, way) + bias, 0)
    close(found, np.tanh(inner @ rounded(v, way)))


FORMS = {
    "turned": (lambda w: lambda x: x @ w.T, (150, 256), (3, 256), lambda x, w, r: x @ r(w.T)),
    "on the left": (lambda w: lambda x: w @ x, (150, 256), (256, 5), lambda x, w, r: r(w.T).T @ x),
    "a column": (lambda w: lambda x: w @ x, (150, 256), (256,), lambda x, w, r: r(w.T).T @ x),
    "a batch": (lambda w: lambda x: x @ w, (3, 128, 90), (3, 2, 128), lambda x, w, r: x @ r(w)),
    "of three dims": (
        lambda w: lambda x: jnp.einsum("bh,hnd->bnd", x, w), (128, 4, 60), (3, 128),
        lambda x, w, r: (x @ r(w.reshape(128, 240))).reshape(3, 4, 60),
    ),
    "the left operand by columns": (lambda w: lambda x: x.T @ w, (256, 150), (256, 7), lambda x, w, r: x.T @ r(w)),
}  # fmt: skip


@pytest.mark.parametrize("way", ["int8", "int4:64"])
@pytest.mark.parametrize("name", FORMS)
def test_weights_on_either_side_and_transposed_are_quantized(name, way):
    make, shape, given, want = FORMS[name]
    w, x = numbers(*shape), numbers(*given, seed=1)
    found = compiled(make(w), x, quantize_weights=way).invoke("main", x)[0]
    close(found, want(x.astype("f8"), w, lambda w: rounded(w, way)))


def tied(table, transposed):
    """Return a model that gathers rows of a table and multiplies with it."""

    def model(ids):
        x = jnp.asarray(table)[ids]
        return x, x @ table.T if transposed else jnp.einsum("...d,vd->...v", x, table)

    return model


def stored_bytes(model, *args, **options):
    """Return the bytes of constants of several elements, by dtype."""
    (target,) = resolve_targets("cpu:x86-64-v4")
    chosen = Options(target=target.name, **options)
    found = {}
    for _, array, _ in lower(run_passes(import_model(model, *args), chosen), target, chosen).constants.arrays:
        found[array.dtype.name] = found.get(array.dtype.name, 0) + array.nbytes
    return found


@pytest.mark.parametrize("way", ["int8", "int4", "int8:40", "int4:40"])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_table_with_gathers_and_a_matmul_is_stored_once(way, dtype, transposed):
    """One packed copy serves both: rows are rounded as the product's columns."""
    table, ids = numbers(300, 130).astype(to_numpy(dtype)), np.array([[3, 299], [0, 17]], np.int32)
    model = tied(table, transposed)
    rows, logits = compiled(model, ids, quantize_weights=way).invoke("main", ids)
    of_table = rounded(table.T.astype("f4"), way).T
    np.testing.assert_allclose(rows.astype("f8"), of_table[ids].astype(table.dtype).astype("f8"), rtol=1e-6)
    close(logits, rows.astype("f8") @ rounded(table.T.astype("f4"), way), dtype)
    found = stored_bytes(model, ids, quantize_weights=way)
    assert found.get(table.dtype.name, 0) < 1000
    assert found["uint8"] < table.size * 1.5


def test_gathers_beyond_a_quantized_table_are_clamped():
    """The first or the last, as without rounding."""
    table = numbers(300, 128)

    def model(ids):
        dims = jax.lax.GatherDimensionNumbers((1,), (0,), (0,))
        x = jax.lax.gather(jnp.asarray(table), ids[:, None], dims, (1, 128), mode="promise_in_bounds")
        return x, x @ table.T

    for dtype in (np.int32, np.int16, np.int8, np.uint8, np.uint32):
        info = np.iinfo(dtype)
        ids = np.array([info.min, 0, 5, min(299, info.max), info.max], dtype)
        rows, _ = compiled(model, ids, quantize_weights="int8").invoke("main", ids)
        np.testing.assert_allclose(rows, rounded(table.T, "int8").T[np.clip(ids.astype("i8"), 0, 299)], rtol=1e-6)


def test_a_table_with_other_readers_is_also_stored_unquantized():
    table, ids = numbers(300, 128), np.array([3, 299], np.int32)

    def model(ids, at):
        x = jnp.asarray(table)
        return x[ids], x[ids] @ table.T, jax.lax.dynamic_slice(x, (at, at), (4, 5))

    rows, _, part = compiled(model, ids, np.int32(2), quantize_weights="int8").invoke("main", ids, np.int32(2))
    np.testing.assert_array_equal(rows, table[ids])
    np.testing.assert_array_equal(part, table[2:6, 2:7])


def test_gathers_from_another_table_are_not_quantized():
    table, other, ids = numbers(300, 128), numbers(300, 128, seed=5), np.array([3, 299], np.int32)
    model = lambda ids: (jnp.asarray(other)[ids], jnp.asarray(other)[ids] @ table.T)
    rows, _ = compiled(model, ids, quantize_weights="int8").invoke("main", ids)
    np.testing.assert_array_equal(rows, other[ids])


def test_a_matrix_of_two_matmuls_is_stored_once():
    w, x = numbers(512, 512), numbers(1, 512, seed=1)
    (target,) = resolve_targets("cpu:x86-64-v4")
    options = Options(target=target.name, quantize_weights="int8")
    module = run_passes(import_model(lambda x: jnp.sin(x @ w) @ w, x), options)
    stored = lower(module, target, options).constants.arrays
    assert sum(array.nbytes for _, array, _ in stored if array.dtype == np.uint8) == 512 * 516


@pytest.mark.parametrize("way", ["int8", "int4:64"])
def test_quantized_matmuls_of_symbolic_sizes_match_rounded_weights(way):
    (b,) = jax.export.symbolic_shape("b")
    w = numbers(256, 150)
    module = compiled(lambda x: x @ w, jax.ShapeDtypeStruct((b, 256), "float32"), quantize_weights=way)
    for rows in (1, 5, 33):
        x = numbers(rows, 256, seed=1)
        found, want = module.invoke("main", x)[0], x.astype("f8") @ rounded(w, way)
        assert found.shape == want.shape
        np.testing.assert_allclose(found, want, atol=1e-5)


def test_weights_read_in_a_loop_are_quantized():
    w, x = numbers(256, 256), numbers(1, 256, seed=1)
    loop = lambda x: jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ w), x)
    want = x.astype("f8")
    for _ in range(3):
        want = np.tanh(want @ rounded(w, "int4:32"))
    close(compiled(loop, x, quantize_weights="int4:32").invoke("main", x)[0], want)


def names(function, *args, **flags):
    module = run_passes(import_model(function, *args), Options(**flags))
    return [op for f in module.functions.values() for op in walk(f.body)]


INFINITE = numbers(256, 150)
INFINITE[3, 4] = np.inf
ALONE = {
    "small": (lambda x: x @ numbers(64, 64), (2, 64)),
    "empty": (lambda x: x @ np.zeros((64, 0), np.float32), (2, 64)),
    "no terms": (lambda x: x @ np.zeros((0, 64), np.float32), (2, 0)),
    "one number": (lambda x: x @ jnp.full((256, 256), 0.5), (2, 256)),
    "infinite": (lambda x: x @ INFINITE, (2, 256)),
    "no constant": (lambda x: x @ x.T, (256, 256)),
    "a vector": (lambda x: x @ np.arange(1 << 15, dtype=np.float32), (2, 1 << 15)),
    "no product": (lambda x: x * numbers(256, 256), (256, 256)),
}


@pytest.mark.parametrize("name", ALONE)
def test_other_matmuls_keep_their_weights_and_bits(name):
    function, shape = ALONE[name]
    x = numbers(*shape, seed=1)
    assert not any("bits" in op.attrs for op in names(function, x, quantize_weights="int8", target="cpu:x86-64-v4"))
    pair = [compiled(function, x, quantize_weights=way).invoke("main", x)[0] for way in ("none", "int8")]
    np.testing.assert_array_equal(*pair)


def test_f64_matmuls_are_not_quantized():
    with jax.enable_x64(True):
        w = np.random.default_rng(0).standard_normal((256, 150))
        assert not any("bits" in op.attrs for op in names(lambda x: x @ w, np.zeros((2, 256)), quantize_weights="int8"))


def test_inputs_with_infinities_and_nan_propagate():
    w, x = numbers(256, 150), numbers(5, 256, seed=1)
    x[1, 3], x[2, 4], x[3, 5:7] = np.inf, np.nan, (np.inf, -np.inf)
    found = compiled(lambda x: x @ w, x, quantize_weights="int8").invoke("main", x)[0]
    with np.errstate(invalid="ignore"):
        want = x.astype("f8") @ rounded(w, "int8")
    assert np.array_equal(np.isnan(found), np.isnan(want))
    assert np.array_equal(found[np.isinf(want)], want[np.isinf(want)].astype("f4"))
    close(found[[0, 4]], want[[0, 4]])


@pytest.mark.parametrize("way", ["int8", "int4:64", "int4:24", "int8:40"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(("rows", "transposed"), [(1, True), (1, False), (64, True)])
def test_gpus_dequantize_integer_weights_in_the_matmul(rows, transposed, dtype, way):
    """The ops after all passes compute it, and read integers: of one row in the kernel that adds products up."""
    w, x = numbers(*((150, 257) if transposed else (257, 150)), dtype=dtype), numbers(rows, 257, dtype=dtype, seed=1)
    model = lambda x: x @ (w.T if transposed else w)
    (target,) = resolve_targets("cuda:sm_90")
    options = Options(target=target.name, quantize_weights=way, verify_each=True)
    module = run_passes(import_model(model, x), options)
    found = interpret(module, x)[0]
    most = {"f32": 1e-5, "bf16": 1e-2}[dtype]
    want = x.astype("f8") @ rounded(w.T if transposed else w, way)
    np.testing.assert_allclose(found.astype("f8"), want, rtol=most, atol=most * np.abs(want).max())
    variant = lower(module, target, options)
    held = Counter()
    for _, array, _ in variant.constants.arrays:
        held[str(array.dtype)] += array.nbytes
    assert held.most_common(1)[0][0] == "int8"
    assert "bfloat16" not in held
    assert rows > 1 or len(variant.kernels) == 1


def test_each_target_of_a_bundle_has_quantized_weights():
    w, x = numbers(256, 150), numbers(2, 256, seed=1)
    data = aotc.compile(jax.jit(lambda x: x @ w), x, target="cpu,cpu:x86-64-v2,cuda:sm_90", quantize_weights="int8")
    close(aotc.load(data).invoke("main", x)[0], x.astype("f8") @ rounded(w, "int8"))


def test_weights_for_many_bf16_rows_are_widened_first():
    """By pairs on a processor that multiplies them; tiles widen the rest, of one row to f32."""
    w = numbers(256, 192, dtype="bf16")
    counts, left = {}, {}
    for rows in (1, 64, 500):
        x = numbers(rows, 256, dtype="bf16", seed=1)
        found = names(lambda x: x @ w, x, quantize_weights="int8", target="cpu:x86-64-v4-bf16")
        counts[rows] = Counter(op.attrs.get("bits", 0) for op in found if op.name == "packed_matmul")
        left[rows] = {op.operands[0].type.dtype for op in found if op.name == "packed_matmul"}
    assert counts == {1: {8: 1}, 64: {8: 1}, 500: {0: 1}}
    assert left == {1: {"f32"}, 64: {"bf16"}, 500: {"bf16"}}


@pytest.mark.parametrize("text", ["int2", "int8:", "int4:12", "int4:0", "int4:x", "int8:8:8", ""])
def test_unknown_quantizations_are_refused(text):
    with pytest.raises(CompileError, match="quantize_weights is") as refused:
        aotc.compile(jnp.sin, np.float32(1), quantize_weights=text)
    assert "none, int8 or int4" in str(refused.value)


def test_upgrade_quantizes_the_original_weights():
    w, x = numbers(256, 150), numbers(2, 256, seed=1)
    model = jax.jit(lambda x: x @ w)
    data = aotc.compile(model, x, quantize_weights="int4:64")
    assert bytes(upgrade(data)) == data
    plain = aotc.load(upgrade(data, quantize_weights="none")).invoke("main", x)[0]
    np.testing.assert_allclose(plain, x @ w, rtol=1e-5, atol=1e-5)
    assert len(aotc.compile(model, x, quantize_weights="int4:64", source=False)) < len(data) - w.nbytes


def test_quantized_weights_in_an_external_file_match(tmp_path):
    w, x = numbers(256, 150), numbers(2, 256, seed=1)
    file = tmp_path / "w.safetensors"
    data = aotc.compile(jax.jit(lambda x: x @ w), x, quantize_weights="int8", weights=str(file), source=False)
    (tmp_path / "m.vmfb").write_bytes(data)
    assert file.stat().st_size < w.nbytes // 2
    close(aotc.load(tmp_path / "m.vmfb").invoke("main", x)[0], x.astype("f8") @ rounded(w, "int8"))


def test_the_bundle_cache_key_includes_quantize_weights(tmp_path, monkeypatch):
    monkeypatch.setattr("aotc.pipeline.WORTH_SECONDS", 0.0)
    w, x = numbers(256, 150), numbers(2, 256, seed=1)
    model = jax.jit(lambda x: x @ w)
    made = [aotc.compile(model, x, quantize_weights=way) for way in ("none", "int8", "int4", "int8")]
    assert made[1] == made[3]
    assert len(set(made)) == 3


def _nothing(options, *weights):
    with pytest.warns(aotc.AotcWarning, match="quantize_weights=") as caught:
        aotc.compile(lambda x: [x @ w for w in weights], np.ones((2, len(weights[0])), weights[0].dtype), **options)
    (text,) = {str(warning.message) for warning in caught}
    return text


def test_a_model_without_quantized_matrices_warns_with_the_reasons():
    small, large = np.eye(256, 8, dtype="f4"), np.eye(256, dtype="f4")
    large[0, 0] = np.nan
    found = _nothing({"quantize_weights": "int8"}, small, large, 2 * small)
    reasons = "2 of at most 64 KiB, 1 with infinity or NaN"
    assert found == f"quantize_weights='int8': quantized 0 of 3 matrices; left as they are: {reasons}"
    narrow = np.eye(20480, 1, dtype="f4")
    assert "1 that would shrink by less than 25 %" in _nothing({"quantize_weights": "int8"}, narrow)


def test_a_model_whose_weights_are_bound_warns_that_they_are_not_quantized():
    w = np.ones((256, 256), "f4")
    with pytest.warns(aotc.AotcWarning, match="no matmul of f32, bf16 or f16 has a constant operand; weights of bind="):
        aotc.compile(lambda w, x: x @ w, w, np.ones((2, 256), "f4"), bind=["w"], quantize_weights="int8")


def test_the_summary_names_the_weights_that_the_source_keeps(tmp_path):
    w = np.random.default_rng(0).standard_normal((1024, 512)).astype("f4")
    exported = jax.export.export(jax.jit(lambda x: x @ w))(np.ones((1, 1024), "f4"))
    (tmp_path / "m.jaxexp").write_bytes(exported.serialize())
    words = ["compile", str(tmp_path / "m.jaxexp"), "-o", str(tmp_path / "m.vmfb")]
    text = "2.1 MB of it are the model's own weights, for `aotc upgrade`; --no-source leaves them out"
    int8 = "--quantize-weights=int8"
    for options, expected in (([int8], True), ([int8, "--no-source"], False), ([], False)):
        done = CliRunner().invoke(app, [*words, *options])
        assert done.exit_code == 0, done.output
        assert (text in done.output) == expected, done.output
