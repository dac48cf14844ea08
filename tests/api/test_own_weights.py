"""Bundles with weights for their bound arguments: inside, in a file, given at load, replaced while running."""

import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

import aotc
from aotc import BundleError, CallError, CompileError
from aotc_cli.main import app

pytestmark = pytest.mark.cpu

RNG = np.random.default_rng(0)
PARAMS = {"layers_0": {"kernel": RNG.standard_normal((64, 64)).astype("float32") / 8, "bias": np.ones(64, np.float32)}}
X, SCALE = RNG.standard_normal((4, 64)).astype("float32"), np.float32(2)
NO_BIAS = {"params/layers_0/bias": np.zeros(64, np.float32)}


def model(params, x, *, scale):
    layer = params["layers_0"]
    return {"y": jnp.tanh(x @ layer["kernel"] + layer["bias"]) * scale}


def want(bias=1):
    return np.tanh(X @ PARAMS["layers_0"]["kernel"] + bias) * 2


def is_close(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def compiled(weights, **flags):
    return aotc.compile(model, PARAMS, X, kwargs={"scale": SCALE}, bind=["params"], weights=weights, **flags)


@pytest.fixture(scope="module")
def inside():
    return compiled("unpacked")


@pytest.fixture(scope="module")
def plain():
    return compiled("inline")


@pytest.fixture
def beside(tmp_path):
    path = tmp_path / "m.vmfb"
    path.write_bytes(compiled(str(tmp_path / "w.safetensors")))
    return path


def run(*arguments):
    done = CliRunner().invoke(app, [str(a) for a in arguments])
    return done.exit_code, done.output + str(done.exception or "")


def test_functions_with_own_weights_take_the_other_arguments(inside):
    for limits in ({}, {"max_in_flight": 1}):
        module = aotc.load(inside, threads=1, **limits)
        assert module.weights == {"params/layers_0/bias": "f32[64]", "params/layers_0/kernel": "f32[64, 64]"}
        assert [row["name"] for row in module.main.signature.arguments] == ["x", "scale"]
        is_close(module(X, scale=SCALE)["y"], want())
        is_close(module.invoke("main", X, SCALE)[0], want())
        out = np.empty((4, 64), np.float32)
        assert module.invoke("main", X, SCALE, out=[out])[0] is out
        is_close(module.submit("main", X, SCALE).result()[0], want())
        is_close(module.main.options(deadline=60)(X, scale=SCALE)["y"], want())
        is_close(module.bind({"scale": SCALE})(X)["y"], want())
        is_close(module.put(X, "x").numpy(), X)
        with pytest.raises(CallError, match="argument 'scale' is missing"):
            module(X)
        with pytest.raises(CallError, match=r"main: error: argument 0 \(x\) has the wrong shape"):
            module.invoke("main", X[:2], SCALE)
        with pytest.raises(CallError, match="wrong number of arguments"):
            module.invoke("main", PARAMS["layers_0"]["bias"], PARAMS["layers_0"]["kernel"], X, SCALE)
    assert aotc.upgrade(inside) == inside


def test_a_weights_file_has_the_names_of_parameters(beside, tmp_path):
    stored = load_file(tmp_path / "w.safetensors")
    assert stored.keys() == {"params/layers_0/kernel", "params/layers_0/bias"}
    assert np.array_equal(stored["params/layers_0/kernel"], PARAMS["layers_0"]["kernel"])
    is_close(aotc.load(beside, verify=True)(X, scale=SCALE)["y"], want())
    (tmp_path / "other").mkdir()
    (tmp_path / "w.safetensors").rename(tmp_path / "other" / "w.safetensors")
    with pytest.raises(BundleError, match=r"external weights 'w\.safetensors' is missing"):
        aotc.load(beside)
    is_close(aotc.load(beside, weights=tmp_path / "other" / "w.safetensors")(X, scale=SCALE)["y"], want())


def test_other_weights_are_refused_unless_requested(beside, tmp_path):
    stored = load_file(tmp_path / "w.safetensors")
    save_file(stored | NO_BIAS, tmp_path / "w.safetensors")
    with pytest.raises(BundleError, match=r"these are not the weights of (.|\n)*aotc\.load\(\.\.\., weights="):
        aotc.load(beside)
    is_close(aotc.load(beside, weights=tmp_path / "w.safetensors")(X, scale=SCALE)["y"], want(0))
    with safe_open(tmp_path / "w.safetensors", "np") as file:
        assert not file.metadata()
    assert run("update-weights", beside, tmp_path / "w.safetensors")[0] == 0
    is_close(aotc.load(beside)(X, scale=SCALE)["y"], want(0))
    flipped = bytearray((tmp_path / "w.safetensors").read_bytes())
    flipped[-1] ^= 1
    (tmp_path / "w.safetensors").write_bytes(flipped)
    with pytest.raises(BundleError, match="sha256 differs"):
        aotc.load(beside, verify=True)


def test_all_mismatched_weights_are_listed(inside, tmp_path):
    module = aotc.load(inside)
    half = np.zeros((64, 64), "f2")
    wrong = {"params/layers_0/bias": np.zeros(63, "f4"), "params['layers_0']['kernel']": half, "no": 1}
    for use in (module.update_weights, lambda values: aotc.load(inside, weights=values)):
        with pytest.raises(CallError) as caught:
            use(wrong)
        for part in ("params/layers_0/bias has the wrong shape found: f32[63] expected: f32[64]", "no weight 'no'",
                     "params/layers_0/kernel has the wrong dtype found: f16[64, 64]"):  # fmt: skip
            assert part in str(caught.value)
    with pytest.raises(CallError, match=r"params/layers_0/kernel is missing, f32\[64, 64\]"):
        aotc.load(inside, weights=NO_BIAS)
    with pytest.raises(CallError, match="weights are not a mapping"):
        aotc.load(inside, weights=3)
    save_file({"params/layers_0/bias": np.zeros(3, np.float32), "more": X}, tmp_path / "w.safetensors")
    expected = (
        "params/layers_0/kernel is missing\n  there is no more\n  params/layers_0/bias is f32[3], expected f32[64]"
    )
    for use in (module.update_weights, lambda path: aotc.load(inside, weights=path)):
        with pytest.raises(BundleError) as told:
            use(tmp_path / "w.safetensors")
        assert expected.partition("\n")[2] in str(told.value)
    code, said = run("update-weights", tmp_path / "no.vmfb", tmp_path / "w.safetensors")
    assert (code, "no.vmfb" in said) == (1, True)
    is_close(module(X, scale=SCALE)["y"], want())


def test_load_accepts_weights(plain):
    for values in ({"params": PARAMS}, {"params/layers_0": PARAMS["layers_0"]}, {
        "params['layers_0']['bias']": PARAMS["layers_0"]["bias"],
        "params/layers_0/kernel": PARAMS["layers_0"]["kernel"],
    }):  # fmt: skip
        is_close(aotc.load(plain, weights=values)(X, scale=SCALE)["y"], want())
    module = aotc.load(plain)
    is_close(module(PARAMS, X, scale=SCALE)["y"], want())
    assert module.weights == {}
    with pytest.raises(CallError, match="no weights of its own"):
        module.update_weights(NO_BIAS)
    with pytest.raises(BundleError, match="compiled for no weights"):
        aotc.load(aotc.compile(jnp.sin, X), weights={})


def test_updates_of_own_weights_are_atomic(inside):
    """Two weights have the same number in them: a result of two numbers is of no moment."""

    def of(number):
        return {"a": np.full(8, number, np.float32), "b": np.full(8, -number, np.float32)}

    ones = np.ones(8, np.float32)
    data = aotc.compile(lambda p, x: x * (p["a"] + p["b"]), of(1), ones, bind=["p"], weights="unpacked")
    module = aotc.load(data, threads=1)
    worst, stop = [0.0], threading.Event()

    def call():
        while not stop.is_set():
            worst.append(float(np.abs(module(ones)).max()))

    thread = threading.Thread(target=call)
    thread.start()
    for number in range(200):
        module.update_weights({"p": of(number)})
    stop.set()
    thread.join()
    assert max(worst) == 0
    other = aotc.load(inside)
    other.update_weights(NO_BIAS)
    is_close(other(X, scale=SCALE)["y"], want(0))
    other.update_weights({"params": PARAMS})
    is_close(other(X, scale=SCALE)["y"], want())


def test_weights_are_copies_of_the_arrays_of_the_caller(plain):
    kernel, bias = PARAMS["layers_0"]["kernel"].copy(), np.zeros(64, np.float32)
    module = aotc.load(plain, weights={"params": {"layers_0": {"kernel": kernel, "bias": bias}}})
    kernel[:] = 7
    module.update_weights({"params/layers_0/bias": bias})
    is_close(module(X, scale=SCALE)["y"], want(0))
    bias[:] = 7
    module.update_weights({"params/layers_0/kernel": PARAMS["layers_0"]["kernel"]})
    is_close(module(X, scale=SCALE)["y"], want(0))


def test_concurrent_updates_are_all_applied():
    """Each of eight threads replaces its own weight; none takes back what another one did."""
    names = [f"w{n}" for n in range(8)]
    zeros = {name: np.zeros(8, np.float32) for name in names}
    data = aotc.compile(lambda p, x: x + sum(p.values()), zeros, zeros["w0"], bind=["p"], weights="unpacked")
    module = aotc.load(data, threads=1)

    def replace(name):
        for number in range(20):
            module.update_weights({f"p/{name}": np.full(8, number, np.float32)})

    threads = [threading.Thread(target=replace, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(module(zeros["w0"]), np.full(8, 8 * 19, np.float32))


def test_update_weights_command_replaces_weights(plain, tmp_path):
    path = tmp_path / "m.vmfb"
    path.write_bytes(plain)
    save_file({"params/layers_0/kernel": PARAMS["layers_0"]["kernel"], **NO_BIAS}, tmp_path / "c.safetensors")
    code, said = run("update-weights", path, tmp_path / "c.safetensors", "-o", tmp_path / "new.vmfb")
    assert (code, "2 weights, 16,640 bytes" in said) == (0, True), said
    is_close(aotc.load(tmp_path / "new.vmfb")(X, scale=SCALE)["y"], want(0))
    file = tmp_path / "f.safetensors"
    assert run("update-weights", tmp_path / "new.vmfb", tmp_path / "c.safetensors", f"--file={file}")[0] == 0
    assert (tmp_path / "new.vmfb").stat().st_size < path.stat().st_size + 4096
    is_close(aotc.load(tmp_path / "new.vmfb")(X, scale=SCALE)["y"], want(0))
    json.loads(run("inspect", tmp_path / "new.vmfb", "--json")[1])


def test_functions_share_weights_and_states():
    def grow(params, cache, x):
        return {"cache": cache + x @ params["layers_0"]["kernel"], "y": x}

    models = {"main": model, "grow": grow}
    args = {"main": (PARAMS, X), "grow": (PARAMS, X, X)}
    data = aotc.compile(models, args=args, kwargs={"main": {"scale": SCALE}}, bind=["params"], weights="unpacked")
    module = aotc.load(data)
    assert len(module.weights) == 2
    state = module.state("cache")
    state.grow(X)
    is_close(state["cache"], X @ PARAMS["layers_0"]["kernel"])
    kernel = np.zeros((64, 64), np.float32)
    module.update_weights({"params/layers_0/kernel": kernel})
    state.grow(X)
    is_close(state["cache"], X @ PARAMS["layers_0"]["kernel"])
    is_close(module(X, scale=SCALE)["y"], np.full((4, 64), np.tanh(1) * 2))


def test_bound_arguments_without_values_are_refused():
    with pytest.raises(CompileError, match="keeps the examples of bound arguments, and there are none"):
        aotc.compile(model, PARAMS, X, kwargs={"scale": SCALE}, weights="unpacked")
    specs = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), PARAMS)
    with pytest.raises(CompileError, match="params/layers_0/bias is a ShapeDtypeStruct"):
        aotc.compile(model, specs, X, kwargs={"scale": SCALE}, bind=["params"], weights="unpacked")
