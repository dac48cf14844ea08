"""What a call may be written like: by the names of the function that was compiled, however it came to the compiler."""

import functools
import inspect
import pydoc

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import aotc
from aotc import CallError

pytestmark = pytest.mark.cpu

PARAMS = {"layer": {"w": np.arange(12, dtype=np.float32).reshape(4, 3), "b": np.ones(3, np.float32)}}
X = np.ones((2, 4), np.float32)
SCALE = np.float32(2)


def model(params, x, *, scale):
    """Two layers.

    With a scale.
    """
    return {"y": (x @ params["layer"]["w"] + params["layer"]["b"]) * scale}


def exported():
    return jax.export.export(jax.jit(model))(PARAMS, X, scale=SCALE)


FORMS = {
    "function": lambda: aotc.compile(model, PARAMS, X, kwargs={"scale": SCALE}),
    "blob": lambda: aotc.compile(bytes(exported().serialize())),
    "lowered": lambda: aotc.compile(jax.jit(model).lower(PARAMS, X, scale=SCALE)),
    "upgraded": lambda: aotc.upgrade(aotc.compile(model, PARAMS, X, kwargs={"scale": SCALE})),
}


@pytest.fixture(scope="module", params=FORMS)
def module(request):
    return aotc.load(FORMS[request.param]())


def test_arguments_are_passed_by_name(module):
    want = (X @ PARAMS["layer"]["w"] + 1) * 2
    for found in (
        module(PARAMS, X, scale=SCALE), module(PARAMS, x=X, scale=SCALE), module.main(scale=SCALE, x=X, params=PARAMS),
    ):  # fmt: skip
        np.testing.assert_array_equal(found["y"], want)
    assert [row["name"] for row in module.main.signature.arguments] == [
        "params['layer']['b']", "params['layer']['w']", "x", "scale",
    ]  # fmt: skip
    assert str(inspect.signature(module.main)) == "(params, x, *, scale)"
    assert module.main.__name__ == "main"


def test_wrong_arguments_are_reported_by_name(module):
    def fails(match, *args, **kwargs):
        with pytest.raises(CallError, match=match):
            module(*args, **kwargs)

    fails("argument 'scale' is missing", PARAMS, X)
    fails("argument 'params' is missing, argument 'x' is missing", scale=SCALE)
    fails(r"no argument 'y'(.|\n)*found:    4: params, x, scale, y\n    expected: 3: params, x, scale", PARAMS, X,
          scale=SCALE, y=X)  # fmt: skip
    fails("argument 'x' is given twice", PARAMS, X, x=X, scale=SCALE)
    fails(r"2 arguments are positional, not 3, argument 'scale' is missing\n    found:    3: params, x, 1 more", PARAMS,
          X, SCALE)  # fmt: skip
    wrong = {"layer": {"w": PARAMS["layer"]["w"]}}
    fails(r"argument params\['layer'\] has another structure(.)*: params\['layer'\]\['b'\] is missing", wrong, X,
          scale=SCALE)  # fmt: skip
    wrong = {"layer": {**PARAMS["layer"], "c": X}}
    fails(r"there is no params\['layer'\]\['c'\]", wrong, X, scale=SCALE)
    wrong = {"layer": {**PARAMS["layer"], "b": X}}
    fails(r"argument 0 \(params\['layer'\]\['b'\]\) has the wrong shape", wrong, X, scale=SCALE)


def test_a_function_has_the_docstring_of_the_model():
    data = FORMS["function"]()
    assert aotc.load(data).main.__doc__ == "Two layers.\n\nWith a scale."
    assert aotc.load(aotc.upgrade(data)).main.__doc__ == "Two layers.\n\nWith a scale."
    jitted = jax.jit(functools.partial(model, scale=SCALE))
    assert aotc.load(aotc.compile(jitted, PARAMS, X)).main.__doc__.startswith("Two layers.")
    assert aotc.load(aotc.compile(jnp.sin, X)).main.__doc__.startswith("Compute")
    nothing = aotc.load(aotc.compile(lambda x: x + 1, X))
    shown = pydoc.render_doc(nothing.main, renderer=pydoc.plaintext)
    assert "main = main(x: f32[" in shown
    assert "A function of a module." in shown
    assert "flatten" not in shown


def test_arguments_of_text_have_the_names_of_their_locations():
    module = aotc.load(aotc.compile(exported().mlir_module()))
    leaves = {"params['layer']['b']": PARAMS["layer"]["b"], "params['layer']['w']": PARAMS["layer"]["w"]}
    np.testing.assert_array_equal(module(**leaves, x=X, scale=SCALE), (X @ PARAMS["layer"]["w"] + 1) * 2)
    with pytest.raises(CallError, match="argument 'x' is missing"):
        module(**leaves, scale=SCALE)


def test_variadic_arguments_are_named_by_index_and_key():
    def spread(*xs, **named):
        return xs[0] + xs[1] * named["args"]

    module = aotc.load(aotc.compile(spread, X, X, kwargs={"args": X}))
    assert [row["name"] for row in module.main.signature.arguments] == ["xs[0]", "xs[1]", "named['args']"]
    np.testing.assert_array_equal(module(X, X, args=3 * X), 4 * X)
    with pytest.raises(CallError, match=r"argument 'xs\[1\]' is missing"):
        module(X, args=X)


def test_dropped_arguments_keep_their_positions():
    def unread(x, y, z):
        return x + z

    module = aotc.load(aotc.compile(bytes(jax.export.export(jax.jit(unread))(X, X, X).serialize())))
    np.testing.assert_array_equal(module(X, None, z=X), 2 * X)
    with pytest.raises(CallError, match=r"argument 'args\[1\]' is missing"):  # its name is nowhere
        module(X, z=X)


def test_weights_are_bound_by_the_names_of_parameters():
    data = aotc.compile(model, PARAMS, X, kwargs={"scale": SCALE}, bind=["params"])
    layer = aotc.load(data).bind({"params": PARAMS})
    np.testing.assert_array_equal(layer(X, SCALE)["y"], (X @ PARAMS["layer"]["w"] + 1) * 2)
    layer = aotc.load(data).bind({"params['layer']": PARAMS["layer"], "scale": SCALE})
    np.testing.assert_array_equal(layer(X)["y"], (X @ PARAMS["layer"]["w"] + 1) * 2)


def test_a_parameter_named_args_takes_precedence_over_the_index():
    module = aotc.load(aotc.compile(lambda x, args: x - args[0], X, [X]))
    np.testing.assert_array_equal(module.bind({"args[0]": 3 * X})(X), -2 * X)  # the name, not the place
    np.testing.assert_array_equal(module(args=[3 * X], x=X), -2 * X)
