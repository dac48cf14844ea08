"""Reproducers: one file with a model, options and versions, which ``aotc compile`` takes to do the same again."""

import io
import json
import shlex
from dataclasses import replace
from pathlib import Path
from zipfile import ZipFile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aotc
from aotc import CompileError, InternalError
from aotc.driver import bundle_cache
from aotc.source import reproducer
from aotc.source.restore import restore_source
from aotc.targets import host_target
from aotc.vmfb.bundle import open_bundle

pytestmark = pytest.mark.cpu

MODEL = """func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  %y = stablehlo.sine %x : tensor<4xf32>
  %z = stablehlo.add %y, %y : tensor<4xf32>
  return %z : tensor<4xf32>
}
"""


@pytest.fixture
def call(command, monkeypatch, tmp_path):
    """Run a command in a folder with a model; return its exit code and what it says."""
    (tmp_path / "m.mlir").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bundle_cache, "read_cached_bundle", lambda key: None)
    return command


def broken(*args, **kwargs):
    raise KeyError("planted")


def facts(path):
    with ZipFile(path) as archive:
        return json.loads(archive.read("reproducer.json"))


def changed(path, **files):
    """Write a reproducer again with other contents."""
    with ZipFile(path) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    with ZipFile(path, "w") as archive:
        for name, text in {**held, **{n.replace("_", "."): t for n, t in files.items()}}.items():
            archive.writestr(name, text)


def test_a_requested_reproducer_compiles_to_the_same_bundle(call):
    words = ("--opt-level=0", "--target=cpu:x86-64-v3,cpu:x86-64-v4", "--no-source", "--memory-limit=64MB")
    assert call("compile", "m.mlir", "-o", "a.vmfb", "--reproducer=r.zip", *words)[0] == 0
    held = facts("r.zip")
    assert held["options"]["opt_level"] == 0
    assert held["options"]["target"] == "cpu:x86-64-v3,cpu:x86-64-v4"
    assert held["versions"].keys() >= {"aotc", "python", "jaxlib", "numba", "llvmlite"}
    with ZipFile("r.zip") as archive:
        assert archive.read("model").decode() == MODEL
    Path("m.mlir").unlink()
    assert call("compile", "r.zip", "-o", "b.vmfb")[0] == 0
    assert Path("a.vmfb").read_bytes() == Path("b.vmfb").read_bytes()


@pytest.mark.parametrize("suffix", ["jaxexp", "mlir"])
def test_a_reproducer_preserves_the_source_and_measurements(call, monkeypatch, suffix):
    """The caches of the machine are part of a source: kernels depend on them."""
    own = replace(host_target(), l2=768 << 10)
    monkeypatch.setattr(aotc.targets, "host_target", lambda: own)
    x = np.ones((4, 4), np.float32)
    exported = jax.export.export(jax.jit(lambda x, p: {"y": jnp.sin(x) @ p["w"]}))(x, {"w": x})
    Path("m.jaxexp").write_bytes(exported.serialize())
    assert call("compile", f"m.{suffix}", "-o", "a.vmfb", "--reproducer=r.zip")[0] == 0
    assert facts("r.zip")["targets"] == [{"name": own.name, "l2": own.l2}]
    monkeypatch.setattr(aotc.targets, "host_target", lambda: replace(own, l2=640 << 10))  # another machine
    assert call("compile", "r.zip", "-o", "b.vmfb")[0] == 0
    assert Path("a.vmfb").read_bytes() == Path("b.vmfb").read_bytes()
    source = restore_source(open_bundle("b.vmfb"))
    assert source.targets == (own,)
    assert call("compile", "r.zip", "-o", "c.vmfb", "--target=cpu:x86-64-v2")[0] == 0
    assert [t.name for t in restore_source(open_bundle("c.vmfb")).targets] == ["cpu:x86-64-v2"]


@pytest.mark.parametrize("rows", [[{"name": "cpu:x86-64-v3", "l2": 1}], [{"name": "gpu", "l2": 1 << 20}], [{}], "x"])
def test_damaged_targets_are_refused(call, rows):
    assert call("compile", "m.mlir", "-o", "a.vmfb", "--reproducer=r.zip")[0] == 0
    changed("r.zip", reproducer_json=json.dumps({**facts("r.zip"), "targets": rows}))
    code, said = call("compile", "r.zip", "-o", "b.vmfb")
    assert code == 1
    assert "the reproducer is damaged" in said


def test_command_line_options_override_a_reproducers_options(call):
    assert call("compile", "m.mlir", "-o", "a.vmfb", "--reproducer=r.zip", "-O0")[0] == 0
    for words, kernels in (((), 2), (("-O2",), 1), (("--print-after=cse",), 2)):
        code, said = call("compile", "r.zip", "-o", "b.vmfb", *words)
        assert code == 0
        assert f"{kernels} kernel" in said
    code, said = call("compile", "r.zip", "-o", "-", "--stop-after=inline")
    assert code == 0
    assert " = sin " in said, said


