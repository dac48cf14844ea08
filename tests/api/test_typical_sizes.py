"""The typical size of a dim: recorded in the bundle, planned for by the compiler, assumed by all commands."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import aotc
from aotc.frontend.mlir import fetch
from aotc.ir.dims.algebra import sym
from aotc.lowering.cost_model.kernel_work import evaluate_dim_estimate
from aotc.lowering.cost_model.work import dim_or, estimated_dim, estimated_elements, typical_sizes
from aotc.options import Options
from aotc.source.restore import restore_source
from aotc.tools.check import Checker, sample_check_arguments
from aotc.tools.flow import flow_of
from aotc.tools.page.facts import facts_of
from aotc.vmfb.bundle import open_bundle
from aotc_cli.main import app
from aotc_cli.shared.compile_options import parse_typical

pytestmark = pytest.mark.cpu
B, S = jax.export.symbolic_shape("b, s")


def run(*words):
    return CliRunner().invoke(app, [*map(str, words)])


def layer(x, w):
    return jnp.tanh(x @ w)


def compiled(**options):
    return aotc.compile(layer, jax.ShapeDtypeStruct((B, 32), "float32"), jnp.ones((32, 8)), **options)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("typical")
    plain, typical = folder / "plain.vmfb", folder / "typical.vmfb"
    compiled(output=plain)
    compiled(output=typical, typical={"b": 8})
    return plain, typical


def test_estimates_use_typical_sizes():
    b, n = sym("b"), sym("n")
    assert (estimated_dim(2 * b), estimated_elements((b, 3)), dim_or(b, 7)) == (32, 48, 7)
    assert evaluate_dim_estimate(b, {}) == 16
    with typical_sizes({"b": 8}):
        assert (estimated_dim(2 * b + n), estimated_elements((b, 3)), dim_or(b, 7)) == (32, 24, 8)
        assert evaluate_dim_estimate(b, {}) == 8
        assert (dim_or(b + n, 7), dim_or(5, 7)) == (7, 5)
    assert estimated_elements((b, 3)) == 48


def test_the_manifest_records_typical_sizes_of_each_function():
    shapes = jax.ShapeDtypeStruct((B, 4), "float32"), jax.ShapeDtypeStruct((S, 4), "float32")
    data = aotc.compile({"f": jnp.sin, "g": jnp.cos}, args={"f": shapes[:1], "g": shapes[1:]}, typical={"b": 8})
    functions = open_bundle(data).manifest["functions"]
    assert functions["f"]["typical"] == {"b": 8}
    assert "typical" not in functions["g"]


def test_a_bundle_without_typical_sizes_does_not_mention_them():
    data = compiled()
    assert "typical" not in open_bundle(bytes(data)).manifest["functions"]["main"]
    assert "typical" not in restore_source(open_bundle(bytes(data))).options
    assert bytes(data) == bytes(compiled(typical={}))


def test_upgrade_keeps_and_replaces_typical_sizes(paths, tmp_path):
    def typical(data):
        return open_bundle(bytes(data)).manifest["functions"]["main"].get("typical")

    assert typical(aotc.upgrade(paths[1])) == {"b": 8}
    assert typical(aotc.upgrade(paths[1], typical={"b": 4})) == {"b": 4}
    assert run("upgrade", paths[1], "-o", tmp_path / "u.vmfb", "--typical", "b=2", "-q").exit_code == 0
    assert typical((tmp_path / "u.vmfb").read_bytes()) == {"b": 2}


def test_a_profile_of_three_sizes_compiles_these_and_assumes_the_middle_one(tmp_path):
    (tmp_path / "m.jaxexp").write_bytes(
        jax.export.export(jax.jit(layer))(jax.ShapeDtypeStruct((B, 32), "float32"), jnp.ones((32, 8))).serialize()
    )
    done = run("compile", tmp_path / "m.jaxexp", "-o", tmp_path / "m.vmfb", "--specialize", "b=1:8:64")
    assert done.exit_code == 0, done.output
    manifest = open_bundle(str(tmp_path / "m.vmfb")).manifest
    assert manifest["variants"][0]["specialized"] == {"main": [{"b": 1}, {"b": 8}, {"b": 64}]}
    assert manifest["functions"]["main"]["typical"] == {"b": 8}
    text = run("inspect", tmp_path / "m.vmfb").output
    assert "b (typically 8)" in text
    assert "main (b=8 assumed (typical))" in text
    module = aotc.load(str(tmp_path / "m.vmfb"))
    for size in (1, 5, 8, 64, 70):
        x = np.linspace(-1, 1, 32 * size, dtype=np.float32).reshape(size, 32)
        np.testing.assert_allclose(module(x, np.ones((32, 8), np.float32)), np.tanh(x @ np.ones((32, 8))), atol=1e-5)


def test_typical_option_of_compile_is_recorded():
    assert parse_typical(["b=1:8:64", "s=1,2", "t=1..4"], []) == {"b": 8}
    assert parse_typical(["b=1:8:64"], ["b=16", "s=3"]) == {"b": 16, "s": 3}
    for text in ("b", "b=", "=1", "b=-1", "b=1,2"):
        with pytest.raises(Exception, match="expected NAME=SIZE"):
            parse_typical([], [text])


@pytest.mark.parametrize(
    ("typical", "message"),
    [
        ({"b": 0}, "typical: b has the sizes 0"), ({"nobody": 3}, "typical: no dim is called nobody"),
        ({"b": True}, "typical is"), ({"b": (1, 2)}, "typical is"), (8, "typical is"),
    ],
)  # fmt: skip
def test_wrong_typical_sizes_are_refused(typical, message):
    with pytest.raises(aotc.CompileError, match=message):
        compiled(typical=typical)


def test_all_commands_assume_the_typical_size(paths, tmp_path):
    for words in (
        ("explain", "schedule", paths[1]), ("explain", "memory", paths[1]), ("profile", paths[1], "--repeat=1"),
        ("bench", paths[1], "--seconds=0.05", "--rounds=1"), ("run", paths[1], "--random"),
        ("report", paths[1], "-o", tmp_path / "r.html"),
    ):  # fmt: skip
        done = run(*words)
        assert done.exit_code == 0, done.output
        assert "b=8 assumed (typical); --dim b=... is another size" in done.stderr
    assert "[8, 8]" in run("run", paths[1], "--zeros").output.replace("8x8xf32", "[8, 8]")
    assert "b=16 assumed; --dim" in run("explain", "schedule", paths[0]).stderr


def test_check_tries_the_typical_size_first():
    raw = fetch(layer, (jax.ShapeDtypeStruct((B, 32), "float32"), jnp.ones((32, 8))))
    checker = Checker(raw, Options(typical={"b": 9}))
    arrays, made = sample_check_arguments(checker, [], {}, 0)
    assert (arrays[0].shape, made) == ((9, 32), "random arguments, seed 0: b=9")
    assert checker.check(arrays).agrees


def test_reports_assume_the_typical_size(paths):
    facts = facts_of(paths[1].read_bytes(), "m.vmfb")
    assert (facts["sizes"], facts["assumed"], facts["typical"]) == ({"b": 8}, ["b"], ["b"])
    assert [c["sizes"]["b"] for c in facts["choices"]] == [1, 2, 32, 128]
    assert aotc.report(paths[1]).typical == ("b",)
    steps = [flow_of(open_bundle(str(path))).steps[-1] for path in paths]
    assert [step.writes[0][2] for step in steps] == [16 * 8 * 4, 8 * 8 * 4]


def test_diff_has_both_bundles_at_the_sizes_of_the_first(paths):
    found = aotc.diff(paths[1], paths[0])
    assert found.assumed == "b=8 assumed (typical)"
    assert "figures for b=8 assumed (typical); --dim b=... is another size" in str(found)
    assert aotc.diff(paths[1], paths[0], sizes={"b": 3}).assumed == ""
    rows = {row.name: row for row in found.whole}
    assert rows["bytes read and written"].first == rows["bytes read and written"].second
    assert json.loads(run("diff", *paths, "--json").output)["assumed"] == "b=16 assumed"


def test_the_general_code_is_planned_for_the_typical_size():
    """A matmul of very many rows is cut into larger grid items than one of few rows."""
    texts = []
    for size in (1, 4096):
        data = aotc.compile(layer, jax.ShapeDtypeStruct((B, 256), "float32"), jnp.ones((256, 256)), typical={"b": size})
        texts.append([k["text"].split("(", 1)[1] for k in open_bundle(data).manifest["debug"]["kernels"].values()])
    assert texts[0] != texts[1]


@pytest.mark.parametrize("tool", [aotc.report, aotc.profile, aotc.bench, lambda b, sizes: aotc.diff(b, b, sizes=sizes)])
def test_sizes_of_unknown_dims_are_refused(paths, tool):
    with pytest.raises(aotc.ArgumentValueError, match=r"(?s)no dim is called q.*expected: b"):
        tool(paths[0], sizes={"q": 3})


def test_a_report_names_the_file_that_is_not_a_bundle(tmp_path):
    (tmp_path / "x.py").write_text("import aotc\n")
    with pytest.raises(aotc.BundleError, match=r"x\.py: error: not an aotc bundle"):
        aotc.report(tmp_path / "x.py")


def test_diff_takes_the_dims_of_either_bundle(paths, tmp_path):
    other = aotc.compile(jnp.sin, jax.ShapeDtypeStruct((S, 2), "float32"))
    assert aotc.diff(paths[0], bytes(other), sizes={"b": 2, "s": 3}).assumed == ""
