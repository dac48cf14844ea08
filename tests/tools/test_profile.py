"""Profiles: each kernel measured alone, results as ever, records that are kept, read back and refused."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import aotc
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.errors import BundleError, CallError
from aotc.vmfb.profile.cost_record import kernel_text_digest, read_record, record_problem, record_text
from aotc.vmfb.profile.measure import Profiler
from aotc.vmfb.profile.stored_records import PROFILE, bundle_with_profile, stored_record

pytestmark = pytest.mark.cpu
X = np.linspace(-1, 1, 64 * 64, dtype=np.float32).reshape(64, 64)


def profiled(function, *arguments, **flags):
    """The module of a function and the record of a call."""
    module = aotc.load(aotc.compile(function, *arguments, **flags), threads=2)
    return module, module.profile("main", *arguments, repeat=2)


def test_a_profile_has_a_row_for_each_kernel():
    module, record = profiled(lambda x: jax.nn.softmax(x @ x, 1), X)
    assert record_problem(record) == ""
    assert len(record["kernels"]) == module.stats()["kernels"] == 2
    for row, (name, text, loc, ops, _) in zip(record["kernels"], module._executable.kernel_texts()):
        assert (row["name"], row["digest"], row["loc"], row["ops"]) == (name, kernel_text_digest(text), loc, ops)
        assert row["ns"]["cpu"] > 0
        assert row["runs"] == 1
        assert "test_profile.py" in row["loc"]
    assert record["kernels"][0]["bytes"] == 2 * X.nbytes
    assert record["target"] == module.stats()["target"]


@pytest.mark.usefixtures("no_unrolling")
def test_a_profile_counts_loop_iterations_and_measures_once():
    def function(x, n):
        return lax.fori_loop(0, n, lambda i, c: jnp.tanh(c @ x), x)

    _, record = profiled(function, X, np.int32(5))
    assert {row["runs"] for row in record["kernels"]} >= {5, 6}  # the body, the condition


def test_profile_rows_have_sizes():
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, 8"), np.float32)
    module = aotc.load(aotc.compile(jax.export.export(jax.jit(lambda x: jnp.sin(x).sum(1)))(shape)))
    for n in (3, 70):
        record = module.profile("main", np.ones((n, 8), np.float32), repeat=1)
        assert [row["sizes"] for row in record["kernels"]] == [{"n": n}]
        assert record["kernels"][0]["bytes"] == 4 * (8 * n + n)


@pytest.mark.parametrize("seed", range(3))
def test_a_profile_gives_the_results_of_a_call(seed, monkeypatch):
    """Kernels that write where they read get their old values back before each run."""

    def function(x, i):
        y = x.at[i].add(1.0)
        z = lax.fori_loop(0, 4, lambda k, c: c.at[k].set(c[k + 1] * 2).at[i[0]].multiply(1.5), y)
        return jnp.sort(z, 1), lax.dynamic_update_slice(z, y[:2], (i[0], 0)) + y

    rng = np.random.default_rng(seed)
    x, i = rng.standard_normal((16, 16)).astype("float32"), rng.integers(0, 16, 5).astype("int32")
    module = aotc.load(aotc.compile(function, x, i), threads=1)
    got = []
    step = type(module._functions["main"]).step

    def kept(self, *arguments):
        got[:] = step(self, *arguments)
        return got

    monkeypatch.setattr(type(module._functions["main"]), "step", kept)
    module.profile("main", x, i, repeat=3)
    for a, b in zip(got, module.invoke("main", x, i), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_custom_call_is_profiled_with_one_call():
    calls = []

    def seen(x, out):
        calls.append(1)
        out[...] = x * 2

    aotc.register_custom_call("profiled_twice", seen, native=False)
    text = """func.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> {
      %0 = stablehlo.custom_call @profiled_twice(%x) : (tensor<4xf32>) -> tensor<4xf32>
      return %0 : tensor<4xf32> }"""
    module = aotc.load(aotc.compile(text), custom_calls={"profiled_twice": seen})
    module.profile("main", np.ones(4, np.float32))
    assert len(calls) == 1


def test_profile_errors_state_the_reason():
    module = aotc.load(aotc.compile(jnp.sin, X, debug_info=False))
    with pytest.raises(CallError, match="no kernel text"):
        module.profile("main", X)
    with pytest.raises(CallError, match="no function 'other'"):
        module.profile("other", X)
    with pytest.raises(CallError, match="wrong number of arguments"):
        module.profile("main")
    with pytest.raises(CallError, match="not a number of rounds"):
        module.profile("main", X, repeat=0)


def test_cost_records_round_trip_as_text():
    _, record = profiled(jnp.sin, X)
    text = record_text(record)
    assert read_record(text) == json.loads(text) == record
    assert len(text.splitlines()) > len(record["kernels"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.update(format=2), "its format is 2"),
        (lambda r: r.pop("kernels"), "no 'kernels'"),
        (lambda r: r["kernels"][0].update(digest=3), "digest is int"),
        (lambda r: r["kernels"][0]["ns"].update(cpu=0.0), "not positive"),
        (lambda r: r["kernels"][0]["ns"].update(cpu=float("nan")), "not positive"),
        (lambda r: r["kernels"][0]["ns"].update(cpu="1"), "none of the 2 allowed forms"),
    ],
)
def test_an_invalid_cost_record_is_refused(change, message):
    _, record = profiled(jnp.sin, X)
    change(record)
    assert message in record_problem(record)
    with pytest.raises(aotc.CompileError, match="the file is not a cost record"):
        aotc.compile(jnp.sin, X, costs=record)


def test_a_bundle_stores_its_profile():
    data = aotc.compile(jnp.sin, X)
    assert stored_record(open_bundle(data), PROFILE) == {}
    first, second = (aotc.load(data).profile("main", X, repeat=1) for _ in range(2))
    once = bundle_with_profile(open_bundle(data), first)
    twice = bundle_with_profile(open_bundle(once), second)
    assert stored_record(open_bundle(once), PROFILE) == first
    assert stored_record(open_bundle(twice), PROFILE) == second
    assert len(open_bundle(twice).manifest["segments"]) == len(open_bundle(data).manifest["segments"]) + 1
    np.testing.assert_array_equal(aotc.load(twice, verify=True).invoke("main", X)[0], aotc.load(data)(X))
    assert aotc.upgrade(twice) == data


def test_a_damaged_profile_is_refused():
    data = bundle_with_profile(open_bundle(aotc.compile(jnp.sin, X)), {"kernels": []})
    with pytest.raises(BundleError, match="the profile of the bundle cannot be read: record has no 'format'"):
        stored_record(open_bundle(data), PROFILE)


def test_short_kernels_are_timed_in_batches(monkeypatch):
    counts = []
    call = Profiler._call
    monkeypatch.setattr(Profiler, "_call", lambda self, command, n: counts.append(n) or call(self, command, n))
    profiled(jnp.sin, X[0])
    assert max(counts) > 10
