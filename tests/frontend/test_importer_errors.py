"""How bad input is reported: what cannot be read, and what is in it and not supported."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from aotc.diagnostics import SHOWN_LINE, SHOWN_LINES, SHOWN_MESSAGE, CompileError, Finding, shorten_message
from aotc.frontend.importer import import_model

pytestmark = pytest.mark.ir

X = np.ones((5, 4), np.float32)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty"),
        (b"\x00\x01garbage", "damaged"),
        (b"ML\xefR\x0dStableHLO_v1.0.0\x00broken", "error"),
        (b"ML\xefRbroken", "error"),
        ("module {\n  func.func @main() -> tensor<f32> {\n    return %x : tensor<f32>\n  }\n}", "undeclared"),
        (
            "module {\n  func.func @main(%a: tensor<f32>) -> tensor<f32> {\n    %0 = stablehlo.add %a : tensor<f32>\n",
            "error",
        ),
        ("module {}", "no public function"),
        (42, "not int"),
    ],
)
def test_unreadable_input_is_a_compile_error(data, message):
    with pytest.raises(CompileError, match=message):
        import_model(data)


def test_every_truncation_of_an_artifact_is_a_compile_error():
    function = jax.jit(lambda w, x: jnp.tanh(x @ w).sum())
    whole = export.export(function, platforms=("cpu",))(X.T, X).mlir_module_serialized
    for cut in range(0, len(whole) - 1, max(len(whole) // 20, 1)):
        with pytest.raises(CompileError):
            import_model(whole[:cut])


def test_a_missing_file_is_named():
    with pytest.raises(CompileError, match=r"nowhere\.mlir: error: cannot read the model"):
        import_model("nowhere.mlir")


def test_a_parse_error_points_at_its_column(tmp_path):
    path = tmp_path / "bad.mlir"
    path.write_text(
        "func.func @main(%a: tensor<2xf32>) -> tensor<2xf32> {\n  %0 = stablehlo.foo %a : tensor<2xf32>\n}\n"
    )
    with pytest.raises(CompileError) as error:
        import_model(path)
    assert str(error.value).startswith(f"{path}:2:")
    assert "%0 = stablehlo.foo %a" in str(error.value)


UNSUPPORTED = """func.func @main(%a: tensor<2xf32>) -> tensor<2xf32> {
  %t = stablehlo.create_token : !stablehlo.token
  %0, %t1 = "stablehlo.recv"(%t) {channel_handle = #stablehlo.channel_handle<handle = 1, type = 3>,
       is_host_transfer = true} : (!stablehlo.token) -> (tensor<2xf32>, !stablehlo.token)
  return %0 : tensor<2xf32>
}
"""


def test_an_unsupported_op_is_reported_with_place_and_hint():
    with pytest.raises(CompileError) as error:
        import_model(UNSUPPORTED)
    text = str(error.value)
    assert "<model>:3:13: error: stablehlo.recv" in text
    assert "receives from the host or another device while the program runs" in text
    assert "try:" in text


def test_up_to_ten_findings_are_reported():
    lines = [f'  %{i} = "foreign.op{i}"(%a) : (tensor<2xf32>) -> tensor<2xf32>' for i in range(14)]
    text = (
        "func.func @main(%a: tensor<2xf32>) -> tensor<2xf32> {\n"
        + "\n".join(lines)
        + "\n  return %a : tensor<2xf32>\n}"
    )
    with pytest.raises(CompileError) as error:
        import_model(text)
    assert len(error.value.findings) == CompileError.LIMIT
    assert {f.loc.line for f in error.value.findings} == set(range(2, 12))


def test_sizes_computed_in_a_loop_are_refused():
    text = """func.func @main(%x: tensor<9xi32>, %i: tensor<i32>) -> tensor<i32> {
      %r = stablehlo.while(%k = %i) : tensor<i32>
      cond {
        %p = stablehlo.compare LT, %k, %k : (tensor<i32>, tensor<i32>) -> tensor<i1>
        stablehlo.return %p : tensor<i1>
      } do {
        %s = stablehlo.dynamic_slice %x, %k, sizes = [1] : (tensor<9xi32>, tensor<i32>) -> tensor<1xi32>
        %y = stablehlo.dynamic_iota %s, dim = 0 : (tensor<1xi32>) -> tensor<?xi32>
        %n = stablehlo.get_dimension_size %y, dim = 0 : (tensor<?xi32>) -> tensor<i32>
        stablehlo.return %n : tensor<i32>
      }
      return %r : tensor<i32>
    }"""
    with pytest.raises(CompileError, match="depends on data inside a loop"):
        import_model(text)


def test_a_function_that_jax_cannot_export_is_explained():
    def callback(x):
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    with pytest.raises(CompileError):
        import_model(jax.jit(callback), X)


def test_a_function_that_calls_itself_is_refused():
    text = """func.func @main(%x: tensor<f32>) -> tensor<f32> {
      %0 = func.call @again(%x) : (tensor<f32>) -> tensor<f32>
      return %0 : tensor<f32>
    }
    func.func private @again(%x: tensor<f32>) -> tensor<f32> {
      %0 = func.call @again(%x) : (tensor<f32>) -> tensor<f32>
      return %0 : tensor<f32>
    }"""
    with pytest.raises(CompileError, match="calls itself"):
        import_model(text)


def test_impossible_shapes_are_refused_at_compile_time():
    text = """func.func @main(%x: tensor<3xf32>) -> tensor<3xf32> {
      %n = stablehlo.get_dimension_size %x, dim = 0 : (tensor<3xf32>) -> tensor<i32>
      %four = stablehlo.constant dense<4> : tensor<i32>
      %p = stablehlo.compare EQ, %n, %four : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.custom_call @shape_assertion(%p, %n) {error_message = "size is {0}", has_side_effect = true}
          : (tensor<i1>, tensor<i32>) -> ()
      return %x : tensor<3xf32>
    }"""
    with pytest.raises(CompileError, match="is always false: size is"):
        import_model(text)


@pytest.mark.parametrize(("dim", "batch"), [(2, 0), (1, 3), (0, 1), (-3, 0)])
def test_torch_index_select_of_missing_dims_is_refused(dim, batch):
    text = f"""func.func @main(%a: tensor<3x4xf32>, %b: tensor<2xi32>) -> tensor<3x2xf32> {{
      %y = "stablehlo.torch_index_select"(%a, %b) {{dim = {dim} : i64, batch_dims = {batch} : i64}}
          : (tensor<3x4xf32>, tensor<2xi32>) -> tensor<3x2xf32>
      return %y : tensor<3x2xf32>
    }}"""
    with pytest.raises(CompileError, match="torch_index_select"):
        import_model(text)


@pytest.mark.parametrize(
    ("call", "result", "message"),
    [
        ('@aotc.transfer(%x) {aotc.to = "d1"}', "tensor<4xf64>", r"is f32\[4\], but the model states f64\[4\]"),
        ('@aotc.transfer(%x) {aotc.to = "d1"}', "tensor<7xf32>", r"is f32\[4\], but the model states f32\[7\]"),
        ("@Sharding(%x)", "tensor<4xi32>", "states i32"),
        ("@mhlo.erf(%x)", "tensor<4xf16>", "states f16"),
        ("@mhlo.tan(%x)", "tensor<2x2xf32>", r"states f32\[2, 2\]"),
        ("@annotate_device_placement(%x)", "tensor<4xf64>", "states f64"),
    ],
)
def test_wrong_result_types_of_custom_calls_are_refused(call, result, message):
    """MLIR's verifier knows nothing of custom calls: what follows would read another type than there is."""
    text = f"""func.func @main(%x: tensor<4xf32>) -> {result} {{
      %y = stablehlo.custom_call {call} : (tensor<4xf32>) -> {result}
      return %y : {result} }}"""
    with pytest.raises(CompileError, match=message):
        import_model(text)


