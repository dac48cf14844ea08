"""Bundles compiled again from the source that they hold: the bytes are those of compiling the model itself."""

import re
import zlib

import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import pytest
from support.small_models import array, attention, int8_dense

import aotc
from aotc.driver import bundle_cache
from aotc.source.restore import restore_source
from aotc.vmfb.bundle import open_bundle, write_bundle

pytestmark = pytest.mark.cpu

HEAD = "module { func.func @main(%x: tensor<16x64xf32>) -> tensor<16x64xf32> {"
X = array(16, 64, seed=9)


@pytest.fixture(autouse=True)
def no_whole_bundles(monkeypatch):
    """Kernels may come from the cache; bundles are to be compiled."""
    monkeypatch.setattr(bundle_cache, "is_cache_usable", lambda options: False)


def residual(x):
    """Convolutions with a way around them, batch norms folded."""
    dims = ("NHWC", "HWIO", "NHWC")
    for n in range(2):
        y = jax.lax.conv_general_dilated(x, array(3, 3, 16, 16, seed=n, scale=0.1), (1, 1), "SAME", (1, 1),
                                         dimension_numbers=dims)  # fmt: skip
        x = jax.nn.relu(x + y * array(16, seed=n) + array(16, seed=n + 5))
    return jnp.mean(x, (1, 2)) @ array(16, 100, seed=7)


def decoder(tokens):
    """An embedding, whose transpose makes the logits, around an attention and a dense layer."""
    table = array(130, 16, seed=4)
    h = attention([array(16, 16, seed=n) for n in range(3)], jnp.asarray(table)[tokens])
    return jax.nn.gelu(h @ array(16, 64, seed=5)) @ array(64, 16, seed=6) @ table.T


def quantized_dense(x):
    w = np.random.default_rng(0).integers(-127, 128, (64, 200)).astype("int8")
    return int8_dense((w, np.abs(array(200, seed=1))), x)


def half(x):
    return x.astype(jnp.bfloat16) @ jnp.asarray(array(64, 96), jnp.bfloat16)


def quantized_text():
    """Quantized types, whose constants are of storage types."""
    data = np.random.default_rng(1).integers(-127, 128, (64, 96)).astype("int8").tobytes().hex().upper()
    q, w = "!quant.uniform<i8:f32, 0.05:-3>", "!quant.uniform<i8<-127:127>:f32, 0.1>"
    return f"""module {{ func.func @main(%x: tensor<16x64xf32>) -> tensor<16x96xf32> {{
      %w = stablehlo.constant() {{value = dense<"0x{data}"> : tensor<64x96xi8>}} : () -> tensor<64x96x{w}>
      %q = stablehlo.uniform_quantize %x : (tensor<16x64xf32>) -> tensor<16x64x{q}>
      %y = stablehlo.dot_general %q, %w, contracting_dims = [1] x [0]
        : (tensor<16x64x{q}>, tensor<64x96x{w}>) -> tensor<16x96x!quant.uniform<i32:f32, 0.005>>
      %r = stablehlo.uniform_dequantize %y : (tensor<16x96x!quant.uniform<i32:f32, 0.005>>) -> tensor<16x96xf32>
      return %r : tensor<16x96xf32> }} }}"""


MODELS = {
    "resnet": (residual, array(1, 12, 12, 16)),
    "gpt2": (decoder, np.arange(12, dtype="i4").reshape(2, 6) * 10),
    "int8": (quantized_dense, X),
    "bf16": (half, X),
    "quantized types": (quantized_text(),),
}


def record_of(data):
    """The record of a bundle's source."""
    opened = open_bundle(data)
    packed = opened.segment(opened.manifest["source"]["segment"])
    return msgpack.unpackb(zlib.decompress(packed), strict_map_key=False)


def changed(data, change, weights=b""):
    """A bundle with another record of its source, all sums right."""
    opened = open_bundle(data)
    record = record_of(data)
    record = change(record) or record
    packed = msgpack.packb(record)
    names = [row["name"] for row in opened.manifest["segments"]]
    segments = [bytes(opened.segment(n)) for n in range(len(names))]
    entry = opened.manifest["source"]
    segments[entry["segment"]] = zlib.compress(packed)
    manifest = {k: v for k, v in opened.manifest.items() if k != "segments"}
    return write_bundle(None, {**manifest, "source": {**entry, "bytes": len(packed)}}, list(zip(names, segments)))


