"""``aotc explain`` of programs for several devices and targets, of bundles as of their models."""

import json
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

import aotc
from aotc.tools.explain.affinity import explain_affinity
from aotc.tools.explain.fusion import explain_fusion
from aotc.tools.explain.memory import explain_memory
from aotc.tools.explain.schedule import explain_schedule
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.describe import describe_bundle
from aotc.vmfb.errors import ArgumentValueError, BundleError, CallError
from aotc_cli.main import app

pytestmark = pytest.mark.cpu

T = "tensor<64x64xf32>"
STAGES = f"""func.func public @main(%x: {T} {{aotc.affinity = "d0"}}, %w: {T} {{aotc.affinity = "d1"}}) -> {T} {{
  %0 = stablehlo.dot_general %x, %x, contracting_dims = [1] x [0] : ({T}, {T}) -> {T}
  %1 = stablehlo.custom_call @aotc.transfer(%0) {{aotc.to = "d1"}} : ({T}) -> {T}
  %2 = stablehlo.dot_general %1, %w, contracting_dims = [1] x [0] : ({T}, {T}) -> {T}
  return %2 : {T} }}"""
PRODUCTS = f"""func.func public @main(%x: {T} {{aotc.affinity = "d0"}}, %w: {T} {{aotc.affinity = "d1"}})
    -> ({T}, {T}) {{
  %0 = stablehlo.dot_general %x, %x, contracting_dims = [1] x [0] : ({T}, {T}) -> {T}
  %1 = stablehlo.dot_general %w, %w, contracting_dims = [1] x [0] : ({T}, {T}) -> {T}
  %2 = stablehlo.dot_general %0, %0, contracting_dims = [1] x [0] : ({T}, {T}) -> {T}
  return %1, %2 : {T}, {T} }}"""