def test_transfers_with_wrong_results_are_refused():
    pair = "(tensor<4xf32>, tensor<4xf32>)"
    text = f"""func.func @main(%x: tensor<4xf32>) -> {pair} {{
      %y:2 = stablehlo.custom_call @aotc.transfer(%x) {{aotc.to = "d1"}} : (tensor<4xf32>) -> {pair}
      return %y#0, %y#1 : tensor<4xf32>, tensor<4xf32> }}"""
    with pytest.raises(CompileError, match=r"result 1 of .* is nothing, but the model states"):
        import_model(text)


@pytest.mark.parametrize(("operands", "count"), [("", 0), ("%x, %x", 2)])
def test_a_transfer_of_several_values_is_refused(operands, count):
    types = ", ".join(["tensor<4xf32>"] * count)
    text = f"""func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {{
      %y = stablehlo.custom_call @aotc.transfer({operands}) {{aotc.to = "d1"}} : ({types}) -> tensor<4xf32>
      return %y : tensor<4xf32> }}"""
    with pytest.raises(CompileError, match=f"moves {count} values"):
        import_model(text)


def test_wrong_result_types_of_composites_are_refused():
    """An op by the name of a composite stands for its decomposition, whose type may be another."""
    text = """func.func private @f(%x: tensor<4xf32>) -> tensor<7xf32> {
      %y = stablehlo.constant dense<0.0> : tensor<7xf32>
      return %y : tensor<7xf32> }
    func.func @main(%x: tensor<4xf32>) -> tensor<7xf32> {
      %y = stablehlo.composite "chlo.erf" %x {decomposition = @f} : (tensor<4xf32>) -> tensor<7xf32>
      return %y : tensor<7xf32> }"""
    with pytest.raises(CompileError, match=r"composite .chlo.erf. is f32"):
        import_model(text)


