"""Products of one column, and of few rows with columns that fill no vectors: multiplied and reduced, beside f64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("numba")

import aotc
from aotc.frontend.importer import import_model
from aotc.ir.loop.printer import print_kernel
from aotc.ir.tensor.ir import walk
from aotc.lowering.regions.lower_region import lower_region
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.targets import TARGETS
from aotc.vmfb.host.machine import cpu_features

pytestmark = [pytest.mark.cpu]

MATVEC = lambda w, x: w @ x
VECMAT = lambda x, w: x @ w
TURNED = lambda w, x: w.T @ x
THIN = {  # a function, its shapes, what it becomes
    "one column": (MATVEC, (100, 77), (77,), "reduce"),
    "one column of four rows": (MATVEC, (4, 1100), (1100, 1), "reduce"),
    "one number": (MATVEC, (1, 5000), (5000,), "reduce"),
    "two columns": (MATVEC, (100, 77), (77, 2), "packed_matmul"),
    "a tiny column": (MATVEC, (60, 49), (49,), "matmul"),
    "a tiny column of more terms than are unrolled": (MATVEC, (60, 60), (60,), "reduce"),
    "one column, turned": (TURNED, (77, 96), (77,), "matmul"),
    "one column, turned, odd": (TURNED, (77, 101), (77,), "reduce"),
    "many columns": (lambda w, x: jnp.einsum("bij,bj->bi", w, x), (3, 60, 77), (3, 77), "reduce"),
    "one row": (VECMAT, (1, 77), (77, 101), "reduce"),
    "four rows": (VECMAT, (4, 77), (77, 101), "reduce"),
    "five rows": (VECMAT, (5, 77), (77, 101), "reduce"),
    "nine rows": (VECMAT, (9, 77), (77, 101), "packed_matmul"),
    "one row of vectors": (VECMAT, (1, 77), (77, 96), "matmul"),
    "a tiny row": (VECMAT, (1, 49), (49, 81), "matmul"),
    "a tiny row of more terms than are unrolled": (VECMAT, (1, 50), (50, 80), "reduce"),
    "rows beside each other": (lambda x, w: jnp.einsum("bmk,bkn->bmn", x, w), (3, 2, 77), (3, 77, 45), "reduce"),
    "rows stored by columns": (lambda x, w: x.T @ w, (77, 3), (77, 101), "reduce"),
}


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("name", THIN)
def test_thin_matmuls_have_the_expected_form_and_match_f64(name):
    function, *shapes, form = THIN[name]
    args = [numbers(*s, seed=n) for n, s in enumerate(shapes)]
    module = run_passes(import_model(jax.jit(function).lower(*args)), Options())
    names = {op.name for f in module.functions.values() for op in walk(f.body)}
    assert names & {"reduce", "matmul", "packed_matmul"} == {form}
    with jax.enable_x64(True):
        want = jax.jit(function)(*(x.astype(np.float64) for x in args))
    for threads in (1, 2):
        got = aotc.load(aotc.compile(jax.jit(function), *args, verify_each=True), threads=threads).invoke("main", *args)
        np.testing.assert_allclose(got[0], want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int8", "int32"])
@pytest.mark.parametrize("name", ["one column", "one column, turned, odd", "three rows"])
def test_thin_matmuls_of_each_dtype_match_jax(name, dtype):
    function, *shapes, _ = THIN.get(name, (VECMAT, (3, 77), (77, 101), ""))
    with jax.enable_x64(dtype == "float64"):
        args = [np.round(numbers(*s, seed=n) * 3).astype(jnp.dtype(dtype)) for n, s in enumerate(shapes)]
        got = aotc.load(aotc.compile(jax.jit(function), *args)).invoke("main", *args)[0]
        want = jax.jit(function)(*args)
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got.astype(np.float64), np.asarray(want, np.float64), rtol=1e-2)


def test_a_thin_matmul_with_constant_weights_matches_f64():
    """Weights that are baked in are read as they lie."""
    w, x = numbers(100, 77), numbers(77, seed=1)
    got = aotc.load(aotc.compile(jax.jit(lambda x: jnp.tanh(w @ x + 1)), x)).invoke("main", x)[0]
    np.testing.assert_allclose(got, np.tanh(w.astype(float) @ x + 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spec", ["n, 77", "100, k", "n, k"])
def test_thin_matmuls_of_symbolic_sizes_match_f64(spec):
    shape = jax.export.symbolic_shape(spec)
    w, x = jax.ShapeDtypeStruct(shape, "float32"), jax.ShapeDtypeStruct(shape[1:], "float32")
    columns, rows = (aotc.load(aotc.compile(f, *a)) for f, a in ((MATVEC, (w, x)), (lambda x, w: w @ x, (x, w))))
    for n, k in ((1, 1), (100, 77), (301, 33)):
        n, k = (100 if "n" not in spec else n), (77 if "k" not in spec else k)
        w, x = numbers(n, k), numbers(k, seed=1)
        for got in (columns.invoke("main", w, x)[0], rows.invoke("main", x, w)[0]):
            np.testing.assert_allclose(got, w.astype(float) @ x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("n", [1, 96, 101])
def test_thin_matmuls_of_symbolic_columns_match_f64(n):
    shape = (jax.export.symbolic_shape("n")[0],)
    types = jax.ShapeDtypeStruct((2, 77), "float32"), jax.ShapeDtypeStruct((77, *shape), "float32")
    x, w = numbers(2, 77), numbers(77, n, seed=1)
    got = aotc.load(aotc.compile(VECMAT, *types)).invoke("main", x, w)[0]
    np.testing.assert_allclose(got, x.astype(float) @ w, rtol=1e-4, atol=1e-4)


FETCHED = {  # a function, its shapes, the lines that its innermost loop over the matrix fetches
    "a near matrix": (VECMAT, (5, 255), (255, 257), 0),
    "a matrix by rows": (VECMAT, (5, 300), (300, 256), 4),
    "a matrix by odd rows": (VECMAT, (8, 301), (301, 529), 5),
    "one row": (VECMAT, (1, 301), (301, 529), 5),
    "sums of columns": (lambda x: x.sum(0), (301, 529), (), 5),
    "two columns": (MATVEC, (259, 1203), (1203, 2), 0),
    "three columns": (MATVEC, (259, 1203), (1203, 3), 5),
    "three columns, short rows": (MATVEC, (259, 512), (512, 3), 0),
    "eight columns": (MATVEC, (259, 1203), (1203, 8), 4),
}


@pytest.mark.parametrize("name", FETCHED)
def test_the_next_lines_of_a_matrix_are_prefetched(name):
    """The lines that the next turns read, within the matrix, as the verifier sees; sums are near those of f64."""
    function, *shapes, lines = FETCHED[name]
    args = [numbers(*s, seed=n) for n, s in enumerate(shapes) if s]
    texts = cpu_kernels(function, *args)
    fetched = [line for text in texts for line in text.splitlines() if "prefetch(" in line]
    assert len(fetched) == lines, fetched
    with jax.enable_x64(True):
        want = np.asarray(jax.jit(function)(*(x.astype(np.float64) for x in args)))
    got = aotc.load(aotc.compile(jax.jit(function), *args, verify_each=True)).invoke("main", *args)[0]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


def cpu_kernels(function, *args):
    """Return the texts of the kernels that a function becomes on a CPU with vectors of 64 bytes."""
    options = Options(target="cpu:x86-64-v4")
    module = run_passes(import_model(jax.jit(function).lower(*args)), options)
    regions = [f for f in module.functions.values() if f.attrs.get("kind")]
    return [print_kernel(lower_region(f, TARGETS["cpu:x86-64-v4"])) for f in regions]


PARTS = {  # a function and its shapes: matrices times five columns or more, of rows of several parts
    "eight columns": (MATVEC, (259, 1203), (1203, 8)),
    "six columns, whole parts": (MATVEC, (131, 2048), (2048, 6)),
    "columns as rows": (lambda w, x: w @ x.T, (201, 1111), (5, 1111)),
    "batches": (MATVEC, (3, 67, 1203), (3, 1203, 7)),
    "what columns are computed from": (lambda w, x: jnp.abs(w @ -jnp.abs(x)), (131, 1203), (1203, 5)),
    "both of one array": (lambda w, x: w @ w[:5].T + x, (131, 1203), (5,)),
}


@pytest.mark.parametrize("target", ["cpu:x86-64-v3", "cpu:x86-64-v4"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("name", PARTS)
def test_split_thin_matmuls_are_close_to_f64_with_equal_bits(name, dtype, target):
    """Sums in parts are near those of f64, and the same bits at any number of threads."""
    if not cpu_features().issuperset(TARGETS[target].features):
        pytest.skip(f"this processor does not run {target}")
    function, *shapes = PARTS[name]
    with jax.enable_x64(dtype == "float64"):
        args = [numbers(*s, seed=n).astype(jnp.dtype(dtype)) for n, s in enumerate(shapes)]
        bundle = aotc.compile(jax.jit(function), *args, target=target, verify_each=True)
    got, again = (aotc.load(bundle, threads=n).invoke("main", *args)[0] for n in (1, 2))
    assert got.tobytes() == again.tobytes()
    with jax.enable_x64(True):
        want = np.asarray(jax.jit(function)(*(x.astype(np.float64) for x in args)))
    near = {"float32": 1e-5, "float64": 1e-13}.get(dtype, 1e-2)
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=near, atol=near * np.abs(want).max())


def test_five_columns_are_copied_in_parts_and_four_are_not():
    """Five columns are copied a part at a time, four are read where they lie."""
    parts, whole = (cpu_kernels(MATVEC, numbers(259, 1203), numbers(1203, n))[-1] for n in (5, 4))
    assert 'scratch("f32[5, 528]")' in parts
    assert "scratch" not in whole


def test_split_thin_matmuls_of_symbolic_sizes_match_f64():
    """Neither how many rows there are nor how long they are is known."""
    n, k = jax.export.symbolic_shape("n, k")
    types = jax.ShapeDtypeStruct((n, k), "float32"), jax.ShapeDtypeStruct((6, k), "float32")
    module = aotc.load(aotc.compile(lambda w, x: w @ x.T, *types))
    for shape in ((1, 1), (203, 1203), (97, 512)):
        w, x = numbers(*shape), numbers(6, shape[1], seed=1)
        np.testing.assert_allclose(module.invoke("main", w, x)[0], w.astype(float) @ x.T, rtol=1e-4, atol=1e-4)


FEW = [(1, 1), (1, 3), (2, 2), (2, 1), (2, 3), (8, 2), (8, 3), (9, 2), (16, 3), (31, 3)]


@pytest.mark.parametrize("transposed", ["", "x", "w", "xw"])
@pytest.mark.parametrize(("rows", "columns"), FEW)
def test_few_columns_of_a_constant_are_not_padded(rows, columns, transposed):
    """Panels of a constant vector had 16 columns: each call wrote 16 times the constant and read it again."""
    rng = np.random.default_rng(0)
    w = rng.standard_normal((1 << 14, columns)).astype("f4")
    x = rng.standard_normal((rows, 1 << 14)).astype("f4")
    held = w.T.copy() if "w" in transposed else w
    given = x.T.copy() if "x" in transposed else x
    product = lambda x: (x.T if "x" in transposed else x) @ (held.T if "w" in transposed else held)
    data = aotc.compile(product, given, target="cpu:x86-64-v3", verify_each=True)
    assert len(data) < w.nbytes + (1 << 17)
    np.testing.assert_allclose(aotc.load(data)(given), x.astype("f8") @ w.astype("f8"), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("rows", "columns", "dtype", "form"), [
    (2, 4, "float32", "reduce"), (8, 2, "float32", "reduce"), (8, 4, "float32", "reduce"), (8, 7, "float32", "reduce"),
    (9, 8, "float32", "reduce"), (24, 8, "float16", "reduce"), (8, 4, "float64", "reduce"), (8, 8, "float32", "reduce"),
    (8, 12, "float32", "packed_matmul"), (16, 9, "float32", "packed_matmul"), (8, 8, "bfloat16", "packed_matmul"),
])  # fmt: skip
def test_a_constant_with_few_columns_is_read_once(rows, columns, dtype, form):
    """Eight rows by a constant of 4096 x 4 packed it in each call; an argument took half the time."""
    with jax.enable_x64(True):
        w, x = (jnp.asarray(numbers(*shape), dtype) for shape in ((4096, columns), (rows, 4096)))
        module = run_passes(import_model(jax.jit(lambda x: x @ w).lower(x)), Options(target="cpu:x86-64-v4-bf16"))
    ops = [op for f in module.functions.values() for op in walk(f.body)]
    assert {op.name for op in ops} & {"reduce", "matmul", "packed_matmul"} == {form}
    assert "pad" not in {op.name for op in ops}


def test_thin_matmuls_of_two_bound_operands_match_f64():
    """Weights that are bound make each side known before a call: the product is transposed once at most."""
    w, x, y = numbers(4096, 4), numbers(4, 4096, seed=1), numbers(4, seed=2)
    module = aotc.load(aotc.compile(lambda w, x, y: (x @ w) * y, w, x, y, verify_each=True, bind=["w", "x"]))
    np.testing.assert_allclose(module.bind({"w": w, "x": x})(y), (x.astype(float) @ w) * y, rtol=1e-3, atol=1e-3)
