"""Elementwise ops on edge values: within the bounds of ``tests/conformance/edge_bounds.py`` from exact results.

``pytest -m conformance`` runs every op on every dtype; without the marker a fixed tenth runs. The table of all errors,
with XLA's, is ``docs/edges.md``.
"""

import zlib

import pytest

pytest.importorskip("numba")
pytest.importorskip("mpmath")

import jax
import jax.numpy as jnp
import numpy as np
from conformance.edges import bound_of, cases, measure, run_xla

import aotc
from aotc.vmfb.dtypes import DTYPES, to_numpy

pytestmark = [pytest.mark.cpu]


def parameters():
    part, whole = [pytest.mark.conformance], [pytest.mark.conformance, pytest.mark.slow]
    chosen = lambda name: zlib.crc32(name.encode()) % 10 == 0
    return [pytest.param(c, id=c.name, marks=part if chosen(c.name) else whole) for c in cases()]


@pytest.mark.parametrize("case", parameters())
def test_elementwise_ops_on_edge_values_are_within_their_bounds(case, request, record_property):
    found = measure(case, request.config.getoption("--target"))
    record_property("group", f"edges.{case.operation.name}")
    record_property("worst", found.own)
    problem = f"{case.name} of {found.where} is {found.got}, expected {found.want}: {found.own:.4g} ulp"
    assert not found.count, f"{problem}; bound {bound_of(case)}; {found.count} such"
    assert not found.odd, f"{found.odd} infinities, NaN or poles differ from C99's"


@pytest.mark.parametrize(("name", "want"), [("cosh", np.cosh), ("sinh", np.sinh), ("square", np.square)])
def test_functions_that_jax_expands_are_as_accurate_as_ops(name, want):
    x = np.array([700.0, -700.0, 12.5, 3.0, 1e-3, -0.0])
    with jax.enable_x64(True):
        (got,) = aotc.load(aotc.compile(getattr(jnp, name), x)).invoke("main", x)
    exact = want(x.astype(np.longdouble))
    assert np.all(np.abs(got - exact) <= 2 * np.spacing(np.abs(exact.astype(np.float64))))
    np.testing.assert_array_equal(np.signbit(got), np.signbit(exact))


def test_the_square_of_a_large_complex_number_has_a_finite_zero_part():
    x = np.array([complex(3e38, 3e38)], np.complex64)
    text = "func.func @main(%a: tensor<1xcomplex<f32>>) -> tensor<1xcomplex<f32>> {\n"
    text += "%0 = chlo.square %a : tensor<1xcomplex<f32>> -> tensor<1xcomplex<f32>>\n"
    (got,) = aotc.load(aotc.compile(text + "return %0 : tensor<1xcomplex<f32>>\n}")).invoke("main", x)
    assert got[0].real == 0
    assert got[0].imag == np.inf


FORMATS = ((5, 10), (5, 9), (5, 4), (5, 2), (5, 0), (8, 7), (6, 4), (11, 0), (4, 10), (4, 3), (2, 1), (8, 23))


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f8E5M2", "f8E5M2FNUZ", "f8E4M3FN", "f8E8M0FNU", "f4E2M1FN"])
def test_reduce_precision_of_every_code_is_exact(dtype):
    bits = DTYPES[dtype].bits
    codes = np.arange(1 << bits, dtype="u2" if bits == 16 else "u1").view(to_numpy(dtype))
    kind = f"tensor<{codes.size}x{dtype}>"
    rows = [f"%{n} = stablehlo.reduce_precision %a, format = e{e}m{m} : {kind}" for n, (e, m) in enumerate(FORMATS)]
    names, kinds = (", ".join(x) for x in ([f"%{n}" for n in range(len(rows))], [kind] * len(rows)))
    text = "\n".join([f"func.func @main(%a: {kind}) -> ({kinds}) {{", *rows, f"return {names} : {kinds}", "}"])
    found = aotc.load(aotc.compile(text)).invoke("main", codes)
    for (e, m), got in zip(FORMATS, found, strict=True):
        one = f"func.func @main(%a: {kind}) -> {kind} {{\n{rows[FORMATS.index((e, m))]}\n"
        want = run_xla(f"{one}return %{FORMATS.index((e, m))} : {kind}\n}}", [codes])
        left, right = (np.asarray(x).astype(np.float32) for x in (got, want))
        np.testing.assert_array_equal(left, right, f"e{e}m{m}")
        known = left == left
        np.testing.assert_array_equal(np.signbit(left[known]), np.signbit(right[known]), f"e{e}m{m}")
