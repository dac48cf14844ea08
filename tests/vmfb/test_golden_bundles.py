"""Bundles of earlier builds, kept in the tree, still load and give the results of XLA or NumPy."""

import json
from pathlib import Path

import numpy as np
import pytest
from golden_bundles.manifest_features import EXPECTED, features_of
from typer.testing import CliRunner

import aotc
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.devices.cpu import device as cpu
from aotc.vmfb.devices.cuda import driver
from aotc.vmfb.dtypes import to_numpy
from aotc.vmfb.errors import BundleError
from aotc.vmfb.verify.check_bundle import check_bundle
from aotc_cli.main import app

pytestmark = pytest.mark.ir

FOLDER = Path(__file__).parents[1] / "golden_bundles"
PATHS = sorted(FOLDER.glob("*.vmfb"))
KEYS = [str(FOLDER / "signed.key.pub")]
CUSTOM = {"golden_counts": lambda x, out: out.__setitem__(slice(None), np.bincount(x, minlength=len(out)))}
TOLERANCE = {"bf16": 1e-2, "f16": 1e-3, "f8E4M3FN": 1e-1}
every = pytest.mark.parametrize("path", PATHS, ids=lambda p: p.stem)


def variants_of(path):
    return open_bundle(path).manifest["variants"]


def of_gpu(path):
    return any(v["kind"] != "cpu" for v in variants_of(path))


def obstacle(path):
    """Return why this machine runs no variant of a bundle, or an empty string."""
    found = [driver.missing() if v["kind"] != "cpu" else cpu.obstacle(v) for v in variants_of(path)]
    return found[0] if all(found) else ""


def on_cpu(path):
    """Skip bundles for GPUs, and what this CPU does not run."""
    if of_gpu(path):
        pytest.skip("test_a_golden_bundle_runs_on_a_simulated_gpu runs it")
    if why := obstacle(path):
        pytest.skip(why)


def calls_of(path, module):
    """Return (function, arguments, results) of each call that is stored next to a bundle."""
    with np.load(path.with_suffix(".npz")) as file:
        stored = dict(file)
    if "r0" in stored:
        stored = {f"main/0/{key}": array for key, array in stored.items()}
    found = {}
    for key, array in stored.items():
        function, number, name = key.split("/")
        found.setdefault((function, int(number)), {})[name] = array
    for (function, _), arrays in sorted(found.items()):
        yield function, ordered(arrays, "a"), ordered(arrays, "r")


def ordered(arrays, letter):
    return [arrays[f"{letter}{n}"] for n in range(sum(name.startswith(letter) for name in arrays))]


def typed(array, value):
    """Return an array as the type of a signature's value: those that NumPy files lack are stored as bytes."""
    dtype = to_numpy(value["dtype"])
    return array if array.dtype == dtype else array.view(dtype)


def check_results(found, wanted, values):
    assert len(found) == len(wanted) == len(values)
    for one, other, value in zip(found, wanted, values, strict=True):
        one, other = np.asarray(one), typed(other, value)
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        wide = "c16" if other.dtype.kind == "c" else "f8"
        tolerance = TOLERANCE.get(value["dtype"], 1e-4)
        np.testing.assert_allclose(one.astype(wide), other.astype(wide), rtol=tolerance, atol=tolerance / 10)


def run_all(path, module):
    """Run every call twice and compare; a stateful function's calls follow one another, twice from the beginning."""
    rows = open_bundle(path).manifest["functions"]
    count = 0
    for iteration in (1, 2):
        states = {name: module.state("cache") for name, row in rows.items() if row.get("state")}
        for function, arguments, wanted in calls_of(path, module):
            if function in states:
                found = states[function](*arguments)["sum"]
                np.testing.assert_allclose(found, wanted[0], rtol=1e-6)
            else:
                values = module.functions[function].signature
                given = [typed(a, v) for a, v in zip(arguments, values.arguments, strict=True)]
                check_results(module.invoke(function, *given), wanted, values.results)
            count += 1
        for state in states.values():
            assert int(state["cache"]["n"]) == count / iteration
            np.testing.assert_array_equal(state["cache"]["k"].sum(0), wanted[0])
    return count


def test_every_golden_bundle_has_calls():
    assert len(PATHS) >= 30
    assert {p.stem for p in PATHS} == {p.stem for p in FOLDER.glob("*.npz")}
    assert sum(p.stat().st_size for p in FOLDER.iterdir() if p.is_file()) < 2_200_000


