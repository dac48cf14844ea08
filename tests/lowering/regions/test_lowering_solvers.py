"""cholesky and triangular_solve: every flag, type and shape class, beside JAX and by their residuals in float64."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from support.differential import LEVELS, check
from support.solvers import DTYPES, adjoint, positive, values

import aotc

pytestmark = pytest.mark.cpu

FLAGS = list(itertools.product((0, 1), (0, 1), (0, 1), ("NO_TRANSPOSE", "TRANSPOSE", "ADJOINT")))
EPSILON = {"float32": 1e-5, "float64": 1e-13, "complex64": 1e-5, "complex128": 1e-13}
ELEMENT = {"float32": "f32", "float64": "f64", "complex64": "complex<f32>", "complex128": "complex<f64>",
           "bfloat16": "bf16", "float16": "f16"}  # fmt: skip


@pytest.fixture(autouse=True)
def wide_types():
    """64-bit types, for these tests only."""
    with jax.enable_x64(True):
        yield








def residual(got, want, dtype, n):
    """Compare in double precision, by the size of the largest value."""
    assert np.abs(got - want).max(initial=0) <= EPSILON[dtype] * max(n, 1) * max(np.abs(want).max(initial=0), 1)


def cholesky_text(shape, dtype, lower):
    t = f"tensor<{'x'.join(map(str, shape))}x{ELEMENT[dtype]}>"
    return f"""func.func @main(%a: {t}) -> {t} {{
      %0 = "stablehlo.cholesky"(%a) {{lower = {str(lower).lower()}}} : ({t}) -> {t}
      return %0 : {t}
    }}"""


@pytest.mark.parametrize(
    "shape", [(1, 1), (5, 5), (3, 7, 7), (2, 0, 0), (2, 2, 33, 33), (127, 127), (128, 128), (2, 260, 260)]
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lower", [True, False])
def test_cholesky_factors_multiply_to_the_operand(lower, dtype, shape):
    a = positive(*shape, dtype=dtype)
    (got,) = aotc.load(aotc.compile(cholesky_text(shape, dtype, lower))).invoke("main", a)
    np.testing.assert_array_equal(got, np.tril(got) if lower else np.triu(got))
    wide = got.astype("complex128")
    product = wide @ adjoint(wide) if lower else adjoint(wide) @ wide
    residual(product, a.astype("complex128"), dtype, shape[-1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [4, 257])
def test_a_matrix_that_is_not_positive_definite_gives_nan(dtype, n):
    a = positive(3, n, n, dtype=dtype)
    a[1, 2, 2] = -1
    got = aotc.load(aotc.compile(jnp.linalg.cholesky, a))(a)
    want = np.asarray(jnp.linalg.cholesky(a))
    assert np.isnan(got[1]).any()
    np.testing.assert_allclose(got, want, rtol=1e-3 if n > 4 else 1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_solvers_below_f32_work_in_f32(dtype):
    kind = jnp.dtype(dtype)
    a = positive(4, 4, dtype="float32").astype(kind)
    (got,) = aotc.load(aotc.compile(cholesky_text((4, 4), dtype, True))).invoke("main", a)
    want = np.linalg.cholesky(a.astype("float32")).astype(kind)
    np.testing.assert_allclose(got.astype("float32"), want.astype("float32"), rtol=1e-2, atol=1e-2)


def solve_text(a, b, flags):
    left, lower, unit, transpose = flags
    kinds = [f"tensor<{'x'.join(map(str, x.shape))}x{ELEMENT[x.dtype.name]}>" for x in (a, b)]
    given = (
        f"left_side = {str(bool(left)).lower()}, lower = {str(bool(lower)).lower()}, "
        f"unit_diagonal = {str(bool(unit)).lower()}, transpose_a = #stablehlo<transpose {transpose}>"
    )
    return f"""func.func @main(%a: {kinds[0]}, %b: {kinds[1]}) -> {kinds[1]} {{
      %0 = "stablehlo.triangular_solve"(%a, %b) {{{given}}} : ({kinds[0]}, {kinds[1]}) -> {kinds[1]}
      return %0 : {kinds[1]}
    }}"""


def check_solve(dtype, flags, batch, n, count):
    left, lower, unit, transpose = flags
    a = (values(*batch, n, n, dtype=dtype) * min(0.3, 5 / max(n, 1)) + 2 * np.eye(n)).astype(dtype)
    b = values(*batch, n, count, dtype=dtype, seed=4) if left else values(*batch, count, n, dtype=dtype, seed=4)
    (x,) = aotc.load(aotc.compile(solve_text(a, b, flags))).invoke("main", a, b)
    m = np.tril(a) if lower else np.triu(a)
    m = m.astype("complex128")
    if unit:
        m = m - m * np.eye(n) + np.eye(n)
    m = {"NO_TRANSPOSE": m, "TRANSPOSE": np.swapaxes(m, -1, -2), "ADJOINT": adjoint(m)}[transpose]
    residual(m @ x if left else x @ m, b.astype("complex128"), dtype, 10 * max(n, 1) * max(np.abs(x).max(initial=0), 1))


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("count", [1, 5])
def test_triangular_solves_with_every_flag_have_small_residuals(flags, count):
    check_solve("complex128", flags, (2,), 6, count)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [((), 1, 1), ((), 9, 70), ((2, 3), 4, 2), ((), 0, 3), ((2,), 3, 0)])
def test_triangular_solves_of_every_shape_have_small_residuals(dtype, shape):
    check_solve(dtype, (1, 1, 0, "NO_TRANSPOSE"), *shape)
    check_solve(dtype, (0, 0, 0, "ADJOINT"), *shape)


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("count", [3, 4, 63, 64, 65])
def test_batched_triangular_solves_have_small_residuals(flags, count):
    check_solve("float32", flags, (3,), 7, count)


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("size", [(31, 33), (32, 31), (32, 32), (33, 40)])
def test_triangular_solves_in_loops_and_by_blas_agree(flags, size):
    check_solve("float32", flags, (), *size)


@pytest.mark.parametrize("flags", FLAGS)
def test_large_triangular_solves_call_blas(flags):
    check_solve("complex128", (*flags[:2], 0, flags[3]), (), 200, 193)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("size", [(17, 1), (17, 3), (17, 130), (200, 200)])
def test_triangular_solves_of_every_dtype_flag_and_size_have_small_residuals(dtype, flags, size):
    unit = flags[2] and size[0] == 17  # a large matrix with a unit diagonal is close to singular
    check_solve(dtype, (*flags[:2], unit, flags[3]), (2,), *size)


def solve_with_itself(a):
    """The right-hand side is the matrix, and both are read again."""
    low = jnp.tril(a)
    return jax.lax.linalg.triangular_solve(low, low, left_side=True, lower=True), low + a


def newton(a, b):
    """A solve within a loop: damped steps towards ``a x = b``."""

    def body(state):
        x, n = state
        factor = jnp.linalg.cholesky(a + n * jnp.eye(a.shape[-1], dtype=a.dtype))
        return x + jax.scipy.linalg.cho_solve((factor, True), b - a @ x), n + 1

    return jax.lax.while_loop(lambda s: s[1] < 4, body, (jnp.zeros_like(b), 1))


@pytest.mark.parametrize("level", LEVELS)
def test_solvers_inside_programs_match_jax(level):
    a, b = positive(6, 6, dtype="float32"), values(6, 2, dtype="float32")
    check(solve_with_itself, [a], level, 10)
    check(newton, [a, b], level, 10)
    check(lambda p, a, b: jax.lax.cond(p, lambda: jnp.linalg.cholesky(a) @ b, lambda: b), [np.True_, a, b], level, 10)


def test_cholesky_solves_of_symbolic_sizes_have_small_residuals():
    a, b = positive(3, 300, 300, dtype="float64"), values(3, 300, 2, dtype="float64")
    dims = export.symbolic_shape("k, n")

    def solve(a, b):
        return jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(a), True), b)

    shapes = [jax.ShapeDtypeStruct((*dims, dims[1]), "float64"), jax.ShapeDtypeStruct((*dims, 2), "float64")]
    module = aotc.load(aotc.compile(jax.jit(solve), *shapes))
    for k, n in ((3, 5), (1, 2), (2, 1), (2, 255), (3, 300)):
        got = module(a[:k, :n, :n], b[:k, :n])
        np.testing.assert_allclose(a[:k, :n, :n] @ got, b[:k, :n], rtol=1e-8, atol=1e-8)


def test_triangular_solves_of_symbolic_right_hand_sides_have_small_residuals():
    n, m = export.symbolic_shape("n, m")
    low = np.tril(positive(260, 260, dtype="float32"))
    b = values(260, 230, dtype="float32")

    def solve(a, b):
        left = jax.lax.linalg.triangular_solve(a, b, left_side=True, lower=True)
        return left, jax.lax.linalg.triangular_solve(a, b.T, lower=True)

    shapes = [jax.ShapeDtypeStruct((n, n), "float32"), jax.ShapeDtypeStruct((n, m), "float32")]
    module = aotc.load(aotc.compile(jax.jit(solve), *shapes))
    for n, m in ((1, 1), (7, 100), (200, 20), (260, 230)):
        left, right = module(low[:n, :n], b[:n, :m])
        np.testing.assert_allclose(low[:n, :n].astype("float64") @ left, b[:n, :m], rtol=2e-3, atol=2e-3)
        np.testing.assert_allclose(right @ low[:n, :n].astype("float64"), b[:n, :m].T, rtol=2e-3, atol=2e-3)
