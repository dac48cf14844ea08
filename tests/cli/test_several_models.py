"""``aotc compile`` and ``aotc lint`` of several models with names: one bundle, errors with the file they are of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import aotc
from aotc.tools.lint import lint
from aotc.vmfb.bundle import open_bundle

pytestmark = pytest.mark.cpu

W = np.random.default_rng(0).standard_normal((128, 128)).astype("float32") / 11
ONE = "func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {{\n  %y = {}\n  return %y : tensor<4xf32>\n}}\n"
SINE, COSINE = (ONE.format(f"stablehlo.{name} %x : tensor<4xf32>") for name in ("sine", "cosine"))
UNKNOWN = ONE.format("stablehlo.custom_call @nobody(%x) : (tensor<4xf32>) -> tensor<4xf32>")
UNREADABLE = ONE.format("stablehlo.sine %z : tensor<4xf32>")


@pytest.fixture
def call(command, monkeypatch, tmp_path):
    """Run a command in a folder with models; return its exit code and what it says."""
    for name, text in {"a": SINE, "b": COSINE, "unknown": UNKNOWN, "unreadable": UNREADABLE}.items():
        (tmp_path / f"{name}.mlir").write_text(text)
    (tmp_path / "two.mlir").write_text(SINE.replace("@main", "@f") + COSINE.replace("@main", "@g"))
    monkeypatch.chdir(tmp_path)
    return command


def test_models_of_one_bundle_share_weights_and_kernels(call, tmp_path):
    def layer(x):
        return jnp.tanh(x @ W)

    spec = jax.ShapeDtypeStruct((8, 128), np.float32)
    (tmp_path / "a.jax").write_bytes(export.export(jax.jit(layer))(spec).serialize())
    (tmp_path / "b.jax").write_bytes(export.export(jax.jit(lambda rows: layer(rows)))(spec).serialize())
    code, said = call("compile", "prefill=a.jax", "decode=b.jax", "-o", "both.vmfb", "--no-source")
    assert (code, "1 kernel," in said) == (0, True), said
    assert call("compile", "a.jax", "-o", "alone.vmfb", "--no-source")[0] == 0
    sizes = [
        {s["name"].rpartition("/")[2]: s["size"] for s in open_bundle(f"{name}.vmfb").manifest["segments"]}["constants"]
        for name in ("both", "alone")
    ]
    assert sizes[0] == sizes[1] >= W.nbytes
    module = aotc.load("both.vmfb")
    assert list(module.functions) == ["prefill", "decode"]
    x = np.random.default_rng(1).standard_normal((8, 128)).astype("float32")
    for found in (module.prefill(x=x), module.decode(rows=x)):
        np.testing.assert_allclose(found, layer(x), rtol=1e-5, atol=1e-5)


def test_a_single_model_may_have_a_name(call):
    assert call("compile", "wave=a.mlir", "-o", "m.vmfb")[0] == 0
    x = np.ones(4, np.float32)
    np.testing.assert_allclose(aotc.load("m.vmfb").wave(x), np.sin(x), rtol=1e-6)
    assert call("run", "m.vmfb", "--input=4xf32=0")[1].endswith("4xf32=0 0 0 0\n")


def test_lint_names_the_file_of_each_finding(call):
    code, said = call("lint", "wave=a.mlir", "other=unknown.mlir")
    assert code == 1
    assert "a.mlir:2" in said
    assert "unknown.mlir:2:8: refused: custom call @nobody has no registered function" in said
    (report,) = lint({"f": SINE, "g": lambda x: x + 1}, args={"g": (np.ones(3, np.float32),)})
    assert report.compiles
    assert report.rows[0].loc.path == "<f>"


def test_stop_after_prints_the_ir_of_several_models(call):
    code, said = call("compile", "wave=a.mlir", "other=b.mlir", "-o", "-", "--stop-after=inline")
    assert code == 0
    assert " = sin " in said, said
    assert "@wave" in said
    assert "@other" in said


@pytest.mark.parametrize("broken", ["unknown", "unreadable"])
def test_errors_of_several_models_have_file_line_and_text(call, broken):
    code, said = call("compile", "wave=a.mlir", f"other={broken}.mlir", "-o", "m.vmfb")
    assert code == 1
    assert said.startswith(f"{broken}.mlir:2:"), said
    assert "\n    %y = " in said
    texts = {"wave": SINE, "other": UNKNOWN if broken == "unknown" else UNREADABLE}
    with pytest.raises(aotc.CompileError, match=r"^<other>:2:\d+: error: (.|\n)*\n    %y = "):
        aotc.compile(texts)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("f=a.mlir", "f=b.mlir"), "function f is given twice, as a.mlir and as b.mlir"),
        (("f=a.mlir", "b.mlir"), "'b.mlir' has no name: several models are NAME=MODEL each"),
        (("f-g=a.mlir",), "'f-g' is not a function name"),
        (("f=",), "'f' has no model"),
        (("f=-", "g=-"), "stdin (-) is one model"),
        (("f=nothing.mlir",), "nothing.mlir: error: cannot read the model: No such file"),
        (("=a.mlir",), "=a.mlir: error: cannot read the model"),
        (("f=two.mlir",), "model 'f' must have one public function to be joined with others; found f, g"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_invalid_model_arguments_are_refused(call, words, part):
    code, said = call("compile", *words, "-o", "m.vmfb")
    assert code in (1, 2)
    assert part in " ".join(said.split())


def test_paths_with_an_equals_sign_are_accepted(call, tmp_path):
    (tmp_path / "x=y.mlir").write_text(COSINE)
    (tmp_path / "lr=0.1").mkdir()
    (tmp_path / "lr=0.1" / "m.mlir").write_text(COSINE)
    one = np.ones(4, np.float32)
    for words, name in (
        (("x=y.mlir",), "main"), (("./x=y.mlir",), "main"), (("lr=0.1/m.mlir",), "main"),
        (("f=x=y.mlir", "g=lr=0.1/m.mlir"), "f"),
    ):  # fmt: skip
        assert call("compile", *words, "-o", "m.vmfb")[0] == 0
        np.testing.assert_allclose(aotc.load("m.vmfb").invoke(name, one)[0], np.cos(one), rtol=1e-6)
    (tmp_path / "y.mlir").write_text(SINE)
    code, said = call("compile", "x=y.mlir", "-o", "m.vmfb")
    assert code == 2
    assert "'x=y.mlir' is a file, and so is 'y.mlir': ./x=y.mlir is the first, x=./y.mlir the second" in said
    assert call("compile", "x=./y.mlir", "-o", "m.vmfb")[0] == 0
    assert list(aotc.load("m.vmfb").functions) == ["x"]
