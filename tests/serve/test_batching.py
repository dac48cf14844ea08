"""Requests that run together: what is gathered, what is not, that nobody sees a difference."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from support.served import running

import aotc
from aotc.serve.batching import batch_dim_symbol, reason_rows_depend

pytestmark = pytest.mark.cpu

W = np.random.default_rng(0).normal(size=(16, 8)).astype("f4")


def compiled(function, *shapes, **options):
    """A bundle of a function of arrays, whose dims are the text of symbols."""
    scope = export.SymbolicScope()
    arguments = [
        jax.ShapeDtypeStruct(export.symbolic_shape(dims, scope=scope) if dims else (), dtype) for dims, dtype in shapes
    ]
    return aotc.compile(export.export(jax.jit(function))(*arguments), **options)


def rows(x):
    return jnp.tanh(x @ W)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models whose rows are independent, and models whose rows are not."""
    path = tmp_path_factory.mktemp("models")
    x = ("b, 16", "f4")
    models = {
        "rows": compiled(rows, x, specialize={"b": [4]}),
        "mixed": compiled(lambda x: x - x.mean(0, keepdims=True), x),
        "square": compiled(lambda x: x @ x.T, x),
        "fixed": compiled(rows, ("4, 16", "f4")),
        "two": compiled(lambda x, y: x * y.sum(1, keepdims=True), ("b, n", "f4"), ("b, 3", "f4")),
        "picky": compiled(lambda i: jnp.asarray(W)[i % 16], ("b", "i4")),
    }
    for name, data in models.items():
        (path / f"{name}.vmfb").write_bytes(data)
    return path


@pytest.fixture(scope="module")
def server(folder):
    """A server that waits long enough for a batch to fill."""
    with running(folder, max_batch=8, max_delay=0.05, pad=True) as found:
        yield found


def function(server, name):
    return server.engine.repository.models[name][1].functions["main"]


def ask(server, name, *arrays, parameters=None):
    signature = function(server, name)
    inputs = [
        {"name": n, "shape": list(a.shape), "datatype": "FP32", "data": a.tolist()}
        for n, a in zip(signature.inputs, arrays)
    ]
    status, document = server.json(f"/v2/models/{name}/infer", {"inputs": inputs, "parameters": parameters or {}})
    if status != 200:
        return status, document["error"]
    (row,) = document["outputs"]
    return status, np.array(row["data"], "f4").reshape(row["shape"])


def together(calls):
    """Run calls at a time; return what they return, in order."""
    results = [None] * len(calls)

    def run(n):
        results[n] = calls[n]()

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def batches(server, name):
    """Return how many batches there were, and their rows."""
    text = server.ask("/metrics")[2].decode()
    parts = [text.partition(f'aotc_batch_rows_{x}{{model="{name}"}} ')[2] for x in ("count", "sum")]
    return [float(x.partition("\n")[0] or 0) for x in parts]


def test_models_with_independent_rows_are_batched(server):
    alone = {name: function(server, name).why_alone for name in ("rows", "mixed", "square", "fixed", "two", "picky")}
    assert alone["rows"] == alone["two"] == alone["picky"] == ""
    assert alone["mixed"] == "results of a row depend on other rows"
    assert "symbolic dim first" in alone["square"]
    assert "symbolic dim first" in alone["fixed"]


def test_batched_requests_get_their_own_results(server):
    before = batches(server, "rows")
    arrays = [np.random.default_rng(n).normal(size=(1 + n % 3, 16)).astype("f4") for n in range(12)]
    results = together([lambda a=a: ask(server, "rows", a) for a in arrays])
    for array, (status, result) in zip(arrays, results):
        assert status == 200
        np.testing.assert_allclose(result, np.tanh(array @ W), rtol=1e-4, atol=1e-5)
    count, total = np.subtract(batches(server, "rows"), before)
    assert total == sum(len(a) for a in arrays)
    assert count < len(arrays)


def test_requests_of_different_shapes_are_not_batched(server):
    drawn = np.random.default_rng(0).normal(size=(8, 2, 1, 3)).astype("f4")
    pairs = [(x[:, : 2 + n % 2].copy(), y) for n, (x, y) in enumerate(drawn)]
    results = together([lambda p=p: ask(server, "two", *p) for p in pairs])
    for (x, y), (status, result) in zip(pairs, results):
        assert status == 200
        np.testing.assert_allclose(result, x * y.sum(1, keepdims=True), rtol=1e-4, atol=1e-5)


