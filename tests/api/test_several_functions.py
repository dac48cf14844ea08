"""Several models in one bundle: functions that share weights, kernels and states."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aotc
from aotc import CallError, CompileError
from aotc.ir.program.ir import Constants
from aotc.vmfb import custom_calls
from aotc.vmfb.bundle import open_bundle

pytestmark = pytest.mark.cpu

W = np.random.default_rng(0).standard_normal((256, 256)).astype("float32") / 16
CACHE = {"k": np.zeros(256, np.float32)}
TOKENS, TOKEN = np.ones((64, 256), np.float32), np.ones(256, np.float32)


@jax.jit
def helper(x):
    return jnp.tanh(x @ W)


def prefill(tokens, *, cache):
    """Fills the cache."""
    return {"cache": {"k": cache["k"] + helper(tokens).sum(0)}, "logits": helper(tokens)[-1]}


def decode(cache, token):
    return {"logits": helper(token[None])[0] + cache["k"], "cache": {"k": cache["k"] + token}}


EXAMPLES = {"args": {"prefill": (TOKENS,), "decode": (CACHE, TOKEN)}, "kwargs": {"prefill": {"cache": CACHE}}}


@pytest.fixture(scope="module")
def bundle():
    return aotc.compile({"prefill": prefill, "decode": decode}, **EXAMPLES, state=["cache"])


def test_each_function_matches_its_separate_compilation(bundle):
    module = aotc.load(bundle)
    assert list(module.functions) == ["prefill", "decode"]
    alone = aotc.load(aotc.compile(decode, CACHE, TOKEN))
    for found, want in (
        (module.decode(CACHE, TOKEN), alone(CACHE, TOKEN)),
        (module.prefill(TOKENS, cache=CACHE), jax.jit(prefill)(TOKENS, cache=CACHE)),
    ):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3), found, want)
    assert module.prefill.__doc__ == "Fills the cache."
    with pytest.raises(CallError, match=r"no default function 'main'\n    expected: prefill, decode"):
        module(CACHE, TOKEN)
    assert aotc.upgrade(bundle) == bundle


def test_functions_of_a_bundle_share_a_state(bundle):
    state = aotc.load(bundle).state("cache")
    logits = state.prefill(TOKENS)["logits"]
    row = np.tanh(TOKEN @ W)
    np.testing.assert_allclose(logits, row, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(state.decode(TOKEN)["logits"], 64 * row + row, rtol=1e-4, atol=1e-2)
    np.testing.assert_allclose(state["cache"]["k"], 64 * row + 1, rtol=1e-4, atol=1e-2)


def test_equal_weights_and_kernels_are_stored_once():
    data = aotc.compile({"a": decode, "b": decode}, args={"a": (CACHE, TOKEN), "b": (CACHE, TOKEN)}, source=False)
    alone = aotc.compile(decode, CACHE, TOKEN, source=False)
    both, one = (open_bundle(d).manifest for d in (data, alone))
    sizes = [{s["name"].rpartition("/")[2]: s["size"] for s in m["segments"]} for m in (both, one)]
    assert sizes[0]["constants"] == sizes[1]["constants"] >= W.nbytes
    assert len(both["variants"][0]["kernels"]) == len(one["variants"][0]["kernels"])


def test_constants_are_shared_if_their_bytes_are_equal():
    constants = Constants()
    big = np.arange(100_000, dtype=np.float32)
    other = big.copy()
    other[77_777] += 1
    places = [constants.add(x, "c") for x in (big, big.copy(), other, big.reshape(100, 1000), big, big.view(np.int32))]
    assert places[0] == places[1] == places[4]
    assert len(set(places)) == 4


def test_models_of_every_form_with_clashing_names_compile():
    def main(x):
        return helper(x) * 2

    spec = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 256"), jnp.float32)
    export = jax.export.export(jax.jit(lambda rows: helper(rows)))(spec)
    models = {"helper": main, "many": export, "blob": bytes(export.serialize()), "text": export.mlir_module()}
    module = aotc.load(aotc.compile(models, args={"helper": (TOKENS,)}))
    want = np.tanh(TOKENS @ W)
    np.testing.assert_allclose(module.helper(x=TOKENS), 2 * want, rtol=1e-4, atol=1e-4)
    for found in (module.many(rows=TOKENS[:5]), module.blob(rows=TOKENS[:5]), module.text(TOKENS[:5])):
        np.testing.assert_allclose(found, want[:5], rtol=1e-4, atol=1e-4)


def test_conflicting_models_are_refused(monkeypatch):
    monkeypatch.setattr(custom_calls, "_REGISTRY", {})

    def fails(match, *models, **flags):
        with pytest.raises(CompileError, match=match):
            aotc.compile(*models, **flags)

    fails("functions are called \\['a b'\\]", {"a b": decode})
    fails("functions are called", {})
    fails("args has 'b', which is not a function(.|\n)*one of a", {"a": decode}, args={"b": ()})
    fails("kwargs has 'b'", {"a": decode}, kwargs={"b": {}})
    fails("found 2 more", {"a": decode}, CACHE, TOKEN)
    fails("args of several models are not examples by name", {"a": decode}, args={"a": CACHE})
    fails("args= is for several models", decode, args={"a": ()})
    two = "func.func @f() -> tensor<f32> { %0 = stablehlo.constant dense<1.0> : tensor<f32> return %0 : tensor<f32> }"
    fails("model 'a' must have one public function to be joined with others; found f, g",
          {"a": two + two.replace("@f", "@g")})  # fmt: skip
    fails("custom op 'broken' is unknown", {"a": "module { broken }"})
    wide = jax.export.export(jax.jit(jnp.sin), platforms=["cpu", "cuda"])(TOKEN)
    fails("models for several platforms", {"a": wide, "b": decode}, args={"b": (CACHE, TOKEN)})

    def printing(x):
        jax.debug.print("{}", x)
        return x

    lowered = jax.jit(printing).lower(TOKEN)
    fails("a and b call back into Python", {"a": lowered, "b": lowered})
