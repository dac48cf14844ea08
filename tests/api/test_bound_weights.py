"""Weights that are bound: what depends on them alone is computed once, and calls give what they gave."""

import threading
import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import export, lax

import aotc
from aotc.diagnostics import AotcWarning, CompileError
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.errors import ArgumentError, BundleError, CallError

pytestmark = pytest.mark.cpu

RNG = np.random.default_rng(0)
TREE = ("args[0]",)


def f32(*shape):
    return (RNG.normal(size=shape) / np.sqrt(shape[0])).astype(np.float32)


def mlp(weights, x):
    for w, b in weights:
        x = jax.nn.relu(x @ w + b)
    return x


def conv_net(weights, x):
    for w in weights:
        x = jnp.tanh(lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))
    return x.mean((1, 2))


def attention_block(p, x):
    rows, dim = x.shape
    q, k, v = [(x @ p[name]).reshape(rows, 4, dim // 4).transpose(1, 0, 2) for name in "qkv"]
    scores = jax.nn.softmax(q @ k.transpose(0, 2, 1) / 4.0, -1) @ v
    x = x + scores.transpose(1, 0, 2).reshape(rows, dim) @ p["o"]
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * (1 + p["gain"])


def recurrent(p, x):
    def step(h, at):
        h = jnp.tanh(h @ p["h"] + at @ p["x"])
        return h, h

    return lax.scan(step, jnp.zeros((8, 32), jnp.float32), x)[1]


def dequantized(p, x):
    return x @ (p["w"].astype(jnp.float32) * p["scale"])


def integers(p, x):
    return lax.dot_general(x, p["w"], (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32) + p["b"]


def i8(*shape):
    return RNG.integers(-20, 20, shape).astype(np.int8)


BF16 = ml_dtypes.bfloat16
MODELS = {
    "mlp": (mlp, [(f32(64, 96), f32(96)), (f32(96, 40), f32(40))], f32(16, 64), 1e-5),
    "one row": (mlp, [(f32(128, 256), f32(256)), (f32(256, 64), f32(64))], f32(1, 128), 1e-5),
    "convolutions": (conv_net, [f32(3, 3, 16, 24), f32(3, 3, 24, 16)], f32(2, 12, 12, 16), 1e-4),
    "attention": (attention_block, {**{n: f32(64, 64) for n in "qkvo"}, "gain": f32(64)}, f32(24, 64), 1e-4),
    "turned": (lambda p, x: x @ p["w"].T, {"w": f32(256, 128)}, f32(2, 128), 1e-5),
    "in a loop": (recurrent, {"h": f32(32, 32), "x": f32(48, 32)}, f32(5, 8, 48), 1e-4),
    "bf16": (
        mlp, [(f32(64, 96).astype(BF16), f32(96).astype(BF16))], f32(16, 64).astype(BF16), 2e-2
    ),
    "i8": (integers, {"w": i8(64, 96), "b": RNG.integers(0, 9, 96).astype(np.int32)}, i8(32, 64), 0),
    "i8 that the model scales": (dequantized, {"w": i8(64, 96), "scale": f32(96)}, f32(16, 64), 1e-4),
}  # fmt: skip


def compiled(function, *arguments, bind=TREE, **flags):
    return aotc.compile(jax.jit(function), *arguments, bind=bind, verify_each=True, cache=False, **flags)


@pytest.mark.parametrize("name", MODELS)
def test_a_bound_call_matches_the_unbound_call(name):
    function, weights, x, error = MODELS[name]
    module = aotc.load(compiled(function, weights, x), threads=2, verify=True)
    assert module.prepared["main"]["prepare"]["results"], "nothing is computed before a call"
    bound = module.bind({"args[0]": weights})
    want = np.asarray(jax.jit(function)(weights, x), np.float64)
    scale = np.abs(want).max()
    for got in (bound(x), bound(x), bound.submit(x).result(60), module(weights, x)):
        np.testing.assert_allclose(np.asarray(got, np.float64), want, atol=error * scale)
    (out,) = bound.invoke(x, out=[np.empty(want.shape, np.asarray(got).dtype)])
    np.testing.assert_array_equal(out, bound(x))


def test_bound_matrices_are_packed_once_per_bind():
    """The program of a call has one kernel, which reads panels; that of the argument itself reads it in place."""
    w, x = f32(256, 256), f32(1, 256)
    opened = open_bundle(compiled(jnp.matmul, x, w, bind=("args[1]",), target="cpu:x86-64-v3"))
    (variant,) = opened.manifest["variants"]
    row = variant["prepared"]["main"]
    assert (row["weights"], row["takes"]) == ([1], [0, 2])
    (result,) = row["prepare"]["results"]
    assert result["sources"] == [1]
    assert len(result["dims"]) == 3
    assert np.prod(result["dims"]) == 256 * 256
    names = [kernel["name"] for kernel in variant["kernels"]]
    assert [n.partition("_")[2] for n in names] == ["matmul", "transpose", "packed_matmul"]


def test_weights_are_bound_by_name_number_or_tree():
    weights, x = {"a": f32(32, 32), "b": [f32(32)]}, f32(4, 32)
    module = aotc.load(compiled(lambda p, x: x @ jnp.exp(p["a"]) + p["b"][0], weights, x))
    want = module(weights, x)
    for values in (
        {"args[0]": weights},
        {"p": weights},
        {"args[0]['a']": weights["a"], "args[0]['b'][0]": weights["b"][0]},
        {0: weights["a"], "args[0]['b']": weights["b"]},
    ):
        np.testing.assert_allclose(module.bind(values)(x), want, rtol=1e-5)
    every = module.bind({"args[0]": weights, 2: x})
    np.testing.assert_allclose(every(), want, rtol=1e-5)
    assert every.bound == {0, 1, 2}


def test_bound_functions_accept_pytrees_and_names():
    weights, x = {"w": f32(3, 3), "b": f32(3)}, {"left": f32(2, 3), "right": f32(2, 3)}

    def model(weights, x, *, scale):
        return {"y": (x["left"] @ weights["w"] + weights["b"]) * scale, "z": x["right"]}

    module = aotc.load(aotc.compile(model, weights, x, kwargs={"scale": np.float32(1)}, bind=["weights"]))
    expected = module(weights, x, scale=np.float32(2))
    bound = module.bind({"weights": weights})
    leaves = [x["left"], x["right"], np.float32(2)]
    for found in (bound(x, scale=np.float32(2)), bound(scale=np.float32(2), x=x), bound(*leaves)):
        assert all(np.array_equal(found[key], expected[key]) for key in "yz")
    assert [row["name"] for row in bound.signature.arguments] == ["x['left']", "x['right']", "scale"]
    missing = "there is no argument 'y', argument 'x' is missing, argument 'scale' is missing"
    with pytest.raises(CallError, match=missing):
        bound(y=x)
    with pytest.raises(CallError, match=r"x\['right'\] is missing"):
        bound({"left": x["left"]}, scale=np.float32(2))
    only = module.bind({"x['left']": x["left"], "weights": weights})  # of a tree what is left is a tree
    assert np.array_equal(only({"right": x["right"]}, scale=np.float32(2))["y"], expected["y"])


def test_all_mismatched_bound_values_are_listed():
    weights, x = {"a": f32(32, 32), "b": f32(32), "c": f32(32)}, f32(4, 32)
    module = aotc.load(compiled(lambda p, x: x @ p["a"] + p["b"] + p["c"], weights, x))
    with pytest.raises(CallError) as caught:
        module.bind({"args[0]['a']": weights["a"][:5], "args[0]['b']": weights["b"].astype(np.float16), "no": x})
    text = str(caught.value)
    for part in ("no argument 'no'", "(p['a']) has the wrong shape", "f32[5, 32]", "(p['b']) has the wrong",
                 "f16[32]", "nothing for p['c']"):  # fmt: skip
        assert part in text, text
    with pytest.raises(CallError, match="bound together"):
        module.bind({0: weights["a"]})
    with pytest.raises(CallError, match="another structure"):
        module.bind({"args[0]": {"a": weights["a"]}})
    with pytest.raises(CallError, match="given twice"):
        module.bind({"args[0]": weights, 1: weights["b"]})
    with pytest.raises(CallError, match="not a mapping"):
        module.bind([weights])
    plain = module.bind({3: x})  # none of the weights: nothing is computed before
    np.testing.assert_allclose(plain(*weights.values()), module(weights, x))


def test_bind_and_update_take_keywords():
    module = aotc.load(compiled(lambda w, c, x: x @ w + c, f32(8, 8), f32(8), f32(4, 8), bind=()))
    (w, c, x), new = (f32(8, 8), f32(8), f32(4, 8)), f32(8)
    bound = module.bind(w=w, c=c)
    np.testing.assert_array_equal(bound(x), module(w, c, x))
    bound.update({"w": w}, c=new)
    np.testing.assert_array_equal(bound(x), module(w, new, x))
    with pytest.raises(ArgumentError, match="c is given twice"):
        module.bind({"c": c}, c=c)
    with pytest.raises(ArgumentError, match=r"no argument 'd' to bind\n *expected: w, c, x"):
        module.bind(d=c)


def test_an_unpacked_weight_and_a_varying_batch_size_work():
    """Arguments behind a weight have other numbers in the program of a call: sizes, messages, donation."""
    scope = export.SymbolicScope()
    types = [jax.ShapeDtypeStruct(export.symbolic_shape(s, scope=scope), "float32") for s in ("32, 32", "32", "b, 32")]
    exported = export.export(jax.jit(lambda w, c, x: (x @ w + c, x.sum(0) + c)))(*types)
    module = aotc.load(aotc.compile(exported, bind=(0, "args[1]"), verify_each=True))
    w, c = f32(32, 32), f32(32)
    bound = module.bind({0: w, 1: c})
    assert list(bound.arrays) == [1]
    for rows in (3, 1, 7):
        x = f32(rows, 32)
        for got, want in zip(bound(x), module(w, c, x), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    with pytest.raises(CallError, match=r"argument 0 \(x\) has the wrong shape"):
        bound(f32(3, 31))
    with pytest.raises(CallError, match="wrong arguments: 1 argument is positional, not 2"):
        bound(x, x)


def test_a_dim_named_like_a_loop_variable_works():
    """Lowering renames it; the program of a call has the name of the signature."""
    exported = export.export(jax.jit(jnp.matmul))(
        jax.ShapeDtypeStruct(export.symbolic_shape("t, 64"), "float32"), jax.ShapeDtypeStruct((64, 32), "float32")
    )
    module = aotc.load(aotc.compile(exported, bind=(1,)))
    w, x = f32(64, 32), f32(5, 64)
    np.testing.assert_allclose(module.bind({1: w})(x), x @ w, rtol=1e-4, atol=1e-5)
    with pytest.raises(CallError, match=r"expected: f32\[t, 64\]"):
        module.bind({1: w})(f32(5, 63))


def test_donation_works_for_unbound_arguments():
    step = jax.jit(lambda w, state: state @ w, donate_argnums=1)
    w, state = f32(16, 16), f32(16, 16)
    module = aotc.load(aotc.compile(step, w, state, bind=("args[0]",)))
    bound = module.bind({0: w})
    kept = state.copy()
    np.testing.assert_allclose(bound(state), kept @ w, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(state, kept)
    np.testing.assert_allclose(bound.invoke(state, donate=True)[0], kept @ w, rtol=1e-4, atol=1e-5)


def test_specialized_copies_read_the_prepared_weights():
    types = (jax.ShapeDtypeStruct(export.symbolic_shape("b, 64"), "float32"), jax.ShapeDtypeStruct((64, 96), "float32"))
    exported = export.export(jax.jit(lambda x, w: jnp.tanh(x @ w)))(*types)
    module = aotc.load(aotc.compile(exported, bind=("args[1]",), specialize={"b": (1, 32)}, verify_each=True))
    w = f32(64, 96)
    bound = module.bind({1: w})
    for rows in (1, 32, 5):
        x = f32(rows, 64)
        np.testing.assert_allclose(bound(x), np.tanh(x @ w), rtol=1e-4, atol=1e-5)


def test_updates_of_bound_weights_are_atomic():
    """Of calls in flight each reads the old weights or the new ones: never one of each."""
    one, x = np.eye(64, dtype=np.float32), np.ones((8, 64), np.float32)

    def of(factor):
        return {"args[0]": {"a": one * factor, "b": one * factor}}

    module = aotc.load(compiled(lambda p, x: (x @ p["a"]) @ p["b"], of(1)["args[0]"], x), threads=1)
    bound = module.bind(of(1))
    found, stop = [], threading.Event()

    def call():
        mine = set()
        while not stop.is_set():
            mine.update(np.unique(bound(x)))
        found.append(mine)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 1
    factor = 1
    while time.monotonic() < end:
        factor = factor % 5 + 1
        bound.update(of(factor))
        assert bound(x)[0, 0] == factor**2
    stop.set()
    for thread in threads:
        thread.join()
    assert set().union(*found) <= {n**2 for n in range(1, 6)}
    assert len(set().union(*found)) > 1


def test_a_mismatched_update_changes_no_weight():
    w, x = f32(32, 32), f32(4, 32)
    module = aotc.load(compiled(jnp.matmul, w, x.T))
    bound = module.bind({0: w})
    before = bound(x.T)
    with pytest.raises(CallError, match="wrong shape"):
        bound.update({0: w[:3]})
    with pytest.raises(CallError, match="an update needs exactly the arguments that were bound"):
        bound.update({1: np.ascontiguousarray(x.T)})
    np.testing.assert_array_equal(bound(x.T), before)
    plain = module.bind({1: x.T})
    plain.update({1: 2 * x.T})
    np.testing.assert_allclose(plain(w), 2 * before, rtol=1e-5)


def test_invalid_bindings_are_refused():
    x = f32(4, 4)
    with pytest.raises(CompileError, match=r"bind: no argument is called weights(.|\n)*one of a, b"):
        aotc.compile(jnp.matmul, x, x, bind=("weights",))
    with pytest.raises(CompileError, match=r"argument 1 \(y\) of @main is donated"):
        aotc.compile(jax.jit(lambda x, y: x + y, donate_argnums=1), x, x, bind=(1,))
    exported = export.export(jax.jit(jnp.sin))(jax.ShapeDtypeStruct(export.symbolic_shape("b"), "float32"))
    with pytest.raises(CompileError, match=r"is f32\[b\], expected fixed sizes"):
        aotc.compile(exported, bind=(0,))
    for wrong in ("w", {"w": 1}, (1.5,), ("",), (-1,), (True,)):
        with pytest.raises(CompileError, match="names or numbers of arguments"):
            aotc.compile(jnp.matmul, x, x, bind=wrong)


def test_a_model_on_several_devices_has_bound_weights():
    model = """func.func public @main(%x: tensor<4xf32> {aotc.affinity = "a"}, %w: tensor<4xf32> {aotc.affinity = "a"})
        -> (tensor<4xf32>, tensor<4xf32>) {
      %0 = stablehlo.exponential %w : tensor<4xf32>
      %1 = stablehlo.add %x, %0 : tensor<4xf32>
      %2 = stablehlo.custom_call @aotc.transfer(%1) {aotc.to = "b"} : (tensor<4xf32>) -> tensor<4xf32>
      %3 = stablehlo.sine %2 : tensor<4xf32>
      return %1, %3 : tensor<4xf32>, tensor<4xf32>
    }"""
    with pytest.warns(AotcWarning, match="several devices"):
        data = aotc.compile(model, bind=("arg1",), devices={"a": "cpu", "b": "cpu"})
    module = aotc.load(data)
    assert module.prepared == {}
    x = f32(4)
    np.testing.assert_allclose(module.bind({"arg1": x})(x)[0], x + np.exp(x), rtol=1e-6)


def test_each_target_prepares_its_own_weights():
    w, x = f32(64, 64), f32(4, 64)
    data = compiled(jnp.matmul, x, w, bind=("args[1]",), target="cpu:x86-64-v3,cpu:x86-64-v4")
    rows = [v["prepared"]["main"]["prepare"]["results"][0]["dims"] for v in open_bundle(data).manifest["variants"]]
    assert len(rows) == 2
    assert rows[0] != rows[1]
    np.testing.assert_allclose(aotc.load(data).bind({1: w})(x), x @ w, rtol=1e-4, atol=1e-5)


def test_compile_with_bind_and_upgrade_give_the_same_bytes():
    w, x = f32(64, 64), f32(4, 64)
    first = compiled(jnp.matmul, x, w, bind=("args[1]",))
    assert compiled(jnp.matmul, x, w, bind=("args[1]",)) == first
    assert aotc.upgrade(first, cache=False) == first
    again = aotc.load(first, untrusted=True)
    np.testing.assert_allclose(again.bind({1: w})(x), x @ w, rtol=1e-4, atol=1e-5)
    assert aotc.load(aotc.upgrade(first, bind=())).prepared == {}


def test_bound_calls_match_at_every_level_and_without_passes():
    function, weights, x, _ = MODELS["mlp"]
    want = jax.jit(function)(weights, x)
    for flags in ({"opt_level": 0}, {"opt_level": 3}, {"bisect": 0}, {"bisect": 17}, {"bisect": 19}):
        module = aotc.load(compiled(function, weights, x, **flags))
        np.testing.assert_allclose(module.bind({"args[0]": weights})(x), want, rtol=1e-4, atol=1e-5)


def test_prepare_and_call_programs_are_not_public():
    w, x = f32(64, 64), f32(4, 64)
    module = aotc.load(compiled(jnp.matmul, x, w, bind=("args[1]",)))
    assert list(module.functions) == ["main"]
    assert "main_bound" not in repr(module)
    with pytest.raises(CallError, match=r"expected: main$"):
        module.invoke("nothing")


WRONG = {
    "a weight that is no argument": (lambda row: row["weights"].append(7), r"arguments \[1, 7\] of 2"),
    "a source that is no argument": (lambda row: row["prepare"]["results"][0].update(sources=[9]), "arguments"),
    "a call that takes what is not there": (lambda row: row.update(takes=[0, 9]), "of 3 arguments and results"),
    "a call that leaves an argument out": (lambda row: row.update(takes=[2]), "a call takes the arguments"),
    "a call of another type": (
        lambda row: row["call"]["arguments"][1].update(dims=[1, 2, 3]), "'main_bound' are of other types"
    ),
    "results of another type": (
        lambda row: row["call"]["results"][0].update(dims=[1, 2]), "results of 'main_bound' are of other types"
    ),
    "what is prepared of unknown size": (
        lambda row: row["prepare"]["results"][0].update(dims=["n", 1, 1]), "sizes that only a call knows"
    ),
    "two of one name": (lambda row: row["call"].update(name="main"), "two programs have one name"),
    "a program that goes on": (lambda row: row["call"]["code"].pop(), "program 'main_bound' .* does not end"),
}


@pytest.mark.parametrize("name", WRONG)
def test_inconsistent_prepare_and_call_programs_are_refused(name):
    from vmfb.test_check_bundle import rewritten

    change, message = WRONG[name]
    w, x = f32(64, 64), f32(4, 64)
    opened = open_bundle(aotc.compile(jnp.matmul, x, w, bind=("args[1]",)))
    data = rewritten(opened, lambda manifest, _: change(manifest["variants"][0]["prepared"]["main"]))
    with pytest.raises(BundleError, match=message):
        aotc.load(data)