def test_an_invalid_request_does_not_fail_its_batch(server):
    good = np.ones((1, 16), "f4")
    calls = [lambda: ask(server, "rows", good), lambda: ask(server, "rows", np.ones((1, 15), "f4"))]
    calls += [lambda: ask(server, "two", np.ones((1, 2), "f4"), np.ones((2, 3), "f4"))]
    found = together(calls)
    assert [status for status, _ in found] == [200, 400, 400]
    assert "FP32 [1, 15]" in found[1][1]


def test_requests_without_rows_or_with_too_many_are_not_batched(server):
    before = batches(server, "rows")
    assert "0" in ask(server, "rows", np.ones((0, 16), "f4"))[1]  # JAX's dims are 1 at least
    for count in (8, 20):
        status, result = ask(server, "rows", np.ones((count, 16), "f4"))
        assert (status, result.shape) == (200, (count, 8))
    assert batches(server, "rows") == before


def test_a_batch_is_padded_to_a_specialized_size(server, monkeypatch):
    made = function(server, "rows").batcher
    assert made._sizes == [4]
    seen = []
    submit = made._module.submit

    def noted(name, *arrays, **more):
        seen.append(arrays[0].shape[0])
        return submit(name, *arrays, **more)

    monkeypatch.setattr(made._module, "submit", noted)
    status, result = ask(server, "rows", np.ones((3, 16), "f4"))
    assert (status, result.shape, seen) == (200, (3, 8), [4])


def test_a_timed_out_request_does_not_end_its_batch(folder):
    with running(folder, max_batch=8, max_delay=0.3) as server:
        good = np.ones((1, 16), "f4")
        calls = [lambda: ask(server, "rows", good), lambda: ask(server, "rows", good, parameters={"timeout": 20_000})]
        assert [status for status, _ in together(calls)] == [200, 504]
        assert batches(server, "rows") == [1, 1]


def test_a_request_that_the_model_refuses_fails_alone(tmp_path):
    """The batch fails with it; then each runs by itself."""
    bundle = compiled(lambda x: x * 2, ("b, n", "f4"))
    (tmp_path / "m.vmfb").write_bytes(bundle)
    with running(tmp_path, max_batch=8, max_delay=0.05) as server:
        made = function(server, "m").batcher
        submit = made._module.submit

        def strict(name, *arrays, **more):
            if (arrays[0] < 0).any():
                raise aotc.CallError("m", "negative")
            return submit(name, *arrays, **more)

        made._module.submit = strict
        values = [np.full((1, 3), n, "f4") for n in (1, -1, 2)]
        found = together([lambda v=v: ask(server, "m", v) for v in values])
    assert [status for status, _ in found] == [200, 400, 200]
    np.testing.assert_array_equal(found[2][1], np.full((1, 3), 4, "f4"))


def dims(*lists):
    return [{"name": "", "dtype": "f32", "dims": d} for d in lists]


@pytest.mark.parametrize(
    ("arguments", "results", "symbol"),
    [
        (dims(["b", 3]), dims(["b"]), "b"),
        (dims(["b", "n"], ["b"]), dims(["b", "2*n"]), "b"),
        (dims(["b"]), dims(["b", "b"]), ""),
        (dims(["b", "2*b"]), dims(["b"]), ""),
        (dims(["b"], []), dims(["b"]), ""),
        (dims(["b"]), dims(["c"]), ""),
        (dims(["2*b"]), dims(["2*b"]), ""),
        (dims([4]), dims([4]), ""),
        ([], dims(["b"]), ""),
    ],
)
def test_the_batch_dim_is_the_first_dim_of_all_arrays(arguments, results, symbol):
    assert batch_dim_symbol(arguments, results) == symbol


def test_a_model_that_refuses_random_inputs_is_not_batched():
    class Refuses:
        def invoke(self, *args, **kwargs):
            raise aotc.CallError("m", "no such number")

    assert "no such number" in reason_rows_depend(Refuses(), "main", dims(["b"]), "b")
    assert "expressions" in reason_rows_depend(Refuses(), "main", dims(["b", "2*n"]), "b")