def test_unpaired_surrogates_are_refused():
    with pytest.raises(CompileError, match=r"<model>:2: error: the model's text has U\+D800, half of a surrogate pair"):
        import_model("// a comment\nfunc.func @main() { return } // \ud800")


NAME = r'"\FF\FE"'  # is not UTF-8
NAMED = {
    "call": f'%y = "stablehlo.custom_call"(%x) {{call_target_name = {NAME}}} : (tensor<f32>) -> tensor<f32>',
    "function": f"%y = call @{NAME}(%x) : (tensor<f32>) -> tensor<f32>",
    "assertion": f"%y = stablehlo.abs %x : tensor<f32> %c = arith.constant true cf.assert %c, {NAME}",
    "location": f"%y = stablehlo.abs %x : tensor<f32> loc({NAME})",
    "file": f"%y = stablehlo.abs %x : tensor<f32> loc({NAME}:1:2)",
    "caller": f'%y = stablehlo.abs %x : tensor<f32> loc(callsite({NAME}:1:2 at "a.py":3:4))',
}


@pytest.mark.parametrize("name", NAMED)
def test_names_that_are_not_utf_8_are_refused(name):
    """Where jaxlib makes a Python string of a location's name, it ends the process."""
    text = f"func.func @main(%x: tensor<f32>) -> tensor<f32> {{ {NAMED[name]}\nreturn %y : tensor<f32> }}"
    if name == "function":
        text += f"\nfunc.func private @{NAME}(tensor<f32>) -> tensor<f32>"
    crashes = name in ("location", "file", "caller")
    with pytest.raises(CompileError, match="the model cannot be read" if crashes else "not UTF-8"):
        import_model(text)


def test_names_in_any_language_are_accepted():
    place = r'loc("gr\C3\B6\C3\9Fe")'
    body = f"%y = stablehlo.abs %x : tensor<f32> {place} return %y : tensor<f32>"
    assert import_model(f"func.func @main(%x: tensor<f32>) -> tensor<f32> {{ {body} }}")


LONG = f"affine_map<(d0) -> (d0{' + d0 mod 3' * 20_000})>"


@pytest.mark.parametrize(
    "text",
    [
        f"module attributes {{a = {LONG}}} {{}}",  # MLIR's note quotes the module
        f"func.func @main(%x: tensor<4xf32>) -> tensor<4xf32, {LONG}> {{ return %x : tensor<4xf32> }}",
        f"module attributes {{mhlo.num_partitions = {LONG}}} {{}}",  # an error of aotc
        f"func.func @main() {{ call @{'f' * 9999}() : () -> ()\nreturn }}",
        'func.func @main(%x: tensor<4xf32>) { %t = stablehlo.create_token : !stablehlo.token\n%u = "stablehlo.outfeed"'
        f'(%x, %t) {{outfeed_config = "{"c" * 9999}"}} : (tensor<4xf32>, !stablehlo.token) -> !stablehlo.token '
        f'loc("{"n" * 9999}")\nreturn }}',
    ],
    ids=["note", "type", "attribute", "name", "location"],
)
def test_errors_quote_little_of_a_long_line(text):
    with pytest.raises(CompileError) as caught:
        import_model(text)
    lines = str(caught.value).splitlines()
    assert max(map(len, lines)) <= SHOWN_MESSAGE + 40
    assert all(len(line.strip()) <= SHOWN_LINE for line in lines if line.startswith("    "))
    assert all(len(note.message) < SHOWN_MESSAGE for finding in caught.value.findings for note in finding.notes)


def test_a_long_snippet_is_cut_around_its_caret():
    cut = Finding("m", snippet="a" * 500 + "b" + "c" * 500, caret=500)
    assert len(cut.snippet) == SHOWN_LINE
    assert cut.snippet[cut.caret] == "b"


def test_long_messages_are_shortened_in_the_middle():
    assert shorten_message("ok\n" + "x" * SHOWN_MESSAGE) == "ok\n" + "x" * SHOWN_MESSAGE
    short = shorten_message("found " + "x" * 9999 + ", expected y")
    assert len(short) <= SHOWN_MESSAGE
    assert short.startswith("found ")
    assert short.endswith(", expected y")
    assert shorten_message(short) == short
    many = shorten_message("line\n" * 1000).splitlines()
    assert len(many) == SHOWN_LINES
    assert many[-1] == "... and 978 lines more"
