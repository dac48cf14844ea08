"""Both sides of the thresholds of the frontend and of the tensor IR's text."""

import numpy as np
import pytest

from aotc.diagnostics import CompileError
from aotc.frontend.constants import OWN_BYTES, _own_copy_if_small
from aotc.frontend.importer import import_model
from aotc.frontend.limits import MOST_NESTED, SHAPE_ELEMENTS
from aotc.frontend.mlir_types import MOST_NUMBERS
from aotc.frontend.model_text import MOST_BRACES
from aotc.frontend.quantized.products import I32_TERMS
from aotc.frontend.shape_values import has_shape_value
from aotc.ir.tensor.ir import TensorType, walk
from aotc.ir.tensor.text import INLINE_ELEMENTS, print_module
from aotc.vmfb.limits import MOST_BYTES, MOST_RANK

pytestmark = pytest.mark.ir


@pytest.mark.parametrize("more", [0, 1])
def test_large_constants_are_not_copied(more):
    view = np.zeros(OWN_BYTES + more, np.uint8)
    assert (_own_copy_if_small(view) is view) == (more > 0)


@pytest.mark.parametrize("more", [0, 1])
def test_small_integer_tensors_are_followed_as_dims(more):
    assert has_shape_value(TensorType("i32", (SHAPE_ELEMENTS + more,))) == (more == 0)


@pytest.mark.parametrize("more", [0, 1])
def test_small_constants_are_inlined_in_text(more):
    n = INLINE_ELEMENTS + more
    values = ", ".join(map(str, range(n)))
    text = (
        f"func.func @main() -> tensor<{n}xi32> {{\n"
        f"%0 = stablehlo.constant dense<[{values}]> : tensor<{n}xi32>\nreturn %0 : tensor<{n}xi32>\n}}"
    )
    constants = {}
    print_module(import_model(text), constants)
    assert len(constants) == more


@pytest.mark.parametrize("more", [0, 1])
def test_long_integer_sums_are_not_narrowed_to_i32(more):
    k = I32_TERMS + more
    a, b, c = (f"!quant.uniform<i8:f32, 0.5:{zero}>" for zero in (1, 0, 2))
    text = (
        f"func.func @main(%a: tensor<1x{k}x{a}>, %b: tensor<{k}x1x{b}>) -> tensor<1x1x{c}> {{\n"
        "%0 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0] : "
        f"(tensor<1x{k}x{a}>, tensor<{k}x1x{b}>) -> tensor<1x1x{c}>\nreturn %0 : tensor<1x1x{c}>\n}}"
    )
    ops = list(walk(import_model(text).functions["main"].body))
    (product,) = (op for op in ops if op.name == "dot_general")
    assert (product.results[0].type.dtype == "i32") == (more == 0)


ENDLESS = ["100000x100000", f"{2**63 - 1}x{2**63 - 1}"]


@pytest.mark.parametrize("shape", [f"{MOST_NUMBERS}", f"{MOST_NUMBERS + 1}", *ENDLESS])
def test_a_huge_splat_attribute_is_refused(shape):
    """It is listed: a few bytes of text must not fill the memory."""
    text = (
        "func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {\n"
        '%0 = "stablehlo.custom_call"(%x) {call_target_name = "f", api_version = 4 : i32, '
        f"backend_config = {{k = dense<0> : tensor<{shape}xi64>}}}} : (tensor<4xf32>) -> tensor<4xf32>\n"
        "return %0 : tensor<4xf32>\n}"
    )
    if shape == str(MOST_NUMBERS):
        assert import_model(text)
        return
    with pytest.raises(CompileError, match=r":2:\d+: error: an attribute is .* times one number"):
        import_model(text)


@pytest.mark.parametrize("shape", ENDLESS)
def test_huge_replica_groups_are_refused(shape):
    text = (
        "func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {\n"
        f'%0 = "stablehlo.all_reduce"(%x) <{{replica_groups = dense<0> : tensor<{shape}xi64>}}> ({{\n'
        "^bb0(%a: tensor<f32>, %b: tensor<f32>):\n%s = stablehlo.add %a, %b : tensor<f32>\n"
        "stablehlo.return %s : tensor<f32>\n}) : (tensor<4xf32>) -> tensor<4xf32>\nreturn %0 : tensor<4xf32>\n}"
    )
    with pytest.raises(CompileError):
        import_model(text)


# ---------------------------------------------------------------- sizes that nobody has


def doubled(t):
    return f"func.func @main(%x: {t}) -> {t} {{\n%0 = stablehlo.add %x, %x : {t}\nreturn %0 : {t}\n}}"


