"""Facts about a model in its bundle; ranges of sizes to compile code for."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import aotc
from aotc.options import sizes_of_range
from aotc.vmfb.bundle import open_bundle
from aotc_cli.main import app
from aotc_cli.shared.compile_options import parse_about, parse_specialized

pytestmark = pytest.mark.cpu
X = np.ones((4, 3), np.float32)
ABOUT = {"license": "MIT", "source": "https://example.org/m"}


def run(*words):
    return CliRunner().invoke(app, [*map(str, words)])


def test_about_is_stored_in_the_bundle(tmp_path):
    path = tmp_path / "m.vmfb"
    data = aotc.compile(jnp.sin, X, about=ABOUT, output=path)
    assert data.about == ABOUT
    assert aotc.upgrade(str(path)).about == ABOUT
    assert aotc.upgrade(str(path), about={"license": "other"}).about == {"license": "other"}
    assert json.loads(run("inspect", path, "--json").output)["about"] == ABOUT
    assert ["license", "MIT"] in [line.split() for line in run("inspect", path).output.splitlines()]
    assert run("profile", path, "--repeat=1", "-q", "--save").exit_code == 0
    assert open_bundle(str(path)).manifest["about"] == ABOUT
    assert aotc.compile(jnp.sin, X).about == {}


def test_about_option_of_compile_is_stored(tmp_path):
    (tmp_path / "m.jaxexp").write_bytes(jax.export.export(jax.jit(jnp.cos))(X).serialize())
    done = run("compile", tmp_path / "m.jaxexp", "-o", tmp_path / "m.vmfb", "--about", "license=A=B", "--about", "v=")
    assert done.exit_code == 0, done.output
    assert open_bundle(str(tmp_path / "m.vmfb")).manifest["about"] == {"license": "A=B", "v": ""}
    assert parse_about([" a = b"]) == {"a": " b"}
    assert run("compile", tmp_path / "m.jaxexp", "-o", tmp_path / "m.vmfb", "--about", "license").exit_code == 2


def test_a_module_has_the_name_of_its_model(tmp_path):
    def scale(x):
        return x * 2

    assert aotc.compile(scale, X).load().name == "scale"
    assert aotc.compile(lambda x: x * 2, X).load().name == "main"
    assert aotc.compile({"a": scale, "b": jnp.sin}, args={"a": (X,), "b": (X,)}).load().name == "main"
    path = tmp_path / "resnet.v2.jaxexp"
    path.write_bytes(jax.export.export(jax.jit(scale))(X).serialize())
    data = aotc.compile(path)
    assert aotc.upgrade(data).load().name == data.load().name == "resnet.v2"
    with pytest.raises(aotc.CallError, match=r"^resnet.v2: main: error"):
        data.load()(X, X)


@pytest.mark.parametrize("about", ["MIT", {"a": 1}, {1: "a"}, {"": "a"}, {"a": "\ud800"}])
def test_about_with_values_that_are_not_text_is_refused(about):
    with pytest.raises(aotc.CompileError, match="about is"):
        aotc.compile(jnp.sin, X, about=about)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (range(1, 65), (1, 2, 4, 8, 16, 32, 64)), (range(3, 21), (3, 4, 8, 16, 20)), (range(5, 6), (5,)),
        (range(4), (0, 1, 2, 3)), (range(1, 10, 4), (1, 5, 9)), (range(0), ()), (range(8, 17), (8, 16)),
    ],
)  # fmt: skip
def test_size_ranges_expand_to_sizes(sizes, expected):
    assert sizes_of_range(sizes) == expected


def test_specialize_option_accepts_ranges():
    found = parse_specialized(["a=1..8", "b=1:8:64", "c=4,1,4", "d=2..2", "e=8:8:8"])
    assert found == {"a": (1, 2, 4, 8), "b": (1, 8, 64), "c": (4, 1), "d": (2,), "e": (8,)}
    for text in ("b=8..1", "b=1..", "b=1:2", "b=8:1:64", "b=1..2:3", "b=-1..2", "=1..2", "b=1..2..3", "b"):
        with pytest.raises(Exception, match="expected NAME=SIZE"):
            parse_specialized([text])


def test_sizes_outside_a_range_use_the_general_code():
    (b,) = jax.export.symbolic_shape("b")
    function = lambda x: jnp.tanh(x).sum(1)
    data = aotc.compile(function, jax.ShapeDtypeStruct((b, 3), "float32"), specialize={"b": range(1, 5)})
    (variant,) = open_bundle(data).manifest["variants"]
    assert variant["specialized"] == {"main": [{"b": 1}, {"b": 2}, {"b": 4}]}
    module = data.load()
    for size in (1, 3, 4, 9):
        x = np.linspace(-1, 1, 3 * size, dtype=np.float32).reshape(size, 3)
        np.testing.assert_allclose(module(x), np.tanh(x).sum(1), rtol=1e-5, atol=1e-6)
