"""Errors of models that are text: the line, a caret under the operand, MLIR's notes and its own words."""

import pytest

import aotc
from aotc.diagnostics import CompileError

pytestmark = pytest.mark.cpu
MODEL = (
    "func.func @main(%x: tensor<4xf32>, %y: tensor<5xf32>) -> tensor<4xf32> {{\n  {}\n  return %z : tensor<4xf32>\n}}\n"
)
CASES = [
    pytest.param("%z = stablehlo.add %x, %y : tensor<4xf32>", "%y : ", ["note: prior use here"], id="type"),
    pytest.param("%z = stablehlo.add %x, %nope : tensor<4xf32>", "%nope", ["undeclared SSA value"], id="undeclared"),
    pytest.param(
        '%z = "stablehlo.reshape"(%x, %y) : (tensor<4xf32>, tensor<5xf32>) -> tensor<4xf32>', '"stablehlo.reshape"',
        ["requires a single operand"], id="count",
    ),
    pytest.param(
        '%z = "stablehlo.sort"(%x, %y) ({ ^b(%a: tensor<f32>, %b: tensor<f32>): }) : (tensor<4xf32>) -> tensor<4xf32>',
        None, ["error: "], id="region",
    ),
    pytest.param(
        "%z = stablehlo.custom_call @nope(%x) : (tensor<4xf32>) -> tensor<4xf32>", "stablehlo.custom_call",
        ["custom call @nope has no registered function", "try: "], id="lowering",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("line", "under", "said"), CASES)
@pytest.mark.parametrize("as_file", [False, True])
def test_the_caret_is_under_the_wrong_operand(line, under, said, as_file, tmp_path):
    text = MODEL.format(line)
    (tmp_path / "m.mlir").write_text(text)
    with pytest.raises(CompileError) as caught:
        aotc.compile(tmp_path / "m.mlir" if as_file else text)
    shown = str(caught.value)
    assert all(words in shown for words in said), shown
    lines = shown.splitlines()
    at = lines.index(f"    {line.strip()}")
    caret = lines[at + 1]
    assert caret.strip() == "^"
    if under is not None:
        assert lines[at][caret.index("^") :].startswith(under), shown


def test_an_operand_by_number_has_the_caret():
    from aotc.diagnostics import Finding, Loc
    from aotc.frontend.mlir import finding_with_source_line

    line = "  %z, %w = stablehlo.thing %arg0, %1#0, %c : tensor<4xf32>"
    for n, name in enumerate(("%arg0", "%1#0", "%c")):
        found = finding_with_source_line(Finding(f"operand #{n} must be a tensor", Loc("m", 1, 12)), [line])
        assert found.snippet[found.caret :].startswith(name)
    found = finding_with_source_line(Finding("operand #9 must be a tensor", Loc("m", 1, 12)), [line])
    assert found.snippet[found.caret :].startswith("stablehlo.thing")


def test_a_note_has_its_own_line():
    with pytest.raises(CompileError) as caught:
        aotc.compile(MODEL.format("%z = stablehlo.sine %x : tensor<4xf32>\n  %z = stablehlo.sine %x : tensor<4xf32>"))
    assert "note: previously defined here\n      %z = stablehlo.sine" in str(caught.value)


def test_unparsable_text_shows_the_parsers_message(tmp_path):
    (tmp_path / "m.mlir").write_text("this is no model\n")
    with pytest.raises(CompileError) as caught:
        aotc.compile(tmp_path / "m.mlir")
    assert "m.mlir:1:1: error: custom op 'this' is unknown" in str(caught.value)
    assert "    this is no model\n    ^" in str(caught.value)
    assert "StableHLO begins with module or func.func" in str(caught.value)
    (tmp_path / "m.bin").write_bytes(bytes(range(256)))
    with pytest.raises(CompileError, match="neither StableHLO text"):
        aotc.compile(tmp_path / "m.bin")
