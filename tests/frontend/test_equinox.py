"""Functions of equinox, lineax and optimistix: filters, checks, static leaves. Skipped where they are not installed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aotc
from aotc.vmfb.errors import CallError

eqx = pytest.importorskip("equinox")

pytestmark = pytest.mark.cpu

X = np.linspace(0.5, 2, 4, dtype=np.float32)


def compiled(function, *args, **options):
    return aotc.load(aotc.compile(function, *args, **options))


def fails(module, message, *args):
    with pytest.raises(CallError, match=message):
        module(*args)


def positive(x):
    x = eqx.error_if(x, x.min() < 0, "x must be {positive}")
    return jnp.sqrt(x)


def stepped(x):
    def step(carry):
        i, y = carry
        y = eqx.error_if(y, (y > 100).any(), "too large")
        return i + 1, eqx.error_if(y * 2, y[0] == 3, "three")

    return jax.lax.while_loop(lambda c: (c[0] < 9) & (c[1].sum() > 0), step, (0, x))[1]


@pytest.mark.parametrize("form", ["function", "jit", "filter_jit", "lowered", "vmap"])
def test_error_if_fails_with_its_message(form):
    function = {"jit": jax.jit, "filter_jit": eqx.filter_jit, "vmap": jax.vmap}.get(form, lambda f: f)(positive)
    x = np.stack([X, X]) if form == "vmap" else X
    module = compiled(jax.jit(positive).lower(x)) if form == "lowered" else compiled(function, x)
    np.testing.assert_allclose(module(x), np.sqrt(x), rtol=1e-6)
    fails(module, "x must be {positive}", x - 1)


def test_error_if_in_a_loop_fails_with_its_message():
    module = compiled(stepped, X[:2] / 100)
    np.testing.assert_allclose(module(X[:2] / 100), jax.jit(stepped)(X[:2] / 100), rtol=1e-6)
    fails(module, "too large", X[:2])
    fails(module, "three", np.array([3, 1], "f4"))
    fails(module, "three", np.array([1.5, 1], "f4"))


def test_branched_error_if_fails_with_the_selected_message():
    def function(x, n):
        return eqx.branched_error_if(x, n >= 0, n, ["first", "second", "third"])

    module = compiled(function, X, np.int32(0))
    np.testing.assert_array_equal(module(X, np.int32(-1)), X)
    for n, message in enumerate(["first", "second", "third", "third"]):
        fails(module, message, X, np.int32(n))


def test_an_unread_error_if_does_not_fail():
    def function(x):
        eqx.error_if(x, x[0] > 0, "unread")
        return x

    np.testing.assert_array_equal(compiled(function, X)(X), X)


class Model(eqx.Module):
    """A layer with an activation and a name: leaves that are no arrays."""

    weight: jax.Array
    activation: object
    name: str
    unset: object

    def __call__(self, x, scale=1):
        return self.activation(self.weight @ x) * scale


MODEL = Model(jnp.asarray(np.outer(X, X)), jax.nn.relu, "m", None)
WANT = np.maximum(np.outer(X, X) @ X, 0)


@pytest.mark.parametrize("wrap", [eqx.filter_jit, lambda f: f], ids=["filter_jit", "plain"])
def test_leaves_that_are_not_arrays_are_compiled_in(wrap):
    module = compiled(wrap(lambda model, x: model(x)), MODEL, X)
    for model in (MODEL, (MODEL.weight, None, "m", None)):
        np.testing.assert_allclose(module(model, X), WANT, rtol=1e-5)
    fails(module, "name.*another structure", Model(MODEL.weight, jax.nn.relu, "other", None), X)


def test_numbers_of_a_filtered_function_are_compiled_in():
    module = compiled(eqx.filter_jit(lambda x, n: x * n), X, 3)
    np.testing.assert_allclose(module(X, 3), X * 3)
    fails(module, "another structure", X, 4)


def test_an_equinox_module_compiles_as_a_function():
    for model in (MODEL, eqx.filter_jit(MODEL)):
        np.testing.assert_allclose(compiled(model, X)(X), WANT, rtol=1e-5)


def test_a_result_that_is_not_an_array_is_none():
    module = compiled(eqx.filter_jit(lambda model, x: (model, model(x))), MODEL, X)
    model, y = module(MODEL, X)
    np.testing.assert_allclose(y, WANT, rtol=1e-5)
    assert model.activation is None
    np.testing.assert_array_equal(model.weight, MODEL.weight)


def test_lineax_linear_solve_matches_numpy_and_reports_singular_matrices():
    lineax = pytest.importorskip("lineax")

    def solve(a, b):
        return lineax.linear_solve(lineax.MatrixLinearOperator(a), b, lineax.AutoLinearSolver(well_posed=True)).value

    a = np.diag(X) + 1
    module = compiled(solve, a, X)
    np.testing.assert_allclose(module(a, X), np.linalg.solve(a, X), rtol=1e-4)
    fails(module, "singular|nonfinite", a * 0, X)


def test_lineax_conjugate_gradients_match_numpy():
    lineax = pytest.importorskip("lineax")

    def solve(a, b):
        operator = lineax.MatrixLinearOperator(a, lineax.positive_semidefinite_tag)
        return lineax.linear_solve(operator, b, lineax.CG(rtol=1e-6, atol=1e-6, max_steps=20)).value

    a = np.diag(X) + 1
    module = compiled(solve, a, X)
    np.testing.assert_allclose(module(a, X), np.linalg.solve(a, X), rtol=1e-3)


def test_optimistix_root_find_matches_jax_and_reports_nan():
    optimistix = pytest.importorskip("optimistix")

    def solve(y, a):
        solver = optimistix.Newton(rtol=1e-5, atol=1e-5)
        return optimistix.root_find(lambda y, a: jnp.tanh(y) - a * y**2 + 0.5, solver, y, args=a, max_steps=30).value

    y, a = np.float32(1), np.float32(1)
    module = compiled(solve, y, a)
    np.testing.assert_allclose(module(y, a), jax.jit(solve)(y, a), rtol=1e-5)
    fails(module, "non-finite", np.float32(0.1), np.float32(np.nan))
