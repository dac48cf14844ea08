"""Ops of quantized types: each class beside NumPy on the numbers that the integers stand for, and StableHLO's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo
from support.differential import LEVELS
from support.quantized import (
    AXIS,
    CENTERED,
    COARSE,
    NIBBLES,
    SYMMETRIC,
    WIDE,
    A,
    B,
    numbers,
    quantized,
    storage,
    tensor,
)  # fmt: skip

import aotc
from aotc.diagnostics import CompileError
from aotc.frontend.contexts import make_context
from aotc.frontend.importer import import_model
from aotc.frontend.quantized.types import parse_quantization
from aotc.ir.semantics.run import interpret
from aotc.vmfb.dtypes import to_numpy

pytestmark = pytest.mark.cpu


HELP = """
%two = stablehlo.constant dense<2> : tensor<i32>
%rows = stablehlo.constant dense<[[5], [1]]> : tensor<2x1xi32>
%row = stablehlo.constant dense<[false, false, false, true]> : tensor<4xi1>
%odd = stablehlo.broadcast_in_dim %row, dims = [1] : (tensor<4xi1>) -> tensor<6x4xi1>
"""


@dataclass(frozen=True)
class Case:
    """An op of ``%a`` (and ``%b``) of quantized types: its line, its meaning on floats, operand and result types."""

    line: str
    meaning: Callable[..., Any]
    operands: tuple[tuple[str, tuple[int, ...]], ...]
    result: tuple[str, tuple[int, ...]]

    def text(self) -> str:
        params = ", ".join(f"%{'ab'[n]}: {tensor(t, *s)}" for n, (t, s) in enumerate(self.operands))
        result = tensor(self.result[0], *self.result[1])
        return self._module(params, "", result, f"return %r : {result}")

    def closed_text(self, arrays: list[np.ndarray]) -> str:
        """Return a module without arguments whose result are the integers, as StableHLO's interpreter wants it."""
        body = ""
        for n, (x, (t, s)) in enumerate(zip(arrays, self.operands)):
            plain = tensor(t, *s) if t == "f32" else storage(t, *s)
            body += f"%c{n} = stablehlo.constant dense<{x.tolist()}> : {plain}\n"
            body += f"%{'ab'[n]} = stablehlo.bitcast_convert %c{n} : ({plain}) -> {tensor(t, *s)}\n"
        result, plain = tensor(self.result[0], *self.result[1]), storage(*self.result[:1], *self.result[1])
        end = f"%q = stablehlo.bitcast_convert %r : ({result}) -> {plain}\nreturn %q : {plain}"
        return self._module("", body, plain, end)

    def _module(self, params: str, body: str, result: str, end: str) -> str:
        types = {"$R": tensor(self.result[0], *self.result[1])}
        types |= {f"${'AB'[n]}": tensor(t, *s) for n, (t, s) in enumerate(self.operands)}
        line = self.line
        for name, t in types.items():
            line = line.replace(name, t)
        return f"module {{ func.func public @main({params}) -> {result} {{\n{HELP}{body}%r = {line}\n{end} }} }}"


def like(t: str, *shape: int) -> tuple[str, tuple[int, ...]]:
    return t, shape


def _unary() -> dict[str, Case]:
    with_domain = {
        "abs": np.abs, "negate": np.negative, "cosine": np.cos, "sine": np.sin, "tan": np.tan, "tanh": np.tanh,
        "exponential": np.exp, "exponential_minus_one": np.expm1, "cbrt": np.cbrt, "floor": np.floor, "ceil": np.ceil,
        "sign": np.sign, "logistic": lambda x: 1 / (1 + np.exp(-x)), "round_nearest_even": np.rint,
        "round_nearest_afz": lambda x: np.copysign(np.floor(np.abs(x) + 0.5), x), "log": np.log, "sqrt": np.sqrt,
        "log_plus_one": np.log1p, "rsqrt": lambda x: 1 / np.sqrt(x),
    }  # fmt: skip
    return {
        name: Case(f"stablehlo.{name} %a : ($A) -> $R", f, (like(A, 16, 4),), like(B, 16, 4))
        for name, f in with_domain.items()
    }


