"""LAPACK: every routine, type and batch beside XLA (which calls the same routines), and by residuals in float64."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
import numpy as np
import pytest
from jax import export
from jax._src.lax import linalg as lax_linalg
from support.differential import LEVELS, check, flat
from support.lapack import agree
from support.solvers import DTYPES, adjoint, positive, values

import aotc
from aotc.frontend.importer import import_model
from aotc.ir.opset import OPS, RuleError
from aotc.ir.semantics.run import interpret
from aotc.ir.semantics.verify import verify
from aotc.ir.tensor.ir import TensorType
from aotc.ir.tensor.text import parse_module, print_module
from aotc.vmfb.host import lapack

pytestmark = pytest.mark.cpu



@pytest.fixture(autouse=True)
def wide_types():
    """64-bit types, for these tests only."""
    with jax.enable_x64(True):
        yield




def factor_all(x):
    """Every factorization of a matrix of any shape."""
    pivots = jnp.zeros((*x.shape[:-2], x.shape[-1]), "int32").at[..., 1].set(1)
    return [
        lax_linalg.lu(x),
        lax_linalg.geqrf(x),
        lax_linalg.geqp3(x, pivots),
        lax_linalg.svd(x, full_matrices=True),
        lax_linalg.svd(x, full_matrices=False),
        lax_linalg.svd(x, compute_uv=False),
        lax_linalg.svd(x, full_matrices=False, algorithm=lax_linalg.SvdAlgorithm.QR),
        *[jnp.linalg.qr(x, mode=mode) for mode in ("reduced", "complete", "r", "raw")],
    ]


def reduce_all(a):
    """Every eigenvalue routine and reduction of a square matrix."""
    hermitian = a + jnp.conj(jnp.swapaxes(a, -1, -2))
    return [
        *[lax_linalg.eigh(hermitian, lower=low, symmetrize_input=False) for low in (True, False)],
        *[lax_linalg.tridiagonal(hermitian, lower=low) for low in (True, False)],
        lax_linalg.eig(a),
        lax_linalg.eig(a, compute_left_eigenvectors=False, compute_right_eigenvectors=False),
        lax_linalg.schur(a),
        lax_linalg.schur(a, compute_schur_vectors=False),
        lax_linalg.hessenberg(a),
    ]


def apply_all(r, c, d, diagonals, b):
    """Products with the orthogonal factor, and the tridiagonal solve."""
    reflectors = lax_linalg.geqrf(r)
    low, middle, high = diagonals
    products = [
        lax_linalg.ormqr(*reflectors, side, left=left, transpose=transpose)
        for side, left in ((c, True), (d, False))
        for transpose in (False, True)
    ]
    return [*products, lax_linalg.tridiagonal_solve(low, middle + 4, high, b)]


def applied(dtype, batch):
    """Arguments of :func:`apply_all`."""
    diagonals = tuple(values(*batch, 5, dtype=dtype, seed=s) for s in (1, 2, 3))
    shapes = [(6, 4), (6, 3), (3, 6)]
    return [*(values(*batch, *s, dtype=dtype) for s in shapes), diagonals, values(*batch, 5, 2, dtype=dtype)]


def compiled(function, args):
    """Compile, run, and return the flat results."""
    module = aotc.load(aotc.compile(jax.jit(function), *args, verify_each=True))
    return module.invoke("main", *map(np.asarray, jax.tree.leaves(args)))


@pytest.mark.parametrize("batch", [(), (2,), pytest.param((2, 3), marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(6, 4), pytest.param((5, 5), marks=pytest.mark.slow), (3, 6)])
def test_lapack_factorizations_match_xla(dtype, batch, shape):
    args = [values(*batch, *shape, dtype=dtype)]
    agree(compiled(factor_all, args), jax.jit(factor_all)(*args))


@pytest.mark.parametrize("batch", [(), (2,), pytest.param((2, 3), marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_lapack_eigenvalues_and_reductions_match_xla(dtype, batch):
    args = [values(*batch, 5, 5, dtype=dtype)]
    agree(compiled(reduce_all, args), jax.jit(reduce_all)(*args))


@pytest.mark.parametrize("batch", [(), (2,), pytest.param((2, 3), marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_lapack_products_and_tridiagonal_solves_match_xla(dtype, batch):
    args = applied(dtype, batch)
    agree(compiled(apply_all, args), jax.jit(apply_all)(*args))


@pytest.mark.parametrize("dtype", ["float64", "complex64"])
def test_lapack_ops_print_and_the_reference_matches_xla(dtype):
    cases = [(factor_all, [values(2, 4, 3, dtype=dtype)]), (reduce_all, [values(2, 4, 4, dtype=dtype)])]
    for function, args in [*cases, (apply_all, applied(dtype, (2,)))]:
        module = import_model(jax.jit(function), *args)
        assert not verify(module)
        text = print_module(module, full=True)
        assert print_module(parse_module(text), full=True) == text
        agree(interpret(module, *jax.tree.leaves(args)), jax.jit(function)(*args))


@pytest.mark.parametrize("dtype", DTYPES)
def test_lapack_results_have_small_f64_residuals(dtype):
    a, tall = values(40, 40, dtype=dtype), values(70, 30, dtype=dtype)

    def everything(a, tall):
        return (
            jnp.linalg.qr(tall),
            jnp.linalg.svd(tall, full_matrices=False),
            jnp.linalg.eig(a),
            jnp.linalg.eigh(a @ jnp.conj(a).T),
            jsl.schur(a),
            jnp.linalg.inv(a),
        )

    got = jax.tree.unflatten(
        jax.tree.structure(jax.eval_shape(everything, a, tall)), compiled(everything, [a, tall])
    )
    exact = jax.tree.map(lambda x: np.asarray(x).astype("complex128"), got)
    (q, r), (u, s, vh), (w, v), (lam, z), (t, basis), inverse = exact
    square = a.astype("complex128") @ adjoint(a.astype("complex128"))
    pairs = [
        (q @ r, tall), (adjoint(q) @ q, np.eye(30)), (u * s @ vh, tall), (a @ v, v * w), (square @ z, z * lam),
        (basis @ t @ adjoint(basis), a), (a @ inverse, np.eye(40)),
    ]  # fmt: skip
    for left, right in pairs:
        scale = max(np.abs(right).max(), 1)
        assert np.abs(left - right).max() / scale < (5e-4 if dtype in ("float32", "complex64") else 1e-11)


SQUARE = {
    "inv": jnp.linalg.inv, "det": jnp.linalg.det, "slogdet": jnp.linalg.slogdet, "pinv": jnp.linalg.pinv,
    "matrix_rank": jnp.linalg.matrix_rank, "cond": jnp.linalg.cond, "svdvals": jnp.linalg.svdvals,
    "eigvals": jnp.linalg.eigvals, "eigvalsh": jnp.linalg.eigvalsh, "norm_2": lambda a: jnp.linalg.norm(a, 2),
    "norm_nuc": lambda a: jnp.linalg.norm(a, "nuc"), "power": lambda a: jnp.linalg.matrix_power(a, -2),
    "expm": jsl.expm, "lu": jsl.lu, "qr": jsl.qr, "schur": jsl.schur,
    "hessenberg": lambda a: jsl.hessenberg(a, calc_q=True), "polar": lambda a: jsl.polar(a, method="svd"),
    "rsf2csf": lambda a: jsl.rsf2csf(*jsl.schur(a)), "sqrtm": lambda a: jsl.sqrtm(a @ jnp.conj(a).T),
    "funm": lambda a: jsl.funm(a @ jnp.conj(a).T, jnp.sin), "solve": lambda a: jnp.linalg.solve(a, a[:, 0]),
    "lstsq": lambda a: jnp.linalg.lstsq(a[:, :3], a[:, 3:]), "lu_solve": lambda a: jsl.lu_solve(jsl.lu_factor(a), a[0]),
    "cho_solve": lambda a: jsl.cho_solve(jsl.cho_factor(a @ jnp.conj(a).T), a[0]),
    "solve_triangular": lambda a: jsl.solve_triangular(a, a[0], trans="T"),
    "sylvester": lambda a: jsl.solve_sylvester(a, a @ a.T, a), "block_diag": lambda a: jsl.block_diag(a, a[:2]),
    "toeplitz": lambda a: jsl.toeplitz(a[0], a[1]),
    "eigh_tridiagonal": lambda a: jsl.eigh_tridiagonal(a[0].real, a[1, 1:].real, eigvals_only=True),
    "gradient": jax.grad(lambda a: jnp.sum(jnp.abs(jnp.linalg.solve(a, a[:, 0])) ** 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", SQUARE)
def test_jax_linalg_functions_match_xla(name):
    args = [values(4, 4, dtype="float64") + 2 * np.eye(4)]
    agree(compiled(SQUARE[name], args), jax.jit(SQUARE[name])(*args))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [n for n in SQUARE if n not in ("eigh_tridiagonal",)])
def test_jax_linalg_functions_of_every_dtype_match_xla(name, dtype):
    args = [(values(4, 4, dtype=dtype) + 2 * np.eye(4)).astype(dtype)]
    agree(compiled(SQUARE[name], args), jax.jit(SQUARE[name])(*args))


def solve_steps(a, b):
    """A solve in the body of a loop, and another in a branch."""

    def body(state):
        x, n = state
        r = jax.lax.cond(n % 2 == 0, lambda: jnp.linalg.solve(a, b - a @ x), lambda: jnp.linalg.lstsq(a, b)[0] - x)
        return x + 0.5 * r, n + 1

    return jax.lax.while_loop(lambda s: s[1] < 5, body, (jnp.zeros_like(b), 0))


@pytest.mark.parametrize("level", LEVELS)
def test_lapack_calls_in_loops_and_branches_match_xla(level):
    a = (values(7, 7, dtype="float64") + 3 * np.eye(7)).astype("float64")
    check(solve_steps, [a, values(7, 2, dtype="float64")], level, 100)


def test_lapack_calls_of_symbolic_sizes_match_xla():
    k, n = export.symbolic_shape("k, n")
    shapes = [jax.ShapeDtypeStruct((k, n, n), "float64"), jax.ShapeDtypeStruct((k, n, 2), "float64")]

    def solve(a, b):
        return jnp.linalg.solve(a, b), jnp.linalg.qr(a), jnp.linalg.svd(a), jnp.linalg.eigh(a)

    module = aotc.load(aotc.compile(jax.jit(solve), *shapes, verify_each=True))
    for k, n in ((2, 3), (1, 40), (3, 1)):
        args = [values(k, n, n, dtype="float64") + 2 * np.eye(n), values(k, n, 2, dtype="float64")]
        agree(module(*args), jax.jit(solve)(*args))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_give_nan(bad):
    a = values(2, 4, 4, dtype="float64")
    a[1, 2, 1] = bad

    def everything(a):
        others = jnp.linalg.svd(a), jnp.linalg.eigh(a), jsl.schur(a[0]), jsl.schur(a[1])
        return jnp.linalg.eig(a), others if np.isnan(bad) else ()

    agree(compiled(everything, [a]), jax.jit(everything)(a))


@pytest.mark.parametrize("shape", [(0, 0), (3, 0), (0, 3), (2, 0, 0), (0, 3, 3)])
def test_lapack_calls_on_empty_matrices_match_xla(shape):
    args = [np.zeros(shape)]

    def everything(x):
        return lax_linalg.lu(x), jnp.linalg.qr(x), jnp.linalg.svd(x)

    agree(compiled(everything, args), jax.jit(everything)(*args))


def test_large_batches_give_the_same_bits_at_any_thread_count():
    a = values(64, 12, 12, dtype="float32")
    data = aotc.compile(jax.jit(jnp.linalg.eigh), a)
    one, two = (flat(aotc.load(data, threads=n)(a)) for n in (1, 2))
    for left, right in zip(one, two, strict=True):
        np.testing.assert_array_equal(left, right)


def test_a_call_restores_the_thread_count_of_openblas():
    library, _ = lapack.open_lapack("test", ["dgetrf"])
    before = library._get()
    a = values(5, 5, dtype="float64") + 3 * np.eye(5)
    agree(compiled(jnp.linalg.inv, [a]), np.linalg.inv(a))
    assert library._get() == before


def test_a_missing_lapack_library_is_an_error_with_an_install_hint(monkeypatch):
    data = aotc.compile(jax.jit(jnp.linalg.det), np.eye(5))
    monkeypatch.setattr(lapack, "_OPEN", [])
    monkeypatch.setattr(lapack, "library_candidates", list)
    with pytest.raises(aotc.vmfb.errors.BundleError, match=r"(?s)dgetrf.*no LAPACK library.*\[lapack\]"):
        aotc.load(data)


def test_the_openblas_of_a_wheel_is_found(monkeypatch, tmp_path):
    folder = tmp_path / "lib"
    folder.mkdir()
    (folder / "libscipy_openblas64_.so").write_bytes(b"")
    package = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(lapack.importlib.util, "find_spec", lambda name: package)
    assert folder / "libscipy_openblas64_.so" in lapack.library_candidates()


def test_a_library_without_the_function_is_an_error(monkeypatch):
    real = lapack.open_lapack("test", ["dgetrf"])[0]
    monkeypatch.setattr(lapack, "_OPEN", [real])
    with pytest.raises(aotc.vmfb.errors.BundleError, match="lacks dnothing"):
        lapack.open_lapack("model.vmfb", ["dgetrf", "dnothing"])


def test_cuda_refuses_lapack_calls_with_their_location():
    with pytest.raises(aotc.diagnostics.CompileError, match="getrf is not supported on target cuda"):
        aotc.compile(jax.jit(jnp.linalg.det), np.eye(300, dtype="float32"), target="cuda:sm_80", host_fallback=False)


def test_cholesky_does_not_overwrite_an_operand_with_other_readers():
    a = positive(6, 6, dtype="float64")
    agree(compiled(lambda a: (jnp.linalg.cholesky(a), a * 2), [a]), (np.linalg.cholesky(a), a * 2))




LEFT = {"left": True, "transpose": False}


@pytest.mark.parametrize(
    ("shapes", "attrs", "message"),
    [
        ([(3, 4)], {"routine": "syevd", "options": {"mode": "V", "uplo": "L"}}, "not square"),
        ([(4, 4)], {"routine": "syevd", "options": {"mode": "V"}}, "option uplo is missing"),
        ([(4, 4)], {"routine": "gesdd", "options": {"mode": "O"}}, "no mode 'O'"),
        ([(4, 4)], {"routine": "gesxx", "options": {}}, "no routine 'gesxx'"),
        ([(4, 4), (5,)], {"routine": "orgqr", "options": {}}, "more reflectors"),
        ([(2, 4, 4), (3, 4)], {"routine": "orgqr", "options": {}}, "not a batch"),
        ([(4, 4), (3,), (5, 5)], {"routine": "ormqr", "options": LEFT}, "cannot be applied"),
        ([(4, 4), (3,)], {"routine": "geqp3", "options": {}}, "are no pivots"),
        ([(3,), (3,), (3,), (2, 4)], {"routine": "gtsv", "options": {}}, "do not fit"),
        ([(4, 4)], {"routine": "gees", "options": {"mode": "V", "sort": "S"}}, "sorting is not supported"),
    ],
)
def test_invalid_lapack_types_are_refused(shapes, attrs, message):
    types = tuple(TensorType("f64", shape) for shape in shapes)
    with pytest.raises(RuleError, match=message):
        OPS["lapack"].infer(types, attrs, (), ())


def test_a_call_without_its_options_is_refused():
    kind = "tensor<4x4xf64>"
    text = f"""func.func @main(%a: {kind}) -> {kind} {{
      %0:3 = stablehlo.custom_call @lapack_dsyevd_ffi(%a) : ({kind}) -> ({kind}, tensor<4xf64>, tensor<i32>)
      return %0#0 : {kind}
    }}"""
    with pytest.raises(aotc.CompileError, match="option mode, uplo is missing"):
        aotc.compile(text)
