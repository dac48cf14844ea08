"""``--bind``: which arguments are weights, and what ``inspect`` says is computed of them."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from typer.testing import CliRunner

import aotc
from aotc_cli.main import app

pytestmark = pytest.mark.cpu


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("bind") / "model.jaxexp"
    weights = {"w": np.zeros((64, 64), "f4"), "gain": np.zeros(64, "f4")}
    function = jax.jit(lambda p, x: (x @ p["w"], x.sum(0) * p["gain"]))
    path.write_bytes(export.export(function)(weights, np.zeros((4, 64), "f4")).serialize())
    return path


@pytest.fixture(scope="module")
def bundle(model):
    made = model.with_name("bound.vmfb")
    done = run("compile", model, "-o", made, "--target=cpu:x86-64-v3", "--bind=args[0]")
    assert done.exit_code == 0, done.output
    return made


def test_inspect_lists_prepared_weights(bundle):
    said = " ".join(run("inspect", bundle).output.split())
    assert "main bound to p['gain'], p['w'] reads" in said
    assert "from p['w'] and as they are: p['gain']" in said
    (variant,) = json.loads(run("inspect", bundle, "--json").output)["variants"]
    (value,) = variant["prepared"]["main"]["values"]
    assert (value["dtype"], value["from"]) == ("f32", ["p['w']"])
    assert value["bytes"] == 4 * np.prod(value["dims"]) >= 4 * 64 * 64
    assert variant["prepared"]["main"]["as they are"] == ["p['gain']"]


def test_dump_prints_the_prepare_and_bound_programs(bundle):
    said = run("dump", bundle, "--bytecode").output
    for name in ("main", "main_prepare", "main_bound"):
        assert f"function {name}:" in said


def test_inspect_omits_bindings_of_an_unbound_bundle(model, tmp_path):
    made = tmp_path / "plain.vmfb"
    assert run("compile", model, "-o", made).exit_code == 0
    assert "bound to" not in run("inspect", made).output
    assert aotc.load(made).prepared == {}


def test_upgrade_preserves_or_replaces_bindings(bundle, tmp_path):
    same, other = tmp_path / "same.vmfb", tmp_path / "other.vmfb"
    assert run("upgrade", bundle, "-o", same).exit_code == 0
    assert same.read_bytes() == bundle.read_bytes()
    assert run("upgrade", bundle, "-o", other, "--bind=args[0]['w']").exit_code == 0
    assert aotc.load(other).prepared["main"]["weights"] == [1]


def test_bind_refuses_unknown_names_and_accepts_numbers(model, tmp_path):
    done = run("compile", model, "-o", tmp_path / "no.vmfb", "--bind=params")
    assert done.exit_code == 1
    assert "bind: no argument is called params" in str(done.exception) + done.output
    made = tmp_path / "number.vmfb"
    assert run("compile", model, "-o", made, "--bind=1", "--bind=0").exit_code == 0
    module = aotc.load(made)
    weights = {"w": np.full((64, 64), 2, "f4"), "gain": np.ones(64, "f4")}
    y, z = module.bind({"args[0]": weights})(np.ones((4, 64), "f4"))
    assert jnp.allclose(y, 128)
    assert jnp.allclose(z, 4)