def _binary() -> dict[str, Case]:
    two = {"add": np.add, "subtract": np.subtract, "multiply": np.multiply, "divide": np.divide,
           "maximum": np.maximum, "minimum": np.minimum, "atan2": np.arctan2, "remainder": np.fmod}  # fmt: skip
    found = {
        name: Case(f"stablehlo.{name} %a, %b : ($A, $B) -> $R", f, (like(A, 6, 4), like(B, 6, 4)), like(A, 6, 4))
        for name, f in two.items()
    }
    found["add_per_axis"] = Case(
        "stablehlo.add %a, %b : ($A, $B) -> $R", np.add, (like(AXIS, 6, 4), like(AXIS, 6, 4)), like(AXIS, 6, 4)
    )
    found["requantize"] = Case(
        "stablehlo.uniform_quantize %a : ($A) -> $R", lambda x: x, (like(AXIS, 6, 4),), like(B, 6, 4)
    )
    return found


def _moves() -> dict[str, Case]:
    transposed = AXIS.replace("f32:1", "f32:0")
    return {
        "transpose": Case("stablehlo.transpose %a, dims = [1, 0] : ($A) -> $R", np.transpose, (like(AXIS, 6, 4),),
                          like(transposed, 4, 6)),
        "reshape": Case("stablehlo.reshape %a : ($A) -> $R", lambda x: x.reshape(3, 8), (like(A, 6, 4),),
                        like(A, 3, 8)),
        "reverse": Case("stablehlo.reverse %a, dims = [0] : $A", lambda x: x[::-1], (like(A, 6, 4),), like(A, 6, 4)),
        "slice": Case("stablehlo.slice %a [1:5:2, 1:4] : ($A) -> $R", lambda x: x[1:5:2, 1:4], (like(A, 6, 4),),
                      like(A, 2, 3)),
        "broadcast": Case("stablehlo.broadcast_in_dim %a, dims = [1] : ($A) -> $R",
                          lambda x: np.broadcast_to(x, (5, 4)), (like(AXIS.replace("f32:1", "f32:0"), 4),),
                          like(AXIS, 5, 4)),
        "concatenate": Case("stablehlo.concatenate %a, %b, dim = 0 : ($A, $B) -> $R",
                            lambda x, y: np.concatenate([x, y]), (like(A, 2, 4), like(A, 3, 4)), like(A, 5, 4)),
        "pad": Case("stablehlo.pad %a, %b, low = [1, 0], high = [0, 2], interior = [0, 1] : ($A, $B) -> $R",
                    _padded, (like(A, 3, 4), like(A)), like(A, 4, 9)),
        "dynamic_slice": Case("stablehlo.dynamic_slice %a, %two, %two, sizes = [3, 2]"
                              " : ($A, tensor<i32>, tensor<i32>) -> $R",
                              lambda x: x[2:5, 2:4], (like(A, 6, 4),), like(A, 3, 2)),
        "select": Case("stablehlo.select %odd, %a, %b : tensor<6x4xi1>, $A",
                       lambda x, y: np.where(np.arange(4) > 2, x, y), (like(A, 6, 4), like(A, 6, 4)), like(A, 6, 4)),
        "gather": Case('"stablehlo.gather"(%a, %rows) <{dimension_numbers = #stablehlo.gather<offset_dims = [1],'
                       " collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>, slice_sizes ="
                       " array<i64: 1, 4>}> : ($A, tensor<2x1xi32>) -> $R",
                       lambda x: x[[5, 1]], (like(A, 6, 4),), like(A, 2, 4)),
    }  # fmt: skip


def _padded(x: np.ndarray, value: np.ndarray) -> np.ndarray:
    result = np.full((4, 9), value)
    result[1:, 0:7:2] = x
    return result


