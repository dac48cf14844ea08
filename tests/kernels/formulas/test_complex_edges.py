"""Complex functions at the edges: signs of zeros, powers beyond the range, and the cases that were wrong once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("numba")
pytest.importorskip("mpmath")

from conformance.edge_references import OPERATIONS
from conformance.edge_values import complexes
from conformance.edges import EdgeCase, text

import aotc

pytestmark = pytest.mark.cpu

NAMED = {o.name: o for o in OPERATIONS}
INF, NAN = np.inf, np.nan
# NumPy's functions of long double are the C library's, which follow annex G.
C = {
    "exp": np.exp,
    "sqrt": np.sqrt,
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "tanh": np.tanh,
    "sinh": np.sinh,
    "cosh": np.cosh,
    "acos": np.arccos,
    "acosh": np.arccosh,
    "asin": np.arcsin,
    "asinh": np.arcsinh,
    "atan": np.arctan,
    "atanh": np.arctanh,
}


def call(name, dtype, *args):
    source = text(EdgeCase(NAMED[name], dtype), args[0].size)
    return np.asarray(aotc.load(aotc.compile(source)).invoke("main", *args)[0])


@pytest.mark.parametrize("dtype", ["c64", "c128"])
@pytest.mark.parametrize("name", C)
def test_parts_that_are_0_have_the_signs_of_the_c_library(name, dtype):
    z = complexes(dtype)
    z = z[np.isfinite(z) & (np.abs(z) < 100)]
    got = call(name, dtype, z)
    with np.errstate(all="ignore"):
        want = C[name](z.astype(np.clongdouble))
    assert (want.imag == 0).any()
    for part in (np.real, np.imag):
        zero = (part(want) == 0) & (part(got) == 0)
        np.testing.assert_array_equal(np.signbit(part(got)[zero]), np.signbit(part(want)[zero]))


TRACED = {
    "exp": jnp.exp, "sin": jnp.sin, "cos": jnp.cos, "tan": jnp.tan, "tanh": jnp.tanh, "sinh": jnp.sinh,
    "cosh": jnp.cosh,
}  # fmt: skip
SIDES = (NAN, INF, -INF, 0.0, -0.0, 1.5, -2.0)


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@pytest.mark.parametrize("name", TRACED)
def test_traced_functions_of_infinities_and_nan_are_those_of_annex_g(name, dtype):
    """JAX's lowering of sin and cos makes NaN of them. Signs next to NaN, or of unknown directions, are not defined."""
    z = np.array([complex(a, b) for a in SIDES for b in SIDES], dtype)
    with jax.enable_x64(True), np.errstate(all="ignore"):
        got, want = aotc.load(aotc.compile(TRACED[name], z))(z), C[name](z.astype(np.clongdouble))
    for part in (np.real, np.imag):
        x, y = part(np.asarray(got)).astype("f8"), part(want).astype("f8")
        np.testing.assert_allclose(np.abs(x), np.abs(y), rtol=1e-6)
        signed = ~np.isnan(want) & (np.isfinite(z.real) | np.isfinite(z.imag))
        np.testing.assert_array_equal(np.signbit(x[signed]), np.signbit(y[signed]))


@pytest.mark.parametrize("dtype", ["c64", "c128"])
def test_powers_beyond_the_range_are_infinite_or_0(dtype):
    z = complexes(dtype)
    z = z[np.isfinite(z) & (z != 0)]
    a, b = (g.reshape(-1) for g in np.meshgrid(z[::3], z[::3]))
    got = call("pow", dtype, a, b)
    with np.errstate(all="ignore"):
        exponent = (b.astype(np.clongdouble) * np.log(a.astype(np.clongdouble))).real
    limits = np.finfo(a.dtype)
    above, below = exponent > np.log(limits.max) + 1, exponent < np.log(limits.smallest_subnormal) - 1
    assert above.sum() > 1000
    assert below.sum() > 1000
    assert np.isinf(np.abs(got[above])).all()
    assert (got[below] == 0).all()


