"""States: what one call gives is what the next one takes, in the same memory."""

import gc
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import aotc
from aotc import BundleError, CallError, CompileError
from aotc.vmfb import custom_calls

pytestmark = pytest.mark.cpu

PARAMS = {"w": np.full(3, 2, np.float32)}
CACHE = {"k": np.zeros((4, 3), np.float32), "n": np.int32(0)}
ONE = np.float32(1)


def decode(params, cache, token):
    k = cache["k"].at[cache["n"]].set(token * params["w"])
    return {"sum": k.sum(), "cache": {"k": k, "n": cache["n"] + 1}}


def pair(cache, x):
    return cache + x, x * 2


@pytest.fixture(scope="module", params=[(), ("cache",)], ids=["apart", "donated"])
def module(request):
    return aotc.load(aotc.compile(decode, PARAMS, CACHE, ONE, state=request.param, bind=["params"]), threads=1)


def test_each_call_of_a_state_continues_from_the_last(module):
    state = module.state("cache")
    sums = [float(state(PARAMS, np.float32(n))["sum"]) for n in (1, 2)]
    assert sums == [6, 18]
    assert set(state(params=PARAMS, token=np.float32(3))) == {"sum"}
    assert state["cache"]["k"].tolist() == [[2] * 3, [4] * 3, [6] * 3, [0] * 3]
    assert state["cache['n']"] == 3
    state.reset()
    assert state["cache"]["n"] == 0
    other = module.state("cache")
    assert float(other.main(PARAMS, ONE)["sum"]) == 6


def test_state_values_are_copies_and_can_be_set(module):
    mine = {"k": np.ones((4, 3), np.float32), "n": np.array(2, np.int32)}
    state = module.state("cache", init={"cache": mine})
    state(PARAMS, ONE)
    assert mine["k"].tolist() == [[1] * 3] * 4
    seen = state["cache"]
    state(PARAMS, np.float32(4))
    assert seen["k"].tolist() == [[1] * 3, [1] * 3, [2] * 3, [1] * 3]
    state["cache"] = mine
    state(PARAMS, ONE)
    assert mine["k"].tolist() == [[1] * 3] * 4
    state.reset()
    assert state["cache"]["n"] == 2
    with pytest.raises(CallError, match=r"cache\['n'\] is missing"):
        state["cache"] = {"k": mine["k"]}
    with pytest.raises(CallError, match="has no 'params'"):
        state["params"] = PARAMS
    with pytest.raises(CallError, match="has no 'nothing'"):
        _ = state["nothing"]


def test_a_state_can_be_saved_and_loaded(module, tmp_path):
    state = module.state("cache")
    state(PARAMS, ONE)
    state.save(tmp_path / "cache.safetensors")
    assert load_file(tmp_path / "cache.safetensors")["cache/k"].tolist() == state["cache"]["k"].tolist()
    other = module.state("cache")
    other.load(tmp_path / "cache.safetensors")
    assert float(other(PARAMS, np.float32(2))["sum"]) == 18
    small = aotc.load(aotc.compile(pair, CACHE["k"], ONE)).state("cache", results={"result[0]": "cache"})
    with pytest.raises(BundleError, match=r"cache is missing\n  there is no cache/k\n  there is no cache/n"):
        small.load(tmp_path / "cache.safetensors")
    with pytest.raises(BundleError, match="cannot be read: No such file"):
        small.load(tmp_path / "no.safetensors")


def test_a_state_works_with_bound_weights(module):
    layer = module.bind({"params": PARAMS})
    state = layer.state("cache")
    assert [float(state(np.float32(n))["sum"]) for n in (1, 2)] == [6, 18]
    layer.update({"params": {"w": np.full(3, 1, np.float32)}})
    assert float(state(token=ONE)["sum"]) == 21


def test_results_of_a_tuple_are_named_when_compiling_or_loading():
    x = np.ones(3, np.float32)
    module = aotc.load(aotc.compile(pair, x, x), threads=1)
    with pytest.raises(CallError, match=r"no result becomes cache(.|\n)*results=\{'result\[0\]': 'cache'\} here"):
        module.state("cache")
    state = module.state("cache", results={"result[0]": "cache"})
    assert state(x).tolist() == [2, 2, 2]
    assert state["cache"].tolist() == [1, 1, 1]
    data = aotc.compile(pair, x, x, state={"result[0]": "cache"})
    module = aotc.load(aotc.upgrade(data), threads=1)
    assert [row["donated"] for row in module.main.signature.arguments] == [True, False]
    state = module.state("cache")
    state(x)
    memory = state.values["cache"]
    assert state(x).tolist() == [2, 2, 2]
    assert state.values["cache"] is memory
    assert memory.tolist() == [2, 2, 2]