@pytest.mark.parametrize("name", MODELS)
def test_upgrade_gives_the_bytes_of_compiling_the_model(name):
    model = MODELS[name]
    data = aotc.compile(*model)
    assert aotc.upgrade(data) == data
    without = aotc.compile(*model, source=False)
    assert len(data) - len(without) < 0.3 * len(restore_source(open_bundle(data)).code) + 2048
    holes = record_of(data)["holes"]
    assert holes, "a model with weights of 4 KB"
    assert all("array" in hole for hole in holes)


def test_upgrade_works_for_every_form_of_model(tmp_path):
    function, x = MODELS["gpt2"]
    lowered = jax.jit(function).lower(x)
    text = lowered.as_text(debug_info=True)
    path = tmp_path / "model.mlir"
    path.write_text(text)
    exported = jax.export.export(jax.jit(function))(x)
    for model in (text, path, lowered, exported, exported.serialize(), exported.mlir_module_serialized):
        data = aotc.compile(model)
        assert aotc.upgrade(data) == data
        assert restore_source(open_bundle(data)).code.startswith(b"ML\xefR\rStableHLO_v")


@pytest.mark.parametrize(
    "text",
    [
        HEAD + '%y = "stablehlo.add"(%x, %x) {foo.bar = #own.attr} : (tensor<16x64xf32>, tensor<16x64xf32>) -> '
        "tensor<16x64xf32> return %y : tensor<16x64xf32> } }",
        "sdy.mesh @m = <[\"a\"=1]>\nfunc.func @main(%x: tensor<4xf32> {sdy.sharding = #sdy.sharding<@m, [{}]>}) -> "
        "tensor<4xf32> { return %x : tensor<4xf32> }",
        HEAD + "%y = chlo.erf_inv %x : tensor<16x64xf32> -> tensor<16x64xf32> return %y : tensor<16x64xf32> } }",
    ],
)  # fmt: skip
def test_upgrade_works_for_models_without_a_portable_form(text):
    data = aotc.compile(text)
    assert aotc.upgrade(data) == data


def test_upgrade_uses_the_recorded_options_and_targets():
    (b,) = jax.export.symbolic_shape("b")
    batch = jax.ShapeDtypeStruct((b, 64), np.float32)
    targets = "cpu:x86-64-v3,cpu:x86-64-v4"
    data = aotc.compile(quantized_dense, batch, target=targets, opt_level=1, debug_info=False, specialize={"b": (1, 8)})
    assert aotc.upgrade(data, jobs=1) == data
    assert aotc.upgrade(data, opt_level=2) != data
    fewer = aotc.compile(quantized_dense, batch, target="cpu:x86-64-v3", debug_info=False)
    assert aotc.upgrade(data, target="cpu:x86-64-v3", opt_level=2, specialize={}) == fewer
    assert open_bundle(aotc.upgrade(data, source=False)).manifest["source"] is None
    with pytest.raises(aotc.CompileError, match="unknown target"):
        aotc.upgrade(data, target="abacus")


def test_upgrade_works_for_multi_platform_programs():
    exported = jax.export.export(jax.jit(quantized_dense), platforms=("cuda", "cpu"))(X)
    data = aotc.compile(exported)
    assert aotc.upgrade(data) == data
    np.testing.assert_array_equal(aotc.load(aotc.upgrade(data))(X), aotc.load(data)(X))


def test_upgrade_preserves_names_and_pytrees():
    data = aotc.compile(lambda w, *, scale: {"y": w["a"] * scale, "z": [w["b"]]}, {"a": X, "b": X},
                        kwargs={"scale": np.float32(2)})  # fmt: skip
    again = aotc.upgrade(data)
    assert again == data
    assert open_bundle(again).manifest["functions"] == open_bundle(data).manifest["functions"]


def test_folded_weights_are_stored_in_the_source():
    """What folding used up: noise lies beside the source, a mask within it."""
    noise, mask = array(64, 64), np.tri(64, dtype="f")
    model = lambda x: x @ jnp.asarray(np.float32(1) + jax.lax.tanh(noise) * mask)
    data = aotc.compile(jax.jit(model).lower(X).as_text())
    opened = open_bundle(data)
    kept = [hole for hole in record_of(data)["holes"] if "kept" in hole]
    assert [hole["size"] for hole in kept] == [noise.nbytes]
    assert opened.segment(opened.manifest["source"]["weights"]).nbytes == noise.nbytes
    assert mask.tobytes() in restore_source(opened).code
    assert aotc.upgrade(data) == data