CASES = [
    ("tanh", (complex(50, INF),), complex(NAN, NAN)),
    ("tanh", (complex(-INF, 3),), complex(-1, 0)),
    ("div", (1 + 2j, complex(INF, NAN)), 0),
    ("div", (complex(INF, NAN), 1 + 2j), complex(INF, -INF)),
    ("div", (complex(INF, 1), 2 + 0j), complex(INF, NAN)),
    ("pow", (2 + 1j, complex(INF, 0)), complex(INF, NAN)),
    ("pow", (2 + 1j, complex(-INF, 0)), 0),
    ("pow", (0j, -1 + 0j), complex(INF, 0)),
    ("pow", (complex(INF, 1), complex(1, INF)), complex(NAN, NAN)),
    ("pow", (complex(INF, 0), 2 + 0j), complex(INF, 0)),
    ("pow", (complex(NAN, 1), 0j), 1),
    ("cos", (complex(INF, 0),), complex(NAN, 0)),
    ("sinh", (complex(INF, NAN),), complex(INF, NAN)),
]


@pytest.mark.parametrize("dtype", ["c64", "c128"])
@pytest.mark.parametrize(("name", "args", "want"), CASES)
def test_values_of_the_rule(name, args, want, dtype):
    kind = np.complex64 if dtype == "c64" else np.complex128
    (got,) = call(name, dtype, *(np.array([a], kind) for a in args))
    np.testing.assert_array_equal([got.real, got.imag], [np.real(want), np.imag(want)])


def test_logarithms_of_what_is_scaled_to_1():
    """The scale of large and small numbers is 2**600; what it takes to 1 was taken for a number near 1."""
    z = np.array([2.0**600 * (1 + 1e-9j), -(2.0**600) * 1.1j, 2.0**-600 * (0.9 + 0.1j), 2.0**-600 + 0j])
    for name in ("log", "log1p"):
        want = np.log(z.astype(np.clongdouble)) if name == "log" else np.log(1 + z.astype(np.clongdouble))
        np.testing.assert_allclose(call(name, "c128", z), want.astype(complex), rtol=1e-15, atol=1e-170)


BESIDE_CUTS = np.array([complex(x, y) for x in (-2.0, 2.0, -0.5, 0.0, -0.0) for y in (0.0, -0.0, 3.0, -3.0)])


@pytest.mark.parametrize("name", ["acos", "acosh", "asin", "asinh", "atan", "atanh"])
@pytest.mark.parametrize("dtype", ["c64", "c128"])
def test_inverse_functions_are_on_the_side_of_a_cut_that_a_zero_says(name, dtype):
    z = BESIDE_CUTS.astype(np.complex64 if dtype == "c64" else complex)
    got, want = call(name, dtype, z), C[name](z.astype(np.clongdouble))
    tolerance = 2e-7 if dtype == "c64" else 1e-15
    for part in (np.real, np.imag):
        np.testing.assert_allclose(part(got), part(want).astype(part(got).dtype), rtol=tolerance)
        np.testing.assert_array_equal(np.signbit(part(got)), np.signbit(part(want)))


def test_inverse_functions_of_an_export_and_beside_real_ones():
    """jax.export writes composites of some; of real numbers they stay jaxlib's expansions."""
    z = np.array([complex(-2, -0.0), complex(1e-30, 1e-30), complex(3e38, 3e38)], np.complex64)
    x = np.array([0.5, -1.0, 1.0], np.float32)
    for source in (lambda x, z: (jax.lax.acos(x), jax.lax.acos(z)), TWO):
        real, got = aotc.load(aotc.compile(source, *((x, z) if callable(source) else ()))).invoke("main", x, z)
        np.testing.assert_allclose(real, np.arccos(x), rtol=3e-7)
        np.testing.assert_allclose(got, np.arccos(z.astype(np.clongdouble)).astype(np.complex64), rtol=2e-7)


TWO = """func.func @main(%x: tensor<3xf32>, %z: tensor<3xcomplex<f32>>) -> (tensor<3xf32>, tensor<3xcomplex<f32>>) {
  %0 = chlo.acos %x : tensor<3xf32> -> tensor<3xf32>
  %1 = chlo.acos %z : tensor<3xcomplex<f32>> -> tensor<3xcomplex<f32>>
  return %0, %1 : tensor<3xf32>, tensor<3xcomplex<f32>>
}"""
