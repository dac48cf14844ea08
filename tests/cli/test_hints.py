"""Error messages name the file or option at fault, show the value, and suggest the option that works."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny

import aotc
from aotc.vmfb.weights.tensors import read_tensors
from aotc_cli import main
from aotc_cli.commands.compile import _least_processor_lines

pytestmark = pytest.mark.ir

MODEL = "func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {\n return %x : tensor<4xf32>\n}"


@pytest.fixture
def refused(monkeypatch, capsys, tmp_path):
    """Run a command in a folder with a bundle and a model; return its exit code and error message."""
    (tmp_path / "t.vmfb").write_bytes(tiny.bundle())
    (tmp_path / "m.mlir").write_text(MODEL)
    monkeypatch.chdir(tmp_path)

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["aotc", *words])
        with pytest.raises(SystemExit) as end:
            main.main()
        return end.value.code, " ".join(capsys.readouterr().err.split())

    return call


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["compile", "m.mlir", "--target=cpu:x86-64v3", "-o", "a.vmfb"], 1, "try: cpu:x86-64-v3; `aotc targets` lists"),
        (["compile", "m.mlir", "--stop-after=fold-constant", "-o", "-"], 1, "try: fold-constants"),
        (["compile", "m.mlir", "--weights=w.npz", "-o", "a.vmfb"], 1, "try: inline, or a path.safetensors"),
        (["check", "m.mlir", "--target=cpu:aarch64"], 2, "this machine cannot run it"),
        (["profile", "t.vmfb", "--depth=2"], 2, "it needs --by=scope"),
        (["explain", "affinity", "m.mlir", "--picture=a.svg"], 2, "--picture: the model names no device"),
        (["dump", "t.vmfb", "-o", "k.py", "--bytecode"], 2, "it writes kernels only; leave out --bytecode"),
        (["run", "t.vmfb", "--zeros", "--threads=0"], 1, "threads must be an integer from 1 to 1024 found: 0"),
        (["serve", "t.vmfb", "--threads=0"], 1, "threads must be an integer from 1 to 1024 found: 0"),
        (["serve", "missing.vmfb"], 1, "missing.vmfb: error: there is no such file or folder"),
    ],
)  # fmt: skip
def test_wrong_options_have_hints(refused, words, code, message):
    found, said = refused(*words)
    assert message in said
    assert found == code


def test_a_json_file_of_plain_lists_shows_the_form(refused, tmp_path):
    (tmp_path / "x.json").write_text(json.dumps({"x": [[1.0, 2.0]]}))
    code, said = refused("run", "t.vmfb", "--input=@x.json")
    assert code == 1
    assert """'x' has no dtype and data; write {"x": {"dtype": "f32", "shape": [2, 3], "data": [...]}}""" in said


def test_update_weights_names_the_bundle_without_weights(refused, tmp_path):
    np.save(tmp_path / "w.npy", np.ones(3, "f4"))
    code, said = refused("update-weights", "t.vmfb", "w.npy")
    assert code == 1
    assert said.startswith("t.vmfb: error: ")
    assert "safetensors file" not in said


def test_a_file_without_a_header_is_not_a_safetensors_file(tmp_path):
    np.save(tmp_path / "w.npy", np.ones(3, "f4"))
    with pytest.raises(aotc.BundleError, match="its first 8 bytes are not the length of a header"):
        read_tensors(tmp_path / "w.npy")


def dense(params, x):
    return x @ params["w"] + params["b"]


PARAMS = {"w": np.ones((3, 2), "f4"), "b": np.ones(2, "f4")}


def test_binding_the_children_of_a_pytree_suggests_its_name():
    module = aotc.compile(dense, PARAMS, np.ones((1, 3), "f4"), bind=["params"]).load()
    with pytest.raises(aotc.ArgumentError) as error:
        module.bind(PARAMS)
    assert "no argument 'w', 'b' to bind" in str(error.value)
    assert "try: pass the whole pytree by its name: {'params': ...}" in str(error.value)
    assert str(error.value).count("expected:") == 1
    np.testing.assert_array_equal(module.bind({"params": PARAMS})(np.ones((1, 3), "f4")), np.full((1, 2), 4, "f4"))


def test_a_state_without_a_result_shows_the_form():
    with pytest.raises(aotc.CompileError, match=r"try: RESULT=ARGUMENT; results: result; arguments: x"):
        aotc.compile(jnp.tanh, np.ones(3, "f4"), state=["x"])


def test_a_bundle_for_gpus_needs_a_gpu():
    bundle = aotc.compile(MODEL, target="cpu:x86-64-v3,cuda:compute_80")
    gpu = "any NVIDIA GPU from sm_80 on: PTX for its driver"
    (shown,) = (line.split() for line in str(aotc.inspect(bundle)).splitlines() if "NVIDIA" in line)
    assert " ".join(shown) == f"needs {gpu}"
    lines = _least_processor_lines(bundle)
    assert [line.split(":")[0] for line in lines[:2]] == ["runs on cpu", "runs on cuda"]
    assert lines[2:] == ["--portable compiles for other machines too"]
    assert lines[1] == f"runs on cuda:compute_80: {gpu}"
    assert _least_processor_lines(aotc.compile(MODEL, target="cuda:compute_80")) == [lines[1]]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("timeout", "try: aotc.load(..., timeout=1), or module.main.options(deadline=1)(...)"),
        ("donate", "try: module.main.options(donate=...)(...)"),
    ],
)
def test_an_option_among_the_arguments_of_a_call_has_a_hint(name, hint):
    module = aotc.load(tiny.bundle())
    with pytest.raises(aotc.ArgumentError) as error:
        module(np.ones(3, "f4"), **{name: 1})
    assert f"there is no argument {name!r}" in str(error.value)
    assert str(error.value).endswith(hint)


def test_a_call_inside_jit_suggests_a_callback():
    module = aotc.compile(jnp.tanh, np.ones(3, "f4")).load()
    x = np.linspace(0, 1, 3, dtype="f4")
    with pytest.raises(aotc.ArgumentError) as error:
        jax.jit(module)(x)
    assert "(x) is traced by JAX and has no value\n  try: call the module outside jax.jit" in str(error.value)
    shape = jax.ShapeDtypeStruct((3,), "float32")
    got = jax.jit(lambda x: jax.pure_callback(module, shape, x))(x)
    np.testing.assert_allclose(got, np.tanh(x.astype("f8")), rtol=1e-6)