BYTES = 64 * 64 * 4
CPU, GPU = "cpu:x86-64-v3", "cuda:sm_90a"
MIX = {"d0": CPU, "d1": GPU}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model, its bundle for a CPU and a GPU, and one for either."""
    folder = tmp_path_factory.mktemp("devices")
    (folder / "m.mlir").write_text(STAGES)
    (folder / "mix.vmfb").write_bytes(aotc.compile(STAGES, devices=MIX))
    (folder / "two.vmfb").write_bytes(aotc.compile(STAGES, target=f"{CPU},{GPU}"))
    return folder


def run(*words):
    return CliRunner().invoke(app, list(map(str, words)))


def invoke(*words):
    """The output of a command that ends well."""
    done = run(*words)
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output


class TestMix:
    def test_times_are_predicted_for_each_target(self, files):
        report = explain_schedule(open_bundle(files / "mix.vmfb"))
        gpu = explain_schedule(open_bundle(aotc.compile(STAGES, devices={"d0": GPU, "d1": GPU})))
        cpu = explain_schedule(open_bundle(aotc.compile(STAGES, devices={"d0": CPU, "d1": CPU})))
        (product,) = [row for row in report.rows if row.device == "d1"]
        assert product.ns == gpu.rows[-1].ns != cpu.rows[-1].ns
        (copy,) = [row for row in report.rows if row.kernel == "copy"]
        (plain,) = [row for row in gpu.rows if row.kernel == "copy"]
        assert (copy.device, plain.device) == ("cpu to d1", "d0 to d1")
        assert copy.ns > plain.ns > 10_000
        assert (report.kinds, gpu.kinds, cpu.kinds) == (("cpu", "cuda"), ("cuda",), ("cpu",))
        assert {row.device for row in cpu.rows} == {"cpu"}

    def test_explain_memory_covers_every_arena(self, files):
        bundle = open_bundle(files / "mix.vmfb")
        report = explain_memory(bundle)
        assert report.arena == bundle.manifest["variants"][0]["arena_peak"] == sum(report.arenas.values())
        assert list(report.arenas) == ["cpu", "d1"]
        (row,) = [row for row in report.rows if row.space == "d1"]
        assert (row.bytes, row.producer, row.offset) == (BYTES, "copy", 0)
        assert row.read_by

    def test_equal_offsets_in_two_arenas_do_not_overlap(self, files):
        """A value of one memory does not write over that of another, though both are at offset 0."""
        report = explain_memory(open_bundle(aotc.compile(PRODUCTS, devices={"d0": GPU, "d1": GPU})))
        assert {row.space for row in report.rows} <= {"d0", "d1"}
        assert all(row.replaced < 0 for row in report.rows)

    @pytest.mark.parametrize("model", ["m.mlir", "mix.vmfb"])
    def test_kernels_have_the_target_of_their_device(self, files, model):
        report = explain_fusion(files / model, **({"devices": MIX} if model == "m.mlir" else {}))
        assert report.target == f"{CPU}+{GPU}"
        assert {(r.device, r.target) for r in report.regions} == {("d0", CPU), ("d1", GPU)}
        (gpu,) = explain_fusion(STAGES, target=GPU).regions[-1:]
        assert report.regions[-1].memory == gpu.memory != {}

    def test_explain_tables_name_devices(self, files):
        assert "cpu to d1" in invoke("explain", "schedule", files / "mix.vmfb")
        schedule = " ".join(invoke("explain", "schedule", files / "mix.vmfb").split())
        assert "on one core and GPUs, critical path (*)" in schedule
        shown = invoke("explain", "memory", files / "mix.vmfb")
        assert "  d1  " in shown
        assert f"{BYTES / 1000:.1f} kB on d1" in shown
        assert f"for {CPU}+{GPU}" in invoke("explain", "fusion", files / "mix.vmfb")


class TestBundleOfSeveralTargets:
    @pytest.mark.parametrize("subject", ["schedule", "memory"])
    def test_target_option_selects_the_variant(self, files, subject):
        for target, name in (("", CPU), (CPU, CPU), (GPU, GPU), ("cuda", GPU)):
            words = [f"--target={target}"] if target else []
            assert json.loads(invoke("explain", subject, files / "two.vmfb", "--json", *words))["target"] == name
        done = run("explain", subject, files / "two.vmfb", "--target=cuda:sm_80")
        assert isinstance(done.exception, BundleError)
        assert f"not compiled for cuda:sm_80\n    expected: {CPU}, {GPU}" in str(done.exception)

    @pytest.mark.parametrize("flag", ["-O3", "--device=d0=cpu", "--place=auto", "--memory-limit=1MB"])
    def test_compile_options_for_a_bundle_are_refused(self, files, flag):
        done = run("explain", "schedule", files / "two.vmfb", flag)
        assert done.exit_code == 2
        assert "compiled already" in done.output


class TestAffinityOfBundles:
    def test_explain_affinity_of_a_bundle_has_the_rows_of_its_model(self, files):
        report, model = explain_affinity(files / "mix.vmfb"), explain_affinity(files / "m.mlir", devices=MIX)
        assert [(r.name, r.device, r.reason) for r in report.rows] == [(r.name, r.device, r.reason) for r in model.rows]
        assert report.targets == model.targets == MIX
        facts = json.loads(invoke("explain", "affinity", files / "mix.vmfb", "--json"))
        assert facts["targets"] == MIX
        assert [row["device"] for row in facts["transfers"]] == ["d1"]
        assert facts["rows"][-1]["name"] == "result0"

    def test_explain_affinity_of_a_bundle_has_the_recorded_reasons(self):
        text = PRODUCTS.replace("64x64", "512x512").replace("aotc.affinity", "a.other")
        report = explain_affinity(aotc.compile(text, devices={"d0": "cpu", "d1": "cpu"}, place="auto"))
        rows = [row for row in report.rows if row.name == "dot_general"]
        assert {row.device for row in rows} == {"d0", "d1"}
        assert all(row.reason.startswith("ends first, after") for row in rows)

    def test_explain_selects_a_function(self):
        text = STAGES + STAGES.replace("@main", "@other")
        assert {r.function for r in explain_affinity(text).rows} == {"main", "other"}
        assert {r.function for r in explain_affinity(text, function="other").rows} == {"other"}
        for explain in (explain_affinity, explain_fusion):
            with pytest.raises(ArgumentValueError, match=r"no function 'zz'\n.*main, other"):
                explain(text, function="zz")
        assert {r.function for r in explain_fusion(text, function="other").regions} == {"other"}


class TestPictures:
    def test_value_names_in_the_picture_equal_those_of_the_table(self, files):
        root = ElementTree.fromstring(explain_affinity(files / "m.mlir").picture)
        texts = [node.text for node in root.iter() if node.text]
        assert any(text.startswith("%0 (f32[64, 64]") for text in texts)
        (result,) = [n for n in root.iter() if (n.text or "").startswith("result0")]
        assert result.text == "result0: %2"
        lanes = {n.text: float(n.get("x")) for n in root.iter() if n.get("class") == "device"}
        assert float(result.get("x")) == lanes["d1"]

    def test_ticks_are_round_numbers_within_the_picture(self):
        report = explain_schedule(open_bundle(aotc.compile(STAGES.replace("64x64", "1024x1024"))))
        root = ElementTree.fromstring(report.picture)
        ticks = [n for n in root.iter() if n.get("class") == "axis"]
        assert not any("e+" in n.text for n in root.iter() if n.text)
        assert ticks[-1].text.endswith(" ms")
        assert 2 <= len(ticks) <= 11
        assert all(float(tick.get("x")) + 40 <= float(root.get("width")) for tick in ticks)

    def test_other_picture_formats_are_refused(self, files, tmp_path):
        for subject in ("affinity", "schedule"):
            done = run("explain", subject, files / "m.mlir", f"--picture={tmp_path / 'x.png'}")
            assert done.exit_code == 2
            assert ".svg" in done.output
        assert not list(tmp_path.iterdir())


def test_unknown_dims_are_refused(files):
    done = run("explain", "memory", files / "mix.vmfb", "--dim=q=9")
    assert isinstance(done.exception, CallError)
    assert "no dim is called q" in str(done.exception)
    assert run("explain", "affinity", files / "m.mlir", "--dim=q=9").exit_code == 2


def test_inspect_lists_the_memory_limit():
    bundle = open_bundle(aotc.compile(STAGES, memory_limit=10**6))
    assert describe_bundle(bundle, 0)["variants"][0]["memory_limit"] == 10**6
