"""``erfc`` of 32 bits is found in its expansion, wherever that stands, and is nearer to f64 than it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from scipy import special
from support.differential import check

import aotc
from aotc.frontend.importer import import_model
from aotc.ir.tensor.ir import walk
from aotc.lowering.passes.canonicalize.canonicalize import canonicalize
from aotc.lowering.passes.inline import inline
from aotc.options import Options

X = np.linspace(-5, 9, 5001, dtype="f4")
SPECIAL = np.array([0, -0.0, 1, -1, 2, 9.4, 9.5, 10.05, 30, -30, 3e38, np.inf, -np.inf, np.nan], "f4")


def names(function, *arguments):
    module = canonicalize(inline(import_model(jax.jit(function), *arguments), Options()), Options())
    return {op.name for f in module.functions.values() for op in walk(f.body)}


FOUND = {
    "function": lax.erfc,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "distribution": jax.scipy.stats.norm.cdf,
    "of-the-square": lambda x: lax.erfc(x * x),
}


@pytest.mark.parametrize("name", FOUND)
def test_expansions_of_erfc_become_one_op(name):
    assert "erfc" in names(FOUND[name], X)
    check(FOUND[name], [X], 2, 200)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_erfc_of_short_floats_is_computed_in_f32(dtype):
    x = X.astype(jnp.dtype(dtype))
    assert "erfc" in names(lax.erfc, x)
    check(lax.erfc, [x], 2, 4)


def test_erfc_is_more_accurate_than_the_expansion():
    got = np.asarray(aotc.load(aotc.compile(jax.jit(lax.erfc), X)).invoke("main", X)[0])
    want = special.erfc(X.astype("f8"))
    assert (np.abs(got - want) / np.spacing(want.astype("f4"))).max() <= 5
    theirs = np.asarray(lax.erfc(X))
    assert np.abs(got / want - 1).max() < np.abs(theirs / want - 1).max() / 8


def test_erfc_of_special_values_matches_scipy():
    got = np.asarray(aotc.load(aotc.compile(jax.jit(lax.erfc), SPECIAL)).invoke("main", SPECIAL)[0])
    np.testing.assert_allclose(got, special.erfc(SPECIAL.astype("f8")), rtol=1e-6, atol=1e-38)


def test_an_export_is_matched_and_another_polynomial_is_not():
    """One coefficient more or less makes another function."""
    text = export.export(jax.jit(lax.erfc))(jax.ShapeDtypeStruct(X.shape, X.dtype)).mlir_module()
    for model, found in ((text, True), (text.replace("0.563825965", "0.563825"), False)):
        module = canonicalize(inline(import_model(model), Options()), Options())
        assert any(op.name == "erfc" for f in module.functions.values() for op in walk(f.body)) == found


def test_the_f64_expansion_is_not_matched():
    with jax.enable_x64(True):
        text = export.export(jax.jit(lax.erfc))(jax.ShapeDtypeStruct(X.shape, "float64")).mlir_module()
        assert "erfc" in names(lax.erfc, X.astype("f8"))
    module = canonicalize(inline(import_model(text), Options()), Options())
    assert not any(op.name == "erfc" for f in module.functions.values() for op in walk(f.body))
