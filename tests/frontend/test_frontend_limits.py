"""Both sides of the thresholds of the frontend and of the tensor IR's text."""

import numpy as np
import pytest

from aotc.frontend.constants import _own
from aotc.frontend.importer import import_model
from aotc.frontend.limits import I32_TERMS, OWN_BYTES, SHAPE_ELEMENTS
from aotc.frontend.shape_values import trackable
from aotc.ir.limits import INLINE_ELEMENTS
from aotc.ir.tensor_ir import TensorType, walk
from aotc.ir.tensor_text import print_module

pytestmark = pytest.mark.ir


@pytest.mark.parametrize("more", [0, 1])
def test_large_constants_are_not_copied(more):
    view = np.zeros(OWN_BYTES + more, np.uint8)
    assert (_own(view) is view) == (more > 0)


@pytest.mark.parametrize("more", [0, 1])
def test_small_integer_tensors_are_followed_as_dims(more):
    assert trackable(TensorType("i32", (SHAPE_ELEMENTS + more,))) == (more == 0)


@pytest.mark.parametrize("more", [0, 1])
def test_small_constants_are_written_out(more):
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
def test_long_sums_of_products_are_not_i32(more):
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
