"""Affinities that models say in JAX's words: kinds of memory, shardings of one device."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compute_on import compute_on

import aotc
from aotc.frontend.importer import import_raw
from aotc.frontend.mlir import fetch
from aotc.ir.tensor_ir import walk
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.vmfb.bundle import open_bundle

pytestmark = pytest.mark.ir

X = np.linspace(0, 1, 4, dtype="float32")
SQUARE = np.linspace(0, 1, 16, dtype="float32").reshape(4, 4)
MEMORIES = {"host": "cpu", "device": "cpu"}


def placed(x, y):
    z = jnp.sin(x) * y
    return jax.device_put(z, jax.memory.Space.Host), z + 1


def function():
    device = jax.devices()[0]
    kinds = [jax.sharding.SingleDeviceSharding(device, memory_kind=kind) for kind in ("pinned_host", "device")]
    return jax.jit(placed, in_shardings=tuple(kinds))


@pytest.mark.cpu
def test_kinds_of_memory_are_devices():
    data = aotc.compile(function(), X, X, devices=MEMORIES, verify_each=True)
    module = aotc.load(data)
    assert [a["device"] for a in module.main.signature.arguments] == ["host", "device"]
    results = module.invoke("main", X, X, results="device")
    assert results[0].device == "host"
    for found, wanted in zip(results, placed(X, X), strict=True):
        np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-6)
    pairs = {(t["from"], t["to"]) for t in open_bundle(data).manifest["variants"][0]["transfers"]}
    assert pairs <= {("host", "device"), ("device", "host")}
    assert pairs


@pytest.mark.cpu
def test_kinds_of_memory_are_nothing_where_no_device_is_named():
    data = aotc.compile(function(), X, X)
    assert "devices" not in open_bundle(data).manifest["variants"][0]


SHARDED = """func.func public @main(%x: tensor<4xf32> {mhlo.sharding = "{maximal device=1}"}, %y: tensor<4xf32>)
    -> (tensor<4xf32>, tensor<4xf32> {mhlo.sharding = "{maximal device=0}"}) {
  %0 = stablehlo.custom_call @Sharding(%y) {mhlo.sharding = "{maximal device=1}"} : (tensor<4xf32>) -> tensor<4xf32>
  %1 = stablehlo.add %x, %0 : tensor<4xf32>
  %2 = stablehlo.sine %y : tensor<4xf32>
  return %1, %2 : tensor<4xf32>, tensor<4xf32>
}"""


@pytest.mark.parametrize(
    ("devices", "arguments", "results", "moved"),
    [
        ({"d0": "cpu", "d1": "cpu"}, ["d1", ""], ["", "d0"], ["d1"]),
        ({"d0": "cpu"}, ["", ""], ["", "d0"], []),
        ({}, ["", ""], ["", ""], []),
    ],
)
def test_a_sharding_of_one_device_is_a_device(devices, arguments, results, moved):
    function = import_raw(fetch(SHARDED, (), {}), options=Options(devices=devices)).functions["main"]
    assert function.attrs["affinity"] == {"arguments": arguments, "results": results}
    assert [op.attrs["device"] for op in function.body.ops if op.name == "transfer"] == moved


def on_both(x, w):
    y = x @ w
    with compute_on("device_host"):
        z = jnp.sin(y) + y

        @jax.jit
        def halved(v):
            return v / 2

        z = jnp.exp(halved(z))
    return z @ w, jax.lax.fori_loop(0, 3, lambda i, c: aside(c) * 2, z)


def aside(c):
    with compute_on("device_host"):
        return jnp.cos(c)


def test_ops_of_compute_on_run_on_the_host():
    """What they read is moved there once, and what others read of theirs is moved back."""
    raw = fetch(jax.jit(on_both), (SQUARE, SQUARE), {})
    options = Options(devices=MEMORIES, default_device="device")
    module = run_passes(import_raw(raw, options=options), replace(options, stop_after="assign-devices"))
    ops = [op for op in walk(module.functions["main"].body) if op.name not in ("constant", "transfer")]
    placed = [(op.name, op.attrs["device"]) for op in ops if op.results[0].type.dtype == "f32"]
    first = [("dot_general", "device"), ("sin", "host"), ("add", "host"), ("mul", "host"), ("exp", "host")]
    assert placed == [*first, ("dot_general", "device"), ("cos", "host"), ("mul", "device")]


@pytest.mark.cpu
def test_results_of_compute_on_are_those_of_one_device():
    data = aotc.compile(jax.jit(on_both), SQUARE, SQUARE, devices=MEMORIES, default_device="device", verify_each=True)
    module = aotc.load(data)
    for found, wanted in zip(module.invoke("main", SQUARE, SQUARE), jax.jit(on_both)(SQUARE, SQUARE), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    assert open_bundle(data).manifest["variants"][0]["transfers"]
    assert "devices" not in open_bundle(aotc.compile(jax.jit(on_both), SQUARE, SQUARE)).manifest["variants"][0]
