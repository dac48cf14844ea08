"""What the command line says of ops that run on the host beside a GPU, on a machine without one."""

import json

import jax
import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

from aotc_cli.main import app

pytest.importorskip("numba_cuda")
pytestmark = pytest.mark.cudasim

WHAT = "LAPACK's getrf has no kernel for cuda:sm_90a"


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "det.mlir"
    path.write_text(jax.jit(jnp.linalg.det).lower(jax.ShapeDtypeStruct((300, 300), "float32")).as_text())
    return path


@pytest.fixture(scope="module")
def bundle(model):
    path = model.with_suffix(".vmfb")
    made = run("compile", model, "-o", path, "--target=cuda:sm_90")
    assert made.exit_code == 0, made.output
    assert made.output.startswith(f"note: runs on the host: {WHAT} ({model}:")
    assert "cuda:sm_90a with 2 transfers" in made.output
    return path


def test_inspect_lists_host_ops_and_verify_accepts_them(bundle):
    said = " ".join(run("inspect", bundle).output.split())
    devices = "host: cpu:x86-64-v3 (cpu:0), device: cuda:sm_90a (cuda:0)"
    for part in (f"runs on the host: {WHAT}", devices, "2 transfers"):
        assert part in said
    (variant,) = json.loads(run("inspect", bundle, "--json").output)["variants"]
    assert [(row["function"], row["op"]) for row in variant["on_host"]] == [("main", "LAPACK's getrf")]
    assert "all variants are complete" in run("verify", bundle).output


@pytest.mark.parametrize("subject", ["schedule", "memory", "fusion"])
def test_explain_accepts_a_bundle_with_host_ops(subject, bundle):
    assert run("explain", subject, bundle).exit_code == 0


def test_explain_affinity_lists_host_ops(model, bundle, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for source, target in ((model, ("--target=cuda:sm_90",)), (bundle, ())):
        said = " ".join(run("explain", "affinity", source, *target).output.split())
        assert WHAT in said
        assert "2 transfers; device is cuda:sm_90a, host is cpu:x86-64-v3" in said


def test_host_fallback_options_are_checked(model, tmp_path):
    place = tmp_path / "m.vmfb"
    refused = run("compile", model, "-o", place, "--target=cuda:sm_90", "--no-host-fallback")
    assert "LAPACK's getrf is not supported on target cuda:sm_90a" in str(refused.exception)
    refused = run("compile", model, "-o", place, "--target=cuda:sm_90", "--max-transfers=0")
    assert "transfers between devices: found 2, expected at most 0" in str(refused.exception)
    lint = run("lint", model, "--target=cuda:sm_90")
    assert (lint.exit_code, "on the host" in lint.output) == (0, True)
    assert run("lint", model, "--target=cuda:sm_90", "--no-host-fallback").exit_code == 1
    assert run("compile", model, "-o", place, "--target=cuda:sm_90", "--host-target=cpu:x86-64-v2").exit_code == 0
    assert "cpu:x86-64-v2" in run("inspect", place).output
    printed = run("compile", model, "-o", "-", "--stop-after=assign-devices", "--target=cuda:sm_90")
    assert 'device = "host"' in printed.output
