"""Programs whose functions call each other many times: their ops are counted before any is copied."""

import numpy as np
import pytest

import aotc
from aotc.diagnostics import CompileError
from aotc.frontend.importer import import_model
from aotc.lowering.passes.inline import MOST_INLINED, inline
from aotc.options import Options

TYPE = "(tensor<4xf32>) -> tensor<4xf32>"


def doubling(depth):
    """Return a program of 2 ** depth sines, each function of which calls the next one twice."""
    calls = "".join(
        f"func.func private @f{n}(%x: tensor<4xf32>) -> tensor<4xf32> {{\n%a = call @f{n + 1}(%x) : {TYPE}\n"
        f"%b = call @f{n + 1}(%a) : {TYPE}\nreturn %b : tensor<4xf32> }}\n"
        for n in range(depth)
    )
    return (
        f"func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {{\n%y = call @f0(%x) : {TYPE}\n"
        f"return %y : tensor<4xf32> }}\n{calls}"
        f"func.func private @f{depth}(%x: tensor<4xf32>) -> tensor<4xf32> {{\n"
        "%a = stablehlo.negate %x : tensor<4xf32>\nreturn %a : tensor<4xf32> }"
    )


@pytest.mark.cpu
def test_calls_within_the_inlining_limit_compile():
    x = np.float32([1, 2, 3, 4])
    np.testing.assert_array_equal(aotc.load(aotc.compile(doubling(5)))(x), x)


@pytest.mark.ir
def test_ops_without_calls_do_not_count_towards_the_inlining_limit(monkeypatch):
    monkeypatch.setattr("aotc.lowering.passes.inline.MOST_INLINED", 3)
    body = "".join(f"%{n + 1} = stablehlo.negate %{n} : tensor<4xf32>\n" for n in range(8)).replace("%0 ", "%x ")
    text = f"func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {{\n{body}return %8 : tensor<4xf32> }}"
    assert inline(import_model(text), Options()).functions["main"].body.ops


@pytest.mark.parametrize("depth", [MOST_INLINED.bit_length(), 40, 300])
def test_calls_beyond_the_inlining_limit_are_refused(depth):
    with pytest.raises(CompileError, match=r"<model>:\d+:6: error: the program has more than 1,048,576 ops"):
        aotc.compile(doubling(depth))