def _products() -> dict[str, Case]:
    dot = "stablehlo.dot_general %a, %b, contracting_dims = [1] x [0] : ($A, $B) -> $R"
    conv = ("stablehlo.convolution(%a, %b) dim_numbers = [b, 0, f]x[0, i, o]->[b, 0, f], window = {stride = [2],"
            " pad = [[1, 1]], lhs_dilate = [2], rhs_dilate = [1]} {batch_group_count = 1 : i64,"
            " feature_group_count = 1 : i64} : ($A, $B) -> $R")  # fmt: skip
    kernel = SYMMETRIC.replace("f32:1", "f32:2")
    result = WIDE.replace("f32,", "f32:1,").replace("0.00635", "{0.0025,0.005,0.0125}")
    return {
        "dot": Case(dot, np.matmul, (like(A, 5, 16), like(CENTERED, 16, 3)), like(WIDE, 5, 3)),
        "dot_of_batches": Case(
            "stablehlo.dot_general %a, %b, batching_dims = [1] x [2], contracting_dims = [0] x [1] : ($A, $B) -> $R",
            lambda x, y: np.einsum("kbm,nkb->bmn", x, y), (like(A, 16, 3, 5), like(CENTERED, 2, 16, 3)),
            like(COARSE, 3, 5, 2)),
        "dot_of_u8": Case(dot, np.matmul, (like("!quant.uniform<u8:f32, 0.05:130>", 5, 16), like(SYMMETRIC, 16, 3)),
                          like(COARSE, 5, 3)),
        "dot_of_i4": Case(dot, np.matmul, (like("!quant.uniform<i4:f32, 0.5:-3>", 5, 16), like(NIBBLES, 16, 3)),
                          like(COARSE, 5, 3)),
        "convolution_of_u8": Case(
            conv, _convolved, (like("!quant.uniform<u8:f32, 0.05:3>", 2, 9, 4), like(CENTERED, 3, 4, 3)),
            like(COARSE, 2, 9, 3)),
        "dot_long": Case(dot, np.matmul, (like(A, 2, 70000), like(CENTERED, 70000, 2)),
                         like("!quant.uniform<i32:f32, 1.27>", 2, 2)),
        "depthwise": Case(conv.replace("feature_group_count = 1", "feature_group_count = 4"), _depthwise,
                          (like(A, 2, 9, 4), like(CENTERED, 3, 1, 4)), like(COARSE, 2, 9, 4)),
        "dot_to_i8": Case(dot, np.matmul, (like(A, 5, 16), like(CENTERED, 16, 3)), like(COARSE, 5, 3)),
        "dot_per_axis": Case(dot, np.matmul, (like(A, 5, 16), like(SYMMETRIC, 16, 3)), like(result, 5, 3)),
        "dot_hybrid": Case(dot, np.matmul, (like("f32", 5, 16), like(SYMMETRIC, 16, 3)), like("f32", 5, 3)),
        "convolution": Case(conv, _convolved, (like(A, 2, 9, 4), like(kernel, 3, 4, 3)),
                            like(result.replace("f32:1", "f32:2"), 2, 9, 3)),
    }  # fmt: skip


def _windows(x: np.ndarray) -> np.ndarray:
    spread = np.zeros((x.shape[0], 19, x.shape[2]))
    spread[:, 1:18:2] = x
    return np.lib.stride_tricks.sliding_window_view(spread, 3, 1)[:, ::2]


def _convolved(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    return np.einsum("bncw,wco->bno", _windows(x), w)


def _depthwise(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    return np.einsum("bncw,wc->bnc", _windows(x), w[:, 0])


CASES = _unary() | _binary() | _moves() | _products()


def arguments(case: Case) -> list[np.ndarray]:
    """Return integers of the whole range, or floats for an operand that is not quantized."""
    rng = np.random.default_rng(0)
    given = []
    for t, shape in case.operands:
        if t == "f32":
            given.append(rng.standard_normal(shape).astype(np.float32))
            continue
        q = parse_quantization(t)
        given.append(rng.integers(q.low, q.high + 1, shape).astype(to_numpy(q.storage)))
    return given


def expected(case: Case, arrays: list[np.ndarray]) -> np.ndarray:
    floats = [x if t == "f32" else numbers(x, t) for x, (t, _) in zip(arrays, case.operands)]
    with np.errstate(all="ignore"):
        value = np.asarray(case.meaning(*[f.astype(np.float64) for f in floats]))
    t, _ = case.result
    return value.astype(np.float32) if t == "f32" else quantized(value, t)


def agree(got: np.ndarray, want: np.ndarray) -> None:
    """Compare; a number in the middle between two integers may go to either, by an error of its computation."""
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    if got.dtype == np.float32:
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
        return
    steps = np.abs(got.astype(np.int64) - want.astype(np.int64))
    allowed = np.maximum(1, np.abs(want.astype(np.int64)) >> 22)
    assert (steps <= allowed).all(), (got[steps > allowed][:5], want[steps > allowed][:5])
    assert (steps != 0).mean() <= (0.03 if got.dtype.itemsize == 1 else 1)


@pytest.mark.parametrize("level", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 1, 3))])
@pytest.mark.parametrize("name", CASES)
def test_quantized_ops_agree_with_float_arithmetic(name, level):
    case = CASES[name]
    arrays = arguments(case)
    want = expected(case, arrays)
    (got,) = aotc.load(aotc.compile(case.text().encode(), opt_level=level)).invoke("main", *arrays)
    agree(got, want)
    if level == 2:
        agree(interpret(import_model(case.text()), *arrays)[0], want)


