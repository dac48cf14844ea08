"""What a user of the Python API sees: names, types of errors, bundles, modules, fences."""

import asyncio
import pickle
import threading
import warnings

import jax.numpy as jnp
import numpy as np
import pytest

import aotc
from aotc.options import OptionKeywords, Options

pytest.importorskip("numba")
pytestmark = pytest.mark.cpu

X = np.arange(6, dtype="f4").reshape(2, 3)


def tree(x, scale=2.0):
    """Two results with names."""
    return {"sum": x + scale, "product": (x * scale, jnp.sum(x))}


@pytest.fixture(scope="module")
def bundle():
    return aotc.compile(tree, X)


@pytest.fixture
def module(bundle):
    return bundle.load()


# ---------------------------------------------------------------- bundles


def test_compile_writes_a_file(tmp_path):
    made = aotc.compile(tree, X, output=tmp_path / "f.vmfb")
    assert (tmp_path / "f.vmfb").read_bytes() == made
    assert isinstance(made, aotc.Bundle)


def test_a_bundle_shows_its_contents(bundle):
    assert bundle.size == len(bundle)
    assert all(t.startswith("cpu:") for t in bundle.targets)
    assert len(bundle.targets) == 1
    assert [str(s) for s in bundle.functions["main"].inputs] == ["x: f32[2, 3]"]
    assert bundle.weights == {}
    assert aotc.compile(bundle.source) == aotc.compile(aotc.compile(bundle.source).source)
    assert aotc.compile(tree, X, source=False).source == b""


def test_a_bundle_lists_its_weights():
    bound = aotc.compile(lambda w, x: x @ w, np.ones((3, 2), "f4"), X, bind=["w"], weights="unpacked")
    assert bound.weights == {"w": "f32[3, 2]"}


def test_a_notebook_shows_a_bundle():
    bundle = aotc.compile(lambda x: jnp.sin(x) @ x, np.ones((64, 64), "f4"))
    html = bundle._repr_html_()
    assert "main(x: f32[64, 64])" in html
    assert "arena peak" in html
    assert "slowest kernels of main:" in html
    assert "<lambda>" not in html, "text is escaped"
    assert html == aotc.inspect(bundle)._repr_html_(), "one renderer"
    bare = aotc.compile(lambda x: jnp.sin(x) @ x, np.ones((64, 64), "f4"), debug_info=False)
    assert "largest kernels" in bare._repr_html_()


def test_an_example_that_jax_narrows_is_accepted_as_an_argument():
    for example in (np.linspace(0, 1, 4), np.arange(4), np.ones(4) + 1j):
        module = aotc.load(aotc.compile(lambda x: x + x, example))
        np.testing.assert_allclose(module(example), 2 * example, rtol=1e-6)
        assert module(example).dtype.itemsize * 2 == example.dtype.itemsize
    module = aotc.load(aotc.compile(lambda x: x + x, np.ones(2)))
    np.testing.assert_array_equal(module(np.array([np.inf, 1.0])), [np.inf, 2])
    with np.errstate(all="raise"):
        np.testing.assert_array_equal(module(np.array([1e-50, np.nan])), [0, np.nan])
    with pytest.raises(aotc.ArgumentValueError, match=r"1e\+300 at \[1\]"):
        module(np.array([1.0, 1e300]))


def test_a_bundle_loads_with_keywords(bundle):
    assert bundle.load(threads=1).stats()["threads"] == 1


# ---------------------------------------------------------------- modules


def test_a_module_exposes_its_signature_and_target(module):
    (spec,) = module.inputs
    assert (spec.name, spec.dtype, spec.shape, spec.device) == ("x", "f32", (2, 3), "")
    assert [o.shape for o in module.outputs] == [(2, 3), (), (2, 3)]
    assert module.signature is module.main.signature
    assert module.target.startswith("cpu:")
    assert module["main"] is module.functions["main"]
    with pytest.raises(KeyError, match="found:    'other'\n    expected: main") as found:
        module["other"]
    assert isinstance(found.value, aotc.Error)