def test_the_golden_bundles_cover_these_features():
    """Read from the manifests and sources of the bundles, so that none disappears silently."""
    found = set().union(*(features_of(open_bundle(p)) for p in PATHS))
    assert sorted(EXPECTED - found) == []


@every
@pytest.mark.parametrize("form", ["mapped", "bytes"])
def test_a_golden_bundle_runs(path, form, monkeypatch):
    on_cpu(path)
    monkeypatch.setenv("AOTC_WEIGHTS_PATH", str(FOLDER))  # bytes lie next to no file
    source = path if form == "mapped" else path.read_bytes()
    assert run_all(path, aotc.load(source, verify=True, custom_calls=CUSTOM)) >= 2


@pytest.mark.cudasim
@pytest.mark.parametrize("path", [p for p in PATHS if of_gpu(p)], ids=lambda p: p.stem)
def test_a_golden_bundle_runs_on_a_simulated_gpu(path, monkeypatch):
    pytest.importorskip("numba_cuda")
    from vmfb.simulated_gpu import install

    install(monkeypatch, path.read_bytes(), capability=(8, 0) if path.stem == "sm_80" else (9, 0))
    assert run_all(path, aotc.load(path)) >= 2


@pytest.mark.cuda
@pytest.mark.skipif(bool(driver.missing()), reason="no GPU")
@pytest.mark.parametrize("path", [p for p in PATHS if of_gpu(p)], ids=lambda p: p.stem)
def test_a_golden_bundle_runs_on_a_gpu(path):
    try:
        module = aotc.load(path, verify=True)
    except BundleError as error:
        pytest.skip(str(error))  # the GPU has another capability
    assert run_all(path, module) >= 2


def test_weights_can_be_bound_to_a_golden_bundle():
    """The halves that `prepared` describes run too: what is computed of weights once, and calls with that."""
    path = FOLDER / "bound.vmfb"
    module = aotc.load(path)
    for _, (bias, w, x), wanted in calls_of(path, module):
        layer = module.bind({"params": {"bias": bias, "w": w}})
        check_results([layer(x)], wanted, module.main.signature.results)


def test_a_golden_bundle_with_a_signature():
    path = FOLDER / "signed.vmfb"
    assert run_all(path, aotc.load(path, trusted_keys=KEYS)) >= 2
    with pytest.raises(BundleError, match="signed"):
        aotc.load(FOLDER / "add.vmfb", trusted_keys=KEYS)


@every
def test_a_golden_bundle_is_verified(path):
    """Also where no variant runs: its checksums, programs and command buffers."""
    opened = open_bundle(path)
    opened.verify_all()
    check_bundle(path.read_bytes())
    done = CliRunner().invoke(app, ["verify", str(path)])
    if path.stem == "calls":
        assert "calls the Python function 'golden_counts', which is not here" in str(done.exception)
        return
    assert done.exit_code == 0, done.output
    assert f"ok, {len(opened.manifest['segments'])} segments match their sha256" in " ".join(done.output.split())
    assert ("not run here" in done.output) == bool(obstacle(path))


@every
def test_a_golden_bundle_is_inspected(path):
    manifest = open_bundle(path).manifest
    seen = json.loads(CliRunner().invoke(app, ["inspect", str(path), "--json"]).output)
    assert set(seen["functions"]) == set(manifest["functions"])
    assert [v["target"] for v in seen["variants"]] == [v["target"] for v in manifest["variants"]]
    assert bool(seen["signed_by"]) == (path.stem == "signed")
    text = CliRunner().invoke(app, ["inspect", str(path)])
    assert text.exit_code == 0
    assert all(name in text.output for name in manifest["functions"])


@pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=() if p.stem in ("add", "signed", "state") else pytest.mark.slow) for p in PATHS],
    ids=lambda p: p.stem,
)
def test_a_golden_bundle_is_compiled_again(path, monkeypatch):
    """``load(untrusted=True)`` compiles the source, also that of the first bundles, whose record is older."""
    on_cpu(path)
    monkeypatch.setenv("AOTC_WEIGHTS_PATH", str(FOLDER))
    aotc.register_custom_call("golden_scaled_sum", native=False)
    aotc.register_custom_call("golden_counts", native=False)
    assert run_all(path, aotc.load(path, untrusted=True, custom_calls={**CUSTOM, "golden_scaled_sum": scaled_sum})) >= 2


def scaled_sum(x, out, scale):
    out[:] = (x * scale).sum(1)
