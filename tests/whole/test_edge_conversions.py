"""Conversions between all element types, ``clamp`` and ``select`` on edge values, beside exact arithmetic.

``tests/conformance/edge_conversions.py`` has the numbers and the reference. A program converts one type to all of them.
"""

import pytest

pytest.importorskip("numba")

import numpy as np
from conformance.edge_conversions import bounds, clamped, conversions, converted, differ, sources

import aotc
from aotc.frontend.importer import import_model
from aotc.ir.semantics.run import interpret
from aotc.vmfb.dtypes import DTYPES

pytestmark = [pytest.mark.cpu, pytest.mark.conformance]

FEW = {"i1", "i4", "u8", "u32", "i64", "u64", "f4E2M1FN", "f8E5M2", "f8E8M0FNU", "f16", "bf16", "f32", "f64", "c128"}
SOURCES = [pytest.param(n, marks=() if n in FEW else pytest.mark.slow) for n in DTYPES]


def run(text, *arrays):
    return aotc.load(aotc.compile(text)).invoke("main", *arrays), interpret(import_model(text), *arrays)


def check(what, x, got, want):
    assert got.dtype == want.dtype, what
    wrong = differ(got, want)
    examples = [f"{x[n]} is {got[n]}, expected {want[n]}" for n in np.flatnonzero(wrong)[:4]]
    assert not wrong.any(), f"{what}, {wrong.sum()} of {wrong.size}: {'; '.join(examples)}"


@pytest.mark.parametrize("source", SOURCES)
def test_conversions_between_all_dtypes_are_exact(source, record_property):
    record_property("group", "edges.convert")
    x = sources(source)
    compiled, interpreted = run(conversions(x, source, list(DTYPES)), x)
    for target, got, reference in zip(DTYPES, compiled, interpreted, strict=True):
        want = converted(x, target)
        check(f"{source} to {target}", x, np.asarray(got), want)
        check(f"{source} to {target} in the interpreter", x, np.asarray(reference), want)


@pytest.mark.parametrize(("source", "values", "want"), [
    ("i64", [2**61 + 2**53 + 1, -(2**62) - 2**54 - 1], [2.0**61 + 2.0**54, -(2.0**62) - 2.0**55]),
    ("u64", [2**61 + 2**53 + 1], [2.0**61 + 2.0**54]),
    ("u32", [2**31 + 2**23 + 1], [2.0**31 + 2.0**24]),
    ("f64", [2.0**61 + 2.0**53 + 2.0**9], [2.0**61 + 2.0**54]),
])  # fmt: skip
def test_conversions_to_bf16_round_just_above_half_up(source, values, want):
    x = np.array(values, DTYPES[source].numpy)
    for ((got,),) in ([r] for r in run(conversions(x, source, ["bf16"]), x)):
        assert np.asarray(got).astype(np.float64).tolist() == want


def test_nonzero_numbers_convert_to_true():
    x = np.array([1e-300, 5e-324, 0.0, -0.0])
    for ((got,),) in ([r] for r in run(conversions(x, "f64", ["i1"]), x)):
        assert np.asarray(got).tolist() == [True, True, False, False]


def test_false_converts_to_nan_in_power_of_two_formats():
    text = """func.func @main(%a: tensor<2xi1>) -> tensor<2xf32> {
      %0 = stablehlo.convert %a : (tensor<2xi1>) -> tensor<2xf8E8M0FNU>
      %1 = stablehlo.convert %0 : (tensor<2xf8E8M0FNU>) -> tensor<2xf32>
      return %1 : tensor<2xf32> }"""
    for (got,) in run(text, np.array([False, True])):
        np.testing.assert_array_equal(got, np.array([np.nan, 1.0], np.float32))


ORDERED = [p for p in SOURCES if DTYPES[p.values[0]].kind != "c"]


@pytest.mark.parametrize("dtype", ORDERED)
def test_clamp_and_select_on_edge_values_are_exact(dtype, record_property):
    record_property("group", "edges.clamp")
    text, arrays = bounds(dtype)
    chosen, low, x, high = arrays
    for clamp, select in run(text, *arrays):
        check(f"clamp of {dtype}", list(zip(low, x, high, strict=True)), np.asarray(clamp), clamped(low, x, high))
        want = np.where(chosen, low, x)
        assert np.array_equal(np.asarray(select).view("u1"), want.view("u1")) or DTYPES[dtype].bits < 8
        check(f"select of {dtype}", x, np.asarray(select), want)