def test_a_closed_module_refuses_calls(bundle):
    with bundle.load() as module:
        entry = module.main
        module(X)
    assert "closed" in repr(module)
    module.close()
    for call in (
        lambda: module(X), lambda: entry(X), lambda: module.invoke("main", X), lambda: module.submit("main", X),
        lambda: entry.submit(X), lambda: module.put(X), lambda: module.bind({"x": X}), lambda: module.stats(),
    ):  # fmt: skip
        with pytest.raises(aotc.CallError, match="closed"):
            call()


def test_closing_does_not_end_running_calls(bundle):
    module = bundle.load()
    start = aotc.Fence()
    fence, waiting = module.submit("main", X), module.submit("main", X, wait=[start])
    module.close()
    start.signal()
    for f in (fence, waiting):
        np.testing.assert_array_equal(f.result(60)[2], X + 2)


def test_bound_functions_and_states_are_closed_with_their_module():
    module = aotc.load(aotc.compile(lambda c, x: c + x, X, X, state={"result": "c"}))
    bound, state = module.bind({"x": X}), module.state("c")
    bound(X)
    state(X)
    module.close()
    for call in (
        lambda: bound(X), lambda: bound.invoke(X), lambda: bound.submit(X), lambda: bound.update({"x": X}),
        lambda: bound.invoke(X, results="device"), lambda: state(X),
    ):  # fmt: skip
        with pytest.raises(aotc.CallError, match="closed"):
            call()
    assert "closed" in repr(bound)


def test_closing_from_many_threads_is_allowed(bundle):
    module, errors = bundle.load(), []

    def close():
        try:
            module.close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=close) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors


def test_a_function_with_the_name_of_a_member_is_pickled(tmp_path):
    with pytest.warns(aotc.AotcWarning):
        aotc.compile({"target": jnp.sin, "close": jnp.cos}, args={"target": [X], "close": [X]}, output=tmp_path / "m")
    module = aotc.load(tmp_path / "m")
    for name, f in (("target", np.sin), ("close", np.cos)):
        np.testing.assert_allclose(pickle.loads(pickle.dumps(module[name]))(X), f(X), rtol=1e-6)


def test_functions_may_have_names_of_members():
    with pytest.warns(aotc.AotcWarning, match="module\\['state'\\]"):
        made = aotc.compile({"state": jnp.sin, "decode": jnp.cos}, args={"state": [X], "decode": [X]})
    module = aotc.load(made)
    np.testing.assert_allclose(module["state"](X), np.sin(X), rtol=1e-6)
    np.testing.assert_allclose(module.decode(X), np.cos(X), rtol=1e-6)


def test_warm_up_records_plans_before_the_first_call(bundle):
    assert bundle.load(warm=True).stats()["recordings"] == 1
    made = aotc.compile(
        "func.func public @main(%x: tensor<?x3xf32>, %y: tensor<?x3xf32>) -> tensor<?x3xf32> {\n"
        "  %0 = stablehlo.sine %x : tensor<?x3xf32>\n  return %0 : tensor<?x3xf32> }"
    )
    symbols = [spec.shape[0] for spec in made.load().inputs]
    module = made.load(warm=[dict.fromkeys(symbols, n) for n in (1, 4)])
    assert module.stats()["recordings"] == 2
    module(np.ones((4, 3), "f4"), np.ones((4, 3), "f4"))
    assert module.stats()["recordings"] == 2
    with pytest.raises(aotc.ArgumentValueError, match=str(symbols[0])):
        made.load(warm=True)
    for warm in ("b", [1], [{"b": "c"}], 3):
        with pytest.raises(aotc.ArgumentError, match="warm"):
            made.load(warm=warm)


# ---------------------------------------------------------------- one structure


def test_every_form_of_call_returns_the_pytree_of_the_function(bundle):
    async def awaited(call):
        return await call

    limited = bundle.load(max_in_flight=1)
    for module in (bundle.load(), limited):
        bound = module.bind({"x": X})
        found = [
            module(X), module.main(X), module.submit(X).result(), module.main.submit(X).result(),
            module.main.options(deadline=60).submit(X).result(), asyncio.run(awaited(module.async_(X))),
            asyncio.run(awaited(module.main.async_(X))), bound(), bound.submit().result(),
            asyncio.run(awaited(bound.async_())),
        ]  # fmt: skip
        for result in found:
            assert isinstance(result, dict)
            assert isinstance(result["product"], tuple)
            np.testing.assert_array_equal(result["sum"], X + 2)
        for flat in (module.invoke("main", X), module.submit("main", X).result(), bound.invoke()):
            assert [type(x) for x in flat] == [np.ndarray] * 3