def test_an_internal_error_writes_a_reproducer(monkeypatch, call):
    with monkeypatch.context() as here:
        here.setattr(aotc.lowering.lower, "bufferize", broken)
        code, said = call("compile", "m.mlir", "-o", "a.vmfb", "-O1")
        assert code == 2
        assert "to repeat: aotc compile m.mlir" in said.splitlines()[-1]
        path = next(line for line in said.splitlines() if "in one file" in line).split()[-1]
        with ZipFile(path) as archive:
            assert "planted" in archive.read("traceback.txt").decode()
        Path("m.mlir").unlink()
        code, said = call("compile", path, "-o", "a.vmfb")
        assert (code, "'planted'" in said, facts(path)["options"]["opt_level"]) == (2, True, 1)
        code, said = call("compile", path, "-o", "a.vmfb", "--reproducer=again.zip")
        assert "in one file, for a report: again.zip" in said
    assert call("compile", path, "-o", "a.vmfb")[0] == 0
    assert facts("again.zip")["options"] == facts(path)["options"]


def test_functions_and_several_models_have_reproducers(monkeypatch, call):
    def scaled(x, *, scale):
        return {"y": jnp.sin(x) * scale}

    x = np.ones((2, 3), np.float32)
    want = aotc.compile(scaled, x, kwargs={"scale": x}, source=False)
    with monkeypatch.context() as here:
        here.setattr(aotc.lowering.lower, "bufferize", broken)
        with pytest.raises(InternalError) as caught:
            aotc.compile(jax.jit(scaled), x, kwargs={"scale": x}, source=False)
        with pytest.raises(InternalError) as several:
            aotc.compile({"f": scaled, "g": MODEL}, args={"f": (x,)}, kwargs={"f": {"scale": x}})
    words = shlex.split(str(caught.value).rpartition("to repeat: ")[2])
    assert words[:3] == ["aotc", "compile", caught.value.reproducer]
    assert call(*words[1:4], "a.vmfb")[0] == 0
    assert Path("a.vmfb").read_bytes() == want
    assert call("compile", several.value.reproducer, "-o", "b.vmfb")[0] == 0
    module = aotc.load("b.vmfb")
    np.testing.assert_allclose(module.f(x, scale=x)["y"], np.sin(x), rtol=1e-5)
    assert list(module.functions) == ["f", "g"]


def test_an_internal_error_while_reading_has_no_reproducer(monkeypatch):
    monkeypatch.setattr("aotc.frontend.mlir._is_path", broken)
    with pytest.raises(InternalError) as caught:
        aotc.compile(MODEL)
    assert caught.value.reproducer == ""
    assert "in one file" not in str(caught.value)


def test_unwritable_and_damaged_reproducers_are_errors(call):
    code, said = call("compile", "m.mlir", "-o", "a.vmfb", "--reproducer=nowhere/r.zip")
    assert code == 1
    assert said.startswith("nowhere/r.zip: error: cannot write the reproducer: No such file")
    assert not Path("a.vmfb").exists()
    assert call("compile", "m.mlir", "-o", "a.vmfb", "--reproducer=r.zip")[0] == 0
    known = facts("r.zip")
    for files, part in (
        ({"reproducer_json": "{"}, "the reproducer is damaged: Expecting"),
        ({"reproducer_json": "[]"}, "reproducer is list, expected a map"),
        ({"reproducer_json": json.dumps({"reproducer": 9})}, "it has version 9, expected 1"),
    ):
        changed("r.zip", **files)
        code, said = call("compile", "r.zip", "-o", "a.vmfb")
        assert (code, part in said) == (1, True), said
    for name in ("dump_ir", "reproducer", "weights", "cache", "print_after"):
        changed("r.zip", reproducer_json=json.dumps({**known, "options": {**known["options"], name: "ir"}}))
        assert f"it sets the option '{name}'" in call("compile", "r.zip", "-o", "a.vmfb")[1]
    assert not Path("ir").exists()
    Path("bomb.zip").write_bytes(bomb())
    assert "it is too large" in call("compile", "bomb.zip", "-o", "a.vmfb")[1]
    with ZipFile("other.zip", "w") as archive:
        archive.writestr("weights", "x")
    assert "a zip archive" in call("compile", "other.zip", "-o", "a.vmfb")[1]
    with pytest.raises(CompileError, match="reproducer is 3"):
        aotc.compile(MODEL, reproducer=3)


def bomb():
    """A reproducer whose directory says that its model has 8 GB."""
    held = io.BytesIO()
    with ZipFile(held, "w") as archive:
        archive.writestr("reproducer.json", "{}")
        with archive.open("model", "w") as member:
            member.write(b"")
        archive.getinfo("model").file_size = 8 << 30
    return held.getvalue()


def test_only_zip_archives_are_read_as_reproducers(tmp_path):
    for data in (b"", MODEL.encode(), b"PK\x03\x04 and nothing"):
        (tmp_path / "m").write_bytes(data)
        assert reproducer.read_reproducer(str(tmp_path / "m")) is None