@jax.tree_util.register_dataclass
@dataclass
class Step:
    p: Any
    n: Any


def as_dict(p, n, x):
    return {"p": p + x, "inner": {"n": n + 1}, "y": (x * 2, x)}


def as_dataclass(p, n, x):
    return Step(p + x, n + 1), x * 2


def as_tuple(p, n, x):
    return (p + x, (n + 1, x * 2))


@pytest.mark.parametrize(
    ("function", "state"),
    [
        (as_dict, {"result['p']": "p", "result['inner']['n']": "n"}),
        (as_dict, {'result["p"]': "p", "result[inner][n]": "n"}),
        (as_dict, {"p": "p", "inner['n']": "n"}),
        (as_dict, ["result['p']=p", "inner['n']=n"]),
        (as_dataclass, {"result[0].p": "p", "result[0].n": "n"}),
        (as_tuple, {"result[0]": "p", "result[1][0]": "n"}),
    ],
)
@pytest.mark.parametrize("when", ["compiling", "loading"])
def test_a_leaf_of_a_result_tree_is_named_by_its_path(function, state, when):
    p, n, x = np.ones(3, np.float32), np.zeros(2, np.float32), np.arange(3, dtype=np.float32)
    compiled = {"state": state} if when == "compiling" else {}
    module = aotc.load(aotc.compile(function, p, n, x, **compiled), threads=1)
    donated = [row["donated"] for row in module.main.signature.arguments]
    assert donated == [when == "compiling"] * 2 + [False]
    results = dict(row.split("=") for row in state) if isinstance(state, list) else state
    kept = module.state("p", "n", init={"p": p, "n": n}, results=None if when == "compiling" else results)
    for _ in range(2):
        rest = jax.tree.leaves(kept(x))
        np.testing.assert_array_equal(rest[0], x * 2)
        whole = jax.tree.leaves(function(p, n, x))
        p, n = next(leaf for leaf in whole if leaf.shape == (3,)), next(leaf for leaf in whole if leaf.shape == (2,))
    np.testing.assert_array_equal(kept["p"], p)
    np.testing.assert_array_equal(kept["n"], n)


def test_the_whole_result_tree_becomes_an_argument():
    """The names of its leaves are those of the argument, a dataclass here."""

    def step(s, x):
        return Step(s.p + x, s.n + 1)

    start, x = Step(np.ones(3, np.float32), np.zeros((), np.float32)), np.arange(3, dtype=np.float32)
    module = aotc.load(aotc.compile(step, start, x, state={"result": "s"}), threads=1)
    assert [row["donated"] for row in module.main.signature.arguments] == [True, True, False]
    state = module.state("s", init={"s": start})
    assert state(x) is None
    assert state(x) is None
    np.testing.assert_array_equal(state["s"].p, 1 + 2 * x)
    assert state["s"].n == 2


def test_a_result_tree_that_no_function_takes_is_refused():
    x = np.ones(3, np.float32)
    with pytest.raises(CompileError, match=r"\"result\['inner'\]\" becomes p\['n'\], which no function takes"):
        aotc.compile(as_dict, x, x, x, state={"result['inner']": "p"})
    with pytest.raises(CompileError, match=r"result\['q'\]\" and an argument 'p'\n  try: RESULT=ARGUMENT; results: "):
        aotc.compile(as_dict, x, x, x, state={"result['q']": "p"})


def test_invalid_states_are_refused(module):
    x = np.ones(3, np.float32)
    with pytest.raises(CallError, match=r"no argument is called 'nope'\n    expected: params\['w'\], cache\['k'\]"):
        module.state("nope")
    with pytest.raises(CallError, match=r"no result becomes params\['w'\]"):
        module.state("params")
    with pytest.raises(CallError, match="a state without names"):
        module.state()
    with pytest.raises(CompileError, match=r"has a result 'result\[2\]' and an argument 'cache'"):
        aotc.compile(pair, x, x, state={"result[2]": "cache"})
    with pytest.raises(CompileError, match=r"result\[1\] is f32\[2\], but argument cache is f32\[3\]"):
        aotc.compile(lambda cache, x: (cache, x[:2]), x, x, state=["result[1]=cache"])
    for wrong in (3, "cache", [3]):
        with pytest.raises(CompileError, match=r"state (is|has)"):
            aotc.compile(pair, x, x, state=wrong)
    odd = aotc.load(aotc.compile(lambda cache, x: {"cache": cache[:1]}, x, x))
    with pytest.raises(CallError, match=r"cache is f32\[1\] in 'main', and f32\[3\] elsewhere"):
        odd.state("cache")


