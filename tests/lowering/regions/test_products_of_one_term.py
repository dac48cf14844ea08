"""Products whose sums have one term each: they are multiplications, in the kernel that reads them."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba")

import aotc
from aotc.frontend.importer import import_model
from aotc.ir.tensor.ir import walk
from aotc.options import Options
from aotc.pipeline import run_passes

pytestmark = [pytest.mark.cpu]

SHAPES = [
    ("mk,kn->mn", (5, 1), (1, 7)),
    ("bkm,nbk->bmn", (3, 1, 5), (7, 3, 1)),
    ("kab,cbk->bac", (1, 2, 3), (4, 3, 1)),
    ("k,k->", (1,), (1,)),
    ("ab,cd->abcd", (2, 3), (4, 5)),
    ("abkj,bacjk->abc", (2, 3, 1, 1), (3, 2, 6, 1, 1)),
    ("mk,kn->mn", (0, 1), (1, 7)),
]


@pytest.mark.parametrize(("dims", "left", "right"), SHAPES)
def test_einsums_with_one_term_match_numpy(dims, left, right):
    random = np.random.default_rng(0)
    x, y = (random.standard_normal(shape).astype(np.float32) for shape in (left, right))
    module = aotc.load(aotc.compile(jax.jit(lambda x, y: jnp.einsum(dims, x, y)), x, y, verify_each=True))
    np.testing.assert_allclose(module.invoke("main", x, y)[0], np.einsum(dims, x, y), rtol=1e-6)


DTYPES = {
    "i1": bool, "i8": np.int8, "ui32": np.uint32, "bf16": ml_dtypes.bfloat16, "f16": np.float16, "f64": np.float64,
    "f8E4M3FN": ml_dtypes.float8_e4m3fn, "i4": ml_dtypes.int4, "complex<f32>": np.complex64,
}  # fmt: skip
TEXT = """func.func @main(%x: tensor<3x1xT>, %y: tensor<1x4xT>) -> tensor<3x4xT> {
  %0 = stablehlo.dot_general %x, %y, contracting_dims = [1] x [0] : (tensor<3x1xT>, tensor<1x4xT>) -> tensor<3x4xT>
  return %0 : tensor<3x4xT>
}"""


@pytest.mark.parametrize("name", DTYPES)
def test_products_with_one_term_of_each_dtype_match_numpy(name):
    x, y = np.array([[0], [1], [1]]).astype(DTYPES[name]), np.array([[1, 0, 1, 0]]).astype(DTYPES[name])
    found = aotc.load(aotc.compile(TEXT.replace("T", name), verify_each=True)).invoke("main", x, y)[0]
    np.testing.assert_array_equal(found.astype(np.complex64), x.astype(np.complex64) * y.astype(np.complex64))


def test_a_gradient_of_one_example_is_added_in_one_kernel():
    """A sum of outer products writes its result once, and reads no product."""
    add = lambda total, x, y: total + jnp.einsum("bi,bj->bij", x, y)
    model = jax.jit(add).lower(*(jax.ShapeDtypeStruct(s, "float32") for s in ((4, 64, 64), (4, 64), (4, 64))))
    module = run_passes(import_model(model), Options())
    names = [op.name for f in module.functions.values() for op in walk(f.body)]
    assert names.count("dispatch") == 1
    assert "matmul" not in names
