"""Small models end to end: aotc beside jax.jit, weights as arguments and baked in, at every level."""

import jax
import numpy as np
import pytest
from support.small_models import MLP, MODELS, array, close, mlp

import aotc

pytestmark = pytest.mark.cpu
























@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_models_with_weights_as_arguments_match_jax(name, level):
    function, weights, x, tolerance = MODELS[name]
    module = aotc.load(aotc.compile(jax.jit(function), weights, x, opt_level=level))
    close(module.invoke("main", *weights, x), jax.jit(function)(weights, x), tolerance)


@pytest.mark.parametrize("level", [0, 2])
@pytest.mark.parametrize("name", MODELS)
def test_models_with_constant_weights_match_jax(name, level):
    function, weights, x, tolerance = MODELS[name]
    module = aotc.load(aotc.compile(jax.jit(lambda x: function(weights, x)), x, opt_level=level))
    close(module.invoke("main", x), jax.jit(function)(weights, x), tolerance)


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_a_model_with_a_symbolic_batch_matches_jax(level):
    batch = jax.export.symbolic_shape("b, 12")
    exported = jax.export.export(jax.jit(lambda x: mlp(MLP, x)))(jax.ShapeDtypeStruct(batch, "float32"))
    module = aotc.load(aotc.compile(exported, opt_level=level))
    for size in (1, 2, 33):
        x = array(size, 12, seed=size)
        close(module.invoke("main", x), jax.jit(mlp)(MLP, x), 1e-5)


def test_results_have_the_pytree_of_the_function():
    def f(state, *, step):
        return {"sum": state["a"] + state["b"], "next": (step + 1, [state["a"]])}

    state = {"a": array(3), "b": array(3, seed=1)}
    exported = jax.export.export(jax.jit(f))(state, step=np.int32(4))
    module = aotc.load(aotc.compile(exported.serialize()))
    got = module(state, step=np.int32(4))
    want = f(state, step=np.int32(4))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    np.testing.assert_allclose(got["sum"], want["sum"], rtol=1e-6)


def test_compiling_gives_the_same_bytes_and_results_at_any_thread_count():
    function, weights, x, _ = MODELS["attention"]
    first, second = (aotc.compile(jax.jit(function), weights, x) for _ in range(2))
    assert first == second
    one, two = (aotc.load(first, threads=n).invoke("main", *weights, x) for n in (1, 2))
    np.testing.assert_array_equal(one[0], two[0])


def test_an_export_without_its_unused_argument_is_called_like_the_function():
    exported = jax.export.export(jax.jit(lambda x, y, z: x - z))(*[np.ones(3, "f")] * 3)
    assert exported.module_kept_var_idx == (0, 2)
    module = aotc.load(aotc.compile(bytes(exported.serialize())))
    np.testing.assert_array_equal(module(np.full(3, 5, "f"), None, np.ones(3, "f")), np.full(3, 4, "f"))