def test_a_fence_returns_results_by_number(module):
    fence = module.submit(X)
    np.testing.assert_array_equal(fence[2].result(), X + 2)
    np.testing.assert_array_equal(fence.results[0].result(), 2 * X)


def test_a_fence_has_the_methods_of_a_future(module):
    fence = module.submit(X)
    fence.result()
    assert fence.done
    assert fence.done() is True
    assert fence.running() is False
    assert fence.cancelled() is False
    user = aotc.Fence()
    assert not user.done
    assert user.done() is False
    waiting = module.submit("main", X, wait=[user])
    assert waiting.running() is False
    waiting.cancel()
    assert waiting.cancelled() is True
    assert waiting.done() is True
    assert repr(fence.done) == "True"


# ---------------------------------------------------------------- errors


def raised(call):
    with pytest.raises(aotc.Error) as caught:
        call()
    return caught.value


def test_errors_are_also_python_error_types(module, tmp_path):
    cases = [
        (lambda: module(X, X, X), TypeError), (lambda: module(), TypeError), (lambda: module(y=X), TypeError),
        (lambda: module.invoke("main"), TypeError), (lambda: module(X.astype("f2")), TypeError),
        (lambda: module("text"), TypeError), (lambda: module(X[:1]), ValueError),
        (lambda: module.invoke("other", X), ValueError), (lambda: aotc.load(tmp_path / "none"), FileNotFoundError),
        (lambda: aotc.load(module.main, threads=1), aotc.BundleError),
        (lambda: module.submit("main", X, wait=[aotc.Fence()], deadline=0.01).result(), TimeoutError),
        (lambda: aotc.compile("no model"), aotc.CompileError),
        (lambda: module.submit("main", X, deadline=-1), ValueError),
    ]  # fmt: skip
    for call, kind in cases:
        error = raised(call)
        assert isinstance(error, kind)
        copied = pickle.loads(pickle.dumps(error))
        assert type(copied) is type(error)
        assert str(copied) == str(error)
    missing = raised(lambda: aotc.load(tmp_path / "none"))
    assert missing.filename == str(tmp_path / "none")


@pytest.mark.parametrize(
    ("call", "meant"),
    [(lambda b: aotc.load(b, num_threads=1), "threads="), (lambda b: aotc.compile(tree, X, opt_lvel=1), "opt_level=")],
)
def test_a_misspelt_keyword_is_recognized(bundle, call, meant):
    assert meant in str(raised(lambda: call(bundle)))


def test_the_old_name_of_call_errors_is_accepted():
    with pytest.warns(DeprecationWarning, match=r"aotc\.CallError"):
        assert aotc.VmError is aotc.CallError


# ---------------------------------------------------------------- names


def test_dir_lists_only_public_names(module, bundle):
    fence = module.submit("main", X)
    fence.result()
    bound = module.bind({"x": X})
    array, options = module.put(X), module.main.options()
    for shown in (aotc, module, module.main, options, fence, fence[0], aotc.Fence(), bound, array):
        for name in dir(shown):
            member = getattr(shown, name)
            assert name == "__version__" or not name.startswith("_")
            assert member is not None or name == "mesh"  # of a model for one device
    assert {"again", "own_weights", "prepared", "get_function"}.isdisjoint(dir(module))
    assert {"register_argument", "expire", "on_fence_settled", "run", "stop"}.isdisjoint(dir(fence))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in dir(aotc):
            getattr(aotc, name)


def test_typed_keywords_equal_the_options():
    assert OptionKeywords.__annotations__.keys() == set(Options.__dataclass_fields__)


def test_warnings_point_at_the_line_of_the_caller():
    with pytest.warns(aotc.AotcWarning, match=r"call it as module\['state'\]") as found:
        aotc.compile({"state": lambda x: x + 1}, args={"state": (np.ones(2, np.float32),)})
    assert [warning.filename for warning in found] == [__file__]


def test_a_notebook_names_a_bundle_in_memory_by_its_model():
    def doubled(x):
        return x * 2

    text = aotc.compile(doubled, np.ones(2, np.float32))._repr_html_()
    assert "bytes&gt;" not in text
    assert "<b>doubled, " in text
