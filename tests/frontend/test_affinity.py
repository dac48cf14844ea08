"""Affinities that models say in JAX's words: kinds of memory, shardings of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aotc
from aotc.frontend.importer import import_raw
from aotc.frontend.mlir import fetch
from aotc.options import Options
from aotc.vmfb.bundle import open_bundle

pytestmark = pytest.mark.ir

X = np.linspace(0, 1, 4, dtype="float32")
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