TABLES = {
    "arange": lambda n: np.arange(n, dtype="f4"),
    "backwards": lambda n: np.arange(n, dtype="i4")[::-1].copy(),
    "wide": lambda n: np.arange(n, dtype="i8") * 12345678901,
    "halves": lambda n: (np.arange(n) % 2048).astype("f2"),
    "linspace": lambda n: np.linspace(-1, 1, n),
    "grid": lambda n: np.add.outer(np.arange(n // 50) * 50.0, np.arange(50)),
}


@pytest.mark.parametrize("name", TABLES)
def test_regular_tables_are_stored_as_differences(name):
    with jax.enable_x64(True):
        table = TABLES[name](20000)
        model = jax.jit(lambda i: jnp.asarray(table).at[i].set(1)), np.int32(3)
        data = aotc.compile(*model)
        (hole,) = record_of(data)["holes"]
        if "array" not in hole:  # the bundle computes it
            assert hole["word"] == table.itemsize
            assert len(hole["differences"]) < 0.3 * table.nbytes
        assert table.tobytes() in restore_source(open_bundle(data)).code
        assert aotc.upgrade(data) == data


def test_noise_is_not_stored_as_differences():
    noise = np.random.default_rng(0).standard_normal(20000).astype("f4")
    data = aotc.compile(jax.jit(lambda x: x @ jnp.asarray(noise[:4096].reshape(64, 64) ** 3)), X)
    assert not any("differences" in hole for hole in record_of(data)["holes"])


def as_differences(record, change):
    """Replace the first hole of a record by 1,024 words of differences, changed."""
    packed = zlib.compress(np.ones(1024, "u4").tobytes())
    keys = {k: record["holes"][0][k] for k in ("at", "sha256")}
    record["holes"][0] = {**keys, "size": 4096, "differences": packed, "word": 4} | change


WRONG_DIFFERENCES = {
    "sum": {}, "word": {"word": 3}, "no word": {"word": 0}, "size": {"size": 4092}, "odd size": {"size": 4095},
    "bomb": {"size": 1 << 40}, "cut": {"differences": zlib.compress(bytes(4096))[:-3]}, "text": {"differences": b"x"},
    "negative": {"size": -4}, "more": {"differences": zlib.compress(bytes(1 << 20))},
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_DIFFERENCES)
def test_damaged_differences_are_refused(name):
    broken = changed(aotc.compile(*MODELS["int8"]), lambda r: as_differences(r, WRONG_DIFFERENCES[name]))
    with pytest.raises(aotc.BundleError, match="the source"):
        aotc.upgrade(broken)


def test_upgrade_reads_external_weights(tmp_path):
    path, again = tmp_path / "w.safetensors", tmp_path / "new" / "w.safetensors"
    again.parent.mkdir()
    data = aotc.compile(*MODELS["resnet"], weights=str(path))
    bundle = tmp_path / "net.vmfb"
    bundle.write_bytes(data)
    with pytest.raises(aotc.BundleError, match="where its new weights go"):
        aotc.upgrade(bundle)
    assert aotc.upgrade(bundle, weights=again) == data
    assert again.read_bytes() == path.read_bytes()
    assert aotc.upgrade(bundle, weights="inline") == aotc.compile(*MODELS["resnet"])
    held = bytearray(path.read_bytes())
    held[-70] ^= 1
    path.write_bytes(held)
    with pytest.raises(aotc.BundleError, match="of the source is not the one that was compiled"):
        aotc.upgrade(bundle, weights="inline")
    path.unlink()
    with pytest.raises(aotc.BundleError, match=r"w\.safetensors"):
        aotc.upgrade(bundle, weights="inline")


def test_upgrade_removes_the_signature(tmp_path):
    pytest.importorskip("cryptography")
    from aotc.tools.sign import new_key, sign_bundle

    path = tmp_path / "net.vmfb"
    data = aotc.compile(*MODELS["int8"])
    path.write_bytes(data)
    new_key(str(tmp_path / "key"))
    sign_bundle(str(path), str(tmp_path / "key"))
    with pytest.warns(UserWarning, match="the new one is not; sign it with aotc sign"):
        assert aotc.upgrade(path) == data


def test_upgrade_without_a_source_is_an_error():
    with pytest.raises(aotc.BundleError, match="--no-source"):
        aotc.upgrade(aotc.compile(*MODELS["int8"], source=False))


def test_load_does_not_read_the_source():
    data = aotc.compile(*MODELS["int8"])
    opened = open_bundle(data)
    row = opened.manifest["segments"][opened.manifest["source"]["segment"]]
    damaged = bytearray(data)
    damaged[opened._start + row["offset"] + 20] ^= 1
    aotc.load(bytes(damaged))(X)
    for look in (lambda: aotc.load(bytes(damaged), verify=True), lambda: aotc.upgrade(bytes(damaged))):
        with pytest.raises(aotc.BundleError, match=r"\(source\) is damaged"):
            look()


CHANGES = {
    "sum": lambda r: r["holes"][0].update(sha256=bytes(32)),
    "place": lambda r: r["holes"][0]["array"].update(offset=64),
    "beyond": lambda r: r["holes"][0]["array"].update(offset=1 << 40),
    "variant": lambda r: r["holes"][0]["array"].update(variant=7),
    "dtype": lambda r: r["holes"][0]["array"].update(dtype="q7"),
    "shape": lambda r: r["holes"][0]["array"].update(shape=[1 << 62, 4]),
    "way": lambda r: r["holes"][0]["array"].update(way=[["eval", "x"]]),
    "axes": lambda r: r["holes"][0]["array"].update(way=[["transpose", [5, "x"]]]),
    "hole": lambda r: r["holes"][0].update(at=1 << 50),
    "kept": lambda r: r["holes"].__setitem__(0, {**r["holes"][0], "kept": 0, "array": None}),
    "code": lambda r: r.update(code=r["code"][:200]),
    "garbage": lambda r: r.update(code=b"ML\xefR" + bytes(500), holes=[]),
    "metadata": lambda r: r["metadata"].update(kept="none"),
    "names": lambda r: r["metadata"].update(arg_names=[]),
    "target": lambda r: r.update(targets=[{"name": "abacus", "l2": 1 << 20}]),
    "no target": lambda r: r.update(targets=[]),
    "cache": lambda r: r["targets"][0].update(l2=0),
    "option": lambda r: r["options"].update(opt_level=9),
    "unknown option": lambda r: r["options"].update(magic=1),
    "version": lambda r: r.update(version=2),
    "list": lambda r: [r],
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_damaged_source_with_valid_digests_is_refused(name):
    broken = changed(aotc.compile(*MODELS["int8"]), CHANGES[name])
    aotc.load(broken)
    with pytest.raises(aotc.BundleError):
        aotc.upgrade(broken)


def test_a_source_that_does_not_decompress_is_refused():
    data = aotc.compile(*MODELS["int8"])
    opened = open_bundle(data)
    rows, entry = opened.manifest["segments"], opened.manifest["source"]
    manifest = {k: v for k, v in opened.manifest.items() if k != "segments"}
    segments = [(row["name"], bytes(opened.segment(n))) for n, row in enumerate(rows)]
    packed = segments[entry["segment"]][1]
    bomb = zlib.compress(bytes(1 << 20))
    for content, size in ((packed[:-9], entry["bytes"]), (bomb, entry["bytes"]), (packed, 1 << 40), (b"", 0)):
        segments[entry["segment"]] = ("source", content)
        broken = write_bundle(None, {**manifest, "source": {**entry, "bytes": size}}, segments)
        with pytest.raises(aotc.BundleError, match="the source of the bundle is damaged"):
            aotc.upgrade(broken)


def test_upgrade_command_writes_a_new_file(tmp_path, capsys, monkeypatch):
    import sys

    from aotc_cli import main as cli

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["aotc", *map(str, args)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        text = capsys.readouterr()
        return stopped.value.code or 0, text.out, text.err

    model, path, new = tmp_path / "m.mlir", tmp_path / "m.vmfb", tmp_path / "n.vmfb"
    model.write_text(quantized_text())
    assert run("compile", model, "-o", path, "-q")[0] == 0
    data = path.read_bytes()
    assert re.search(r"source +[\d.]+ k?B", run("inspect", path)[1])
    code, text, _ = run("dump", path, "--source")
    assert code == 0
    assert "stablehlo.dot_general" in text
    assert len(text) < 3000
    assert run("upgrade", path, "-o", new)[0] == 0
    assert new.read_bytes() == data
    assert run("upgrade", path)[0] == 0
    assert path.read_bytes() == data
    assert run("compile", model, "-o", path, "--no-source", "--weights", tmp_path / "w.safetensors")[0] == 0
    assert re.search(r"source +none", run("inspect", path)[1])
    code, _, error = run("upgrade", path, "-o", new)
    assert code == 1
    assert "would replace this file" in error
    assert "--no-source" in run("upgrade", path)[2]