NOT_COMPARED = {"dot_hybrid", "dot_to_i8", "dot_of_batches", "depthwise", "dot_long", "reverse"}
NOT_COMPARED |= {"dot_of_u8", "dot_of_i4", "convolution_of_u8"}
"""Floats; it rounds to i8 after each product; it is slow; it refuses it."""


@pytest.mark.parametrize("name", sorted(CASES.keys() - NOT_COMPARED))
def test_quantized_ops_agree_with_the_stablehlo_interpreter(name):
    case = CASES[name]
    arrays = arguments(case)
    text = case.closed_text(arrays)
    with make_context():
        want = np.asarray(stablehlo.eval_module(ir.Module.parse(text), [])[0])
    (got,) = aotc.load(aotc.compile(text.encode())).invoke("main")
    agree(got, want)


def test_bytecode_and_portable_artifacts_preserve_quantized_types():
    case = CASES["convolution"]
    arrays = arguments(case)
    with make_context():
        module = ir.Module.parse(case.text())
        artifact = stablehlo.serialize_portable_artifact(module, stablehlo.get_current_version())
    for data in (case.text().encode(), artifact):
        (got,) = aotc.load(aotc.compile(data)).invoke("main", *arrays)
        agree(got, expected(case, arrays))


@pytest.mark.parametrize("name", [
    "dot", "dot_per_axis", "dot_of_batches", "convolution", "depthwise", "dot_of_u8", "dot_of_i4", "convolution_of_u8",
])  # fmt: skip
def test_quantized_matmuls_compute_on_integers(name):
    body = import_model(CASES[name].text()).functions["main"].body
    (found,) = [op for op in body.ops if op.name in ("dot_general", "convolution")]
    assert [v.type.dtype for v in (*found.operands, found.result)] == ["i8", "i8", "i32"]


@pytest.mark.parametrize("level", LEVELS)
def test_quantized_ops_take_a_dynamic_batch(level):
    case = CASES["dot_per_axis"]
    text = case.text().replace("tensor<5x16x", "tensor<?x16x").replace("tensor<5x3x", "tensor<?x3x")
    module = aotc.load(aotc.compile(text.encode(), opt_level=level))
    whole, weights = arguments(case)
    for rows in (1, 4, 5):
        (got,) = module.invoke("main", whole[:rows], weights)
        agree(got, expected(case, [whole[:rows], weights]))
    text = CASES["add_per_axis"].text().replace("tensor<6x4x!", "tensor<?x4x!")
    module = aotc.load(aotc.compile(text.encode(), opt_level=level))
    a, b = arguments(CASES["add_per_axis"])
    for rows in (0, 2, 6):
        (got,) = module.invoke("main", a[:rows], b[:rows])
        np.testing.assert_array_equal(got, quantized(numbers(a[:rows], AXIS) + numbers(b[:rows], AXIS), AXIS))


@pytest.mark.parametrize("place", ["argument", "operand", "result"])
@pytest.mark.parametrize("element", ["f32", "!quant.uniform<i8:f32,0.5>", "!quant.uniform<i8:f32:0,{0.5,0.25}>"])
def test_a_tensor_without_rank_is_refused(element, place):
    t = f"tensor<*x{element}>"
    text = {
        "argument": f"func.func @main(%a: {t}) -> {t} {{\n return %a : {t}\n}}",
        "operand": f"func.func @main(%a: {t}) -> {t} {{\n %y = stablehlo.custom_call @f(%a) : ({t}) -> {t}\n"
        f" return %y : {t}\n}}",
        "result": f"func.func @main(%a: tensor<2xf32>) -> {t} {{\n"
        f" %y = stablehlo.custom_call @f(%a) : (tensor<2xf32>) -> {t}\n return %y : {t}\n}}",
    }[place]
    with pytest.raises(CompileError, match=r"error: .*tensor<\*x"):
        import_model(text)