@pytest.mark.parametrize("more", [0, 1])
def test_arrays_beyond_the_rank_limit_are_refused(more):
    text = doubled(f"tensor<{'x'.join(['1'] * (MOST_RANK + more))}xf32>")
    if more:
        with pytest.raises(CompileError, match=f"a tensor of {MOST_RANK + 1} dimensions is not supported"):
            import_model(text)
    else:
        import_model(text)


@pytest.mark.parametrize("more", [0, 1])
def test_arrays_beyond_the_size_limit_are_refused(more):
    text = doubled(f"tensor<{MOST_BYTES // 4 + more}xf32>")
    if more:
        with pytest.raises(CompileError, match="more than a machine can address"):
            import_model(text)
    else:
        import_model(text)


@pytest.mark.parametrize(
    "t", ["100000000000x100000000000xf32", "100000000000x100000000000x0xf32", "9223372036854775807xi1",
          "?x100000000000x100000000000xf32"]
)  # fmt: skip
def test_sizes_beyond_64_bits_are_refused(t):
    with pytest.raises(CompileError, match="more than a machine can address"):
        import_model(doubled(f"tensor<{t}>"))


def test_an_oversized_array_is_reported_with_its_line(tmp_path):
    big = "1000000000x1000000000x1000000000xf32"
    path = tmp_path / "m.mlir"
    path.write_text(
        f"func.func @main(%x: tensor<f32>) -> tensor<f32> {{\n%0 = stablehlo.broadcast_in_dim %x, dims = [] : "
        f"(tensor<f32>) -> tensor<{big}>\n%1 = stablehlo.reduce(%0 init: %x) applies stablehlo.add across dimensions "
        f"= [0, 1, 2] : (tensor<{big}>, tensor<f32>) -> tensor<f32>\nreturn %1 : tensor<f32>\n}}"
    )
    with pytest.raises(CompileError, match=rf"m\.mlir:2:6: error: tensor<{big}> has"):
        import_model(path)


def nested(count, heads, tails):
    """Ops around each other, by turns of several forms."""
    text = "func.func @main(%x0: tensor<4xf32>, %p: tensor<i1>) -> tensor<4xf32> {\n"
    for n in range(count):
        text += f"%w{n} = " + heads[n % len(heads)].format(n, n + 1)
    text += f"%y = stablehlo.add %x{count}, %x{count} : tensor<4xf32>\nstablehlo.return %y : tensor<4xf32>\n"
    for n in reversed(range(count)):
        text += tails[n % len(tails)].format(n)
        text += f"stablehlo.return %w{n} : tensor<4xf32>\n" if n else "return %w0 : tensor<4xf32>\n}"
    return text


LOOP = "stablehlo.while(%x{1} = %x{0}) : tensor<4xf32> cond {{ stablehlo.return %p : tensor<i1> }} do {{\n"
BRANCH = '"stablehlo.if"(%p) ({{\n%x{1} = stablehlo.sine %x{0} : tensor<4xf32>\n'
OTHER = "}}, {{ stablehlo.return %x{0} : tensor<4xf32> }}) : (tensor<i1>) -> tensor<4xf32>\n"


@pytest.mark.parametrize("heads", [(LOOP,), (BRANCH,), (LOOP, BRANCH)], ids=["loops", "branches", "both"])
def test_regions_nested_beyond_the_limit_are_refused(heads):
    tails = tuple("}}\n" if h is LOOP else OTHER for h in heads)
    import_model(nested(MOST_NESTED, heads, tails))
    for count in (MOST_NESTED + 1, 300, MOST_BRACES // 2 - 10):  # a branch opens two brackets
        with pytest.raises(CompileError, match=rf":\d+:\d+: error: regions are nested more than {MOST_NESTED} deep"):
            import_model(nested(count, heads, tails))
    for form in (str, str.encode):
        with pytest.raises(CompileError, match=r":\d+: error: the model's text is nested more than"):
            import_model(form(nested(MOST_BRACES + 1, (LOOP,), ("}}\n",))))


def test_braces_in_strings_do_not_count_as_nesting():
    place = "{" * (MOST_BRACES + 1)
    text = f'%0 = stablehlo.constant dense<1.0> : tensor<f32> loc("{place}")\nreturn %0 : tensor<f32>\n'
    import_model(f"func.func @main() -> tensor<f32> {{\n{text}}}")


def test_calls_count_towards_the_nesting_limit():
    """A chain of functions, each of which calls the next one inside of ten branches."""
    text = ""
    for k in range(20):
        whole = nested(10, (BRANCH,), (OTHER,)).replace("@main", f"private @f{k + 1}" if k else "@main")
        call = f"func.call @f{k + 2}(%x10, %p) : (tensor<4xf32>, tensor<i1>) -> tensor<4xf32>"
        text += whole.replace("stablehlo.add %x10, %x10 : tensor<4xf32>", call) if k < 19 else whole
        text += "\n"
    with pytest.raises(CompileError, match="regions are nested more than"):
        import_model(text)
