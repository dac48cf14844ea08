"""``aotc explain affinity``: rows and picture of where ops run."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from typer.testing import CliRunner

from aotc.tools.explain.affinity import explain_affinity
from aotc_cli.main import app

pytestmark = pytest.mark.ir

T = "tensor<8x8xf32>"
ARGUMENTS = f'%x: {T} {{aotc.affinity = "d0"}}, %w: {T} {{aotc.affinity = "d1"}}'
MODEL = f"""func.func public @main({ARGUMENTS}, %y: {T}) -> {T} {{
  %c = stablehlo.constant dense<2.0> : {T}
  %0 = stablehlo.multiply %x, %c : {T}
  %1 = stablehlo.custom_call @aotc.transfer(%0) {{aotc.to = "d1"}} : ({T}) -> {T}
  %2 = stablehlo.multiply %1, %w : {T}
  %3 = stablehlo.add %2, %y : {T}
  return %3 : {T} }}"""
LOOP = f"""func.func public @main({ARGUMENTS}) -> {T} {{
  %r = stablehlo.while(%y = %x) : {T}
    cond {{
      %v = stablehlo.slice %y [0:1, 0:1] : ({T}) -> tensor<1x1xf32>
      %s = stablehlo.reshape %v : (tensor<1x1xf32>) -> tensor<f32>
      %b = stablehlo.constant dense<9.0> : tensor<f32>
      %t = stablehlo.compare LT, %s, %b : (tensor<f32>, tensor<f32>) -> tensor<i1>
      stablehlo.return %t : tensor<i1> }}
    do {{
      %0 = stablehlo.custom_call @aotc.transfer(%y) {{aotc.to = "d1"}} : ({T}) -> {T}
      %1 = stablehlo.add %0, %w : {T}
      stablehlo.return %1 : {T} }}
  return %r : {T} }}"""


def test_explain_affinity_has_a_row_for_each_op_and_transfer():
    report = explain_affinity(MODEL)
    assert report.devices == ("d0", "d1")
    assert [(r.name, r.device, r.reason) for r in report.rows] == [
        ("arg0", "d0", "affinity of the argument"),
        ("arg1", "d1", "affinity of the argument"),
        ("arg2", "d1", "add reads it there"),
        ("constant", "d0", "free: a constant is on each device that reads it"),
        ("mul", "d0", "its operands are there"),
        ("transfer %1 (f32[8, 8], 256 B)", "d1", "the model says so"),
        ("mul", "d1", "its operands are there"),
        ("add", "d1", "its operands are there"),
        ("result0", "d1", "it is made there"),
    ]
    assert [", ".join(r.candidates) for r in report.rows] == [
        "d0", "d1", "d1", "d0, d1", "d0", "d1", "d1", "d1", "d1",
    ]  # fmt: skip
    (transfer,) = report.transfers
    assert (transfer.source, transfer.device) == ("d0", "d1")


@pytest.mark.parametrize(("model", "frames", "arrows"), [(MODEL, 0, 1), (LOOP, 1, 2)])
def test_explain_affinity_draws_lanes_boxes_and_arrows(model, frames, arrows):
    """Lanes side by side, boxes in their lanes, an arrow for each transfer, a frame around a loop."""
    root = ET.fromstring(explain_affinity(model).picture)
    kinds = [node.get("class") for node in root.iter()]
    assert (kinds.count("device"), kinds.count("frame"), kinds.count("arrow")) == (2, frames, arrows)
    width, height = float(root.get("width")), float(root.get("height"))
    for node in root.iter():
        if node.get("class") in ("box", "frame"):
            assert float(node.get("x")) >= 0
            assert float(node.get("x")) + float(node.get("width")) <= width
            assert float(node.get("y")) + float(node.get("height")) <= height


def test_explain_affinity_command_prints_and_writes_a_picture(tmp_path):
    path = tmp_path / "m.mlir"
    path.write_text(MODEL)
    shown = CliRunner().invoke(app, ["explain", "affinity", str(path), f"--picture={tmp_path / 'a.svg'}"])
    assert shown.exit_code == 0
    assert "\n1 transfer; d0 is cpu:" in shown.output
    ET.parse(tmp_path / "a.svg")
    facts = json.loads(CliRunner().invoke(app, ["explain", "affinity", str(path), "--json"]).output)
    assert facts["devices"] == ["d0", "d1"]
    assert len(facts["rows"]) == 9


def test_a_device_option_given_twice_is_refused(tmp_path):
    (tmp_path / "m.mlir").write_text(MODEL)
    words = ["explain", "affinity", str(tmp_path / "m.mlir"), "--device", "d0=cpu", "--device", "d0=cuda:sm_90"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert "d0 is given twice, as cpu and as cuda:sm_90" in done.output


def test_explain_affinity_of_a_model_without_devices_says_so(tmp_path):
    path = tmp_path / "m.mlir"
    path.write_text(f"func.func public @main(%x: {T}) -> {T} {{ return %x : {T} }}")
    assert CliRunner().invoke(app, ["explain", "affinity", str(path)]).output == "the model names no device\n"


@pytest.mark.parametrize("flag", ["--annotate-affinities", "--annotate-input-affinities"])
def test_compile_prints_the_placement(tmp_path, flag):
    path = tmp_path / "m.mlir"
    path.write_text(MODEL)
    done = CliRunner().invoke(app, ["compile", str(path), "-o", str(tmp_path / "m.vmfb"), flag, "--quiet"])
    assert done.exit_code == 0
    assert 'device = "d1", source = "d0", reason = "the model says so"' in done.output
    assert 'device = "d1", candidates = ["d1"], reason = "its operands are there"' in done.output
    assert CliRunner().invoke(app, ["compile", str(path), "-o", "-", flag, "--print-after=fuse"]).exit_code == 2


BETWEEN = f"""func.func public @main({ARGUMENTS}, %y: {T}) -> ({T}, {T}) {{
  %0 = stablehlo.sine %x : {T}
  %1 = stablehlo.multiply %w, %w : {T}
  %2 = stablehlo.add %0, %1 : {T}
  %3 = stablehlo.subtract %1, %y : {T}
  %4 = stablehlo.subtract %x, %y : {T}
  return %2, %3 : {T}, {T} }}"""


def test_candidates_are_the_devices_that_a_rule_compares():
    rows = {r.name: r for r in explain_affinity(BETWEEN.replace("return %2, %3", "return %4, %2")).rows}
    assert (rows["add"].device, rows["add"].candidates) == ("d0", ("d0", "d1"))
    assert rows["add"].reason == "moves 256 B; it would be 256 B to d1"
    assert (rows["sin"].device, rows["sin"].candidates) == ("d0", ("d0",))
    auto = explain_affinity(BETWEEN, place="auto")
    assert all(r.device in r.candidates for r in auto.rows)


def test_an_argument_with_several_readers_is_placed_with_the_first():
    """It goes to the first reader; the others are candidates too."""
    report = explain_affinity(BETWEEN.replace("return %2, %3", "return %3, %4"))
    row = next(r for r in report.rows if r.name == "arg2")
    assert row.candidates == ("d1", "d0")
    assert (row.device, row.reason) == ("d1", "sub reads it there")


def test_output_on_the_devices_page_is_up_to_date(tmp_path):
    """Model and output of docs/devices.md belong together."""
    page = (Path(__file__).parents[2] / "docs" / "devices.md").read_text()
    model = page.split("```mlir\n")[1].split("```")[0]
    (tmp_path / "model.mlir").write_text(model)
    words = ["compile", str(tmp_path / "model.mlir"), "-o", str(tmp_path / "m.vmfb"), "--annotate-input-affinities"]
    output = CliRunner().invoke(app, [*words, "--quiet"]).output
    shown = page.split("--annotate-input-affinities\n")[1].split("```")[0].splitlines()
    ops = [line.strip() for line in shown if line.startswith("  %")]
    assert len(ops) == 3
    assert [line.strip() for line in output.splitlines() if line.startswith("  %")] == ops