def test_other_donated_arguments_are_not_overwritten():
    x = np.ones(3, np.float32)
    function = jax.jit(lambda cache, x: {"cache": cache + x, "y": x * 2}, donate_argnums=(0, 1))
    state = aotc.load(aotc.compile(function, x, x)).state("cache")
    assert state(x)["y"].tolist() == [2, 2, 2]
    assert x.tolist() == [1, 1, 1]


def test_states_of_symbolic_size_need_an_initial_value():
    spec = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n"), jnp.float32)
    module = aotc.load(aotc.compile(jax.jit(lambda cache, x: {"cache": cache * 2, "y": cache.sum() + x}), spec, ONE))
    state = module.state("cache")
    with pytest.raises(CallError, match=r"has no cache yet, and its size is not known: cache: f32\[n\]"):
        state(ONE)
    state["cache"] = np.ones(5, np.float32)
    assert [float(state(ONE)["y"]) for _ in range(2)] == [6, 11]


def test_a_state_refuses_concurrent_calls(monkeypatch):
    waiting, go = threading.Event(), threading.Event()

    def hold(x, out):
        waiting.set()
        go.wait(60)
        out[...] = x

    monkeypatch.setattr(custom_calls, "_REGISTRY", {})
    aotc.register_custom_call("hold", native=False)
    call = jax.ffi.ffi_call("hold", jax.ShapeDtypeStruct((3,), np.float32))
    x = np.ones(3, np.float32)
    data = aotc.compile(jax.jit(lambda cache, x: {"cache": call(cache) + x}), x, x)
    state = aotc.load(data, custom_calls={"hold": hold}).state("cache")
    thread = threading.Thread(target=state, args=(x,))
    thread.start()
    assert waiting.wait(60)
    with pytest.raises(CallError, match="another call with the same state is running"):
        state(x)
    with pytest.raises(CallError, match="another call"):
        state.reset()
    go.set()
    thread.join()
    assert state["cache"].tolist() == [1, 1, 1]


def test_a_call_that_fails_while_running_invalidates_the_state(monkeypatch):
    x = np.ones(3, np.float32)
    state = aotc.load(aotc.compile(pair, x, x, state={"result[0]": "cache"})).state("cache")
    state(x)
    with pytest.raises(CallError, match="wrong shape"):
        state(np.ones(4, np.float32))
    assert state["cache"].tolist() == [1, 1, 1]

    def broken(*args):
        raise MemoryError

    with monkeypatch.context() as planted:
        planted.setattr(state.main, "_run", broken)
        with pytest.raises(MemoryError):
            state(x)
    with pytest.raises(CallError, match=r"the state is lost(.|\n)*state\.reset\(\)"):
        state(x)
    state.reset()
    state(x)
    assert state["cache"].tolist() == [1, 1, 1]


def test_saved_states_close_their_files_without_garbage_collection(tmp_path):
    """No cycle keeps a module, its state or its weights."""
    x = np.ones(3, np.float32)
    data = aotc.compile(lambda w, cache, x: {"cache": cache + x * w}, x, x, x, bind=["w"], weights="unpacked")
    gc.collect()
    gc.disable()
    try:
        module = aotc.load(data, max_in_flight=1, threads=1)
        state = module.state("cache")
        state(x)
        module.update_weights({"w": 2 * x})
        state.main(x)
        gone = [weakref.ref(x) for x in (module, state, module.get_function("main"), module._bundle)]
        del module, state
        assert [ref() for ref in gone] == [None] * 4
    finally:
        gc.enable()


def test_state_arguments_of_wrong_type_are_refused():
    module = aotc.load(aotc.compile(pair, CACHE["k"], ONE))
    for given, told in (
        ({"results": "result[0]"}, "pair: error: results of a state is not a mapping\n    found:    'result"),
        ({"init": [CACHE["k"]]}, "pair: error: init of a state is not a mapping"),
        ({"results": {"result[0]": "cache", "result[1]": "cache"}}, "several results of 'main' become cache"),
    ):
        with pytest.raises(CallError) as refused:
            module.state("cache", **given)
        assert told in str(refused.value)
