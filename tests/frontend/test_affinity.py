"""Affinities that models say in JAX's words: kinds of memory, shardings of one device."""

from dataclasses import replace
from inspect import signature

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compute_on import compute_on

import aotc
from aotc.diagnostics import CompileError
from aotc.frontend.importer import import_raw
from aotc.frontend.mlir import fetch
from aotc.ir.tensor.ir import walk
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
def test_memory_kinds_select_devices():
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
def test_memory_kinds_are_ignored_without_named_devices():
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


def on_host(f, *args):
    """Compute ``f`` on the host, in the words of this JAX: of a function since 0.11, of a block before."""
    if "out_memory_spaces" in signature(compute_on).parameters:
        return compute_on(f, compute_type="device_host", out_memory_spaces=jax.memory.Space.Device)(*args)
    with compute_on("device_host"):
        return f(*args)


@jax.jit
def halved(v):
    return v / 2


def on_both(x, w):
    z = on_host(lambda y: jnp.exp(halved(jnp.sin(y) + y)), x @ w)
    return z @ w, jax.lax.fori_loop(0, 3, lambda i, c: on_host(jnp.cos, c) * 2, z)


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
def test_results_of_compute_on_match_one_device():
    data = aotc.compile(jax.jit(on_both), SQUARE, SQUARE, devices=MEMORIES, default_device="device", verify_each=True)
    module = aotc.load(data)
    for found, wanted in zip(module.invoke("main", SQUARE, SQUARE), jax.jit(on_both)(SQUARE, SQUARE), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    assert open_bundle(data).manifest["variants"][0]["transfers"]
    assert "devices" not in open_bundle(aotc.compile(jax.jit(on_both), SQUARE, SQUARE)).manifest["variants"][0]


T = "tensor<4xf32>"
BOTH = {"d0": "cpu", "d1": "cpu"}


def imported(text, **flags):
    """The entry of a model."""
    return import_raw(fetch(text, (), {}), options=Options(**flags)).functions["main"]


def solved(text, **flags):
    """The device of each op of a model but constants, and how many values are moved."""
    options = Options(**flags)
    module = run_passes(import_raw(fetch(text, (), {}), options=options), replace(options, stop_after="assign-devices"))
    ops = list(walk(module.functions["main"].body))
    placed = [(op.name, op.attrs["device"]) for op in ops if op.name not in ("constant", "transfer", "while")]
    return placed, sum(op.name == "transfer" for op in ops)


@pytest.mark.parametrize("name", ["aotc.affinity", "iree.abi.affinity"])
@pytest.mark.parametrize(
    ("said", "device"),
    [
        ('"d1"', "d1"), ("@device_a", "device_a"), ("#hal.device.promise<@device_a>", "device_a"),
        ("#hal.device.affinity<@device_a>", "device_a"), ('#hal.device.promise<@"device a">', "device a"),
    ],
)  # fmt: skip
def test_every_form_of_affinity_is_read(name, said, device):
    text = f"func.func @main(%x: {T} {{{name} = {said}}}) -> ({T} {{{name} = {said}}}) {{ return %x : {T} }}"
    assert imported(text).attrs["affinity"] == {"arguments": [device], "results": [device]}


@pytest.mark.parametrize("said", ["1", '""', "[@a, @b]", "#hal.device.optimal<[#hal.device.affinity<@a>]>", "unit"])
@pytest.mark.parametrize("place", ["argument", "op", "function", "argument of a callee"])
def test_an_affinity_without_a_device_is_refused(said, place):
    affinity = dict.fromkeys(("argument", "op", "function", "argument of a callee"), "")
    affinity[place] = f"{{aotc.affinity = {said}}}"
    attributes = "attributes" if affinity["function"] else ""
    text = f"""func.func private @f(%x: {T} {affinity["argument of a callee"]}) -> {T} {{ return %x : {T} }}
    func.func @main(%x: {T} {affinity["argument"]}) -> {T} {attributes} {affinity["function"]} {{
      %0 = func.call @f(%x) : ({T}) -> {T}
      %1 = "stablehlo.sine"(%0) {affinity["op"]} : ({T}) -> {T}
      return %1 : {T} }}"""
    with pytest.raises(CompileError, match=r"aotc.affinity is .*, which names no device"):
        imported(text)


def declarations(device, place, name="aotc.affinity", quoted='"{}"'):
    """Return a model in which a signature names ``device`` in one ``place`` and known devices elsewhere."""
    places = dict.fromkeys(("argument", "result", "function", "argument of a callee", "result of a callee"), "")
    places[place] = f"{{{name} = {quoted.format(device)}}}"
    attributes = "attributes" if places["function"] else ""
    return f"""func.func private @f(%x: {T} {places["argument of a callee"]}) -> ({T} {places["result of a callee"]}) {{
      return %x : {T} }}
    func.func @main(%x: {T} {places["argument"]}, %y: {T} {{aotc.affinity = "d0"}}, %z: {T} {{aotc.affinity = "d1"}})
        -> ({T} {places["result"]}) {attributes} {places["function"]} {{
      %0 = func.call @f(%x) : ({T}) -> {T}
      %1 = stablehlo.add %y, %z : {T}
      %2 = stablehlo.add %0, %1 : {T}
      return %2 : {T} }}"""


@pytest.mark.parametrize("place", ["argument", "result", "function", "argument of a callee", "result of a callee"])
@pytest.mark.parametrize(
    ("device", "near"), [("dO", "d0"), ("D1", "d1"), ("dl", "d1"), ("DI", "d1")]
)
def test_a_name_that_looks_like_a_declared_device_is_refused(device, near, place):
    with pytest.raises(CompileError) as caught:
        imported(declarations(device, place), devices=BOTH)
    where = "@main" if place == "function" else place.split()[0]
    assert f"aotc.affinity of {where} " in str(caught.value)
    assert f"names device '{device}', but the options name d0, d1" in str(caught.value)
    assert f"declare it: --device {device}=TARGET" in str(caught.value)
    assert f'write {{aotc.affinity = "{near}"}}, or' in str(caught.value)


@pytest.mark.parametrize(
    ("op", "name", "more"),
    [("sine", "aotc.affinity", ""), ("custom_call", "aotc.to", ', call_target_name = "aotc.transfer"')],
)
def test_options_name_the_devices_of_ops_and_transfers(op, name, more):
    text = f"""func.func @main(%x: {T} {{aotc.affinity = "d0"}}, %y: {T} {{aotc.affinity = "d1"}}) -> ({T}, {T}) {{
      %0 = "stablehlo.{op}"(%x) {{{name} = "dO"{more}}} : ({T}) -> {T}
      return %0, %y : {T}, {T} }}"""
    with pytest.raises(CompileError, match=f"{name} names device 'dO', but the affinities and options name") as caught:
        imported(text, devices=BOTH)
    assert f'write {{{name} = "d0"}}, or declare it: ' in str(caught.value)


def test_a_misspelt_affinity_of_iree_is_refused():
    text = declarations("dO", "argument", "iree.abi.affinity", "#hal.device.promise<@{}>")
    with pytest.raises(CompileError, match=r"iree.abi.affinity of argument 0 of @main names device 'dO'") as caught:
        imported(text, devices=BOTH)
    assert '{iree.abi.affinity = "d0"}' in str(caught.value)


@pytest.mark.parametrize(
    "flags",
    [{}, {"devices": BOTH}, {"devices": BOTH | {"d2": "cpu"}}, {"devices": BOTH, "default_device": "d2"}],
)  # fmt: skip
def test_undeclared_devices_use_the_default_target(flags):
    assert imported(declarations("d2", "argument"), **flags).attrs["affinity"]["arguments"] == ["d2", "d0", "d1"]


def test_an_op_runs_on_the_device_of_its_affinity():
    text = f"""func.func @main(%x: {T} {{aotc.affinity = "d0"}}) -> ({T} {{aotc.affinity = "d0"}}) {{
      %0 = stablehlo.sine %x {{aotc.affinity = "d1"}} : {T}
      %1 = stablehlo.cosine %0 : {T}
      return %1 : {T} }}"""
    assert solved(text, devices=BOTH) == ([("sin", "d1"), ("cos", "d1")], 2)


def test_an_op_on_constants_runs_on_the_device_of_its_affinity():
    text = f"""func.func @main(%x: {T} {{aotc.affinity = "d0"}}) -> ({T}, {T}) {{
      %c = stablehlo.constant dense<[1.0, 2.0, 3.0, 4.0]> : {T}
      %0 = stablehlo.exponential %c {{aotc.affinity = "d1"}} : {T}
      %i = "stablehlo.iota"() {{iota_dimension = 0 : i64, aotc.affinity = "d1"}} : () -> {T}
      %1 = stablehlo.add %x, %x : {T}
      return %0, %i : {T}, {T} }}"""
    placed, moved = solved(text, devices=BOTH)
    assert dict(placed) == {"exp": "d1", "iota": "d1", "add": "d0"}
    assert moved == 0


def test_a_loop_runs_on_the_device_of_its_affinity():
    """With what it reads from around it, which is moved there once."""
    text = f"""func.func @main(%x: {T} {{aotc.affinity = "d0"}}, %w: {T} {{aotc.affinity = "d0"}}) -> {T} {{
      %i = stablehlo.constant dense<0> : tensor<i32>
      %n = stablehlo.constant dense<5> : tensor<i32>
      %one = stablehlo.constant dense<1> : tensor<i32>
      %r:2 = stablehlo.while(%k = %i, %y = %x) : tensor<i32>, {T} attributes {{aotc.affinity = "d1"}}
        cond {{
          %c = stablehlo.compare LT, %k, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
          stablehlo.return %c : tensor<i1> }}
        do {{
          %k1 = stablehlo.add %k, %one : tensor<i32>
          %s = stablehlo.multiply %w, %y : {T}
          stablehlo.return %k1, %s : tensor<i32>, {T} }}
      return %r#1 : {T} }}"""
    placed, moved = solved(text, devices=BOTH)
    assert {device for _, device in placed} == {"d1"}
    assert moved == 2


def test_a_callee_runs_on_the_devices_of_its_affinities():
    text = f"""func.func private @f(%x: {T} {{aotc.affinity = "d1"}}) -> ({T} {{aotc.affinity = "d0"}}) {{
      %0 = stablehlo.sine %x : {T}
      return %0 : {T} }}
    func.func @main(%x: {T} {{aotc.affinity = "d0"}}) -> {T} {{
      %0 = func.call @f(%x) : ({T}) -> {T}
      %1 = stablehlo.cosine %0 : {T}
      return %1 : {T} }}"""
    assert solved(text) == ([("sin", "d1"), ("cos", "d0")], 2)


def test_an_affinity_of_a_function_is_the_default_of_its_values():
    text = f"""func.func @main(%x: {T}, %y: {T} {{aotc.affinity = "d0"}}) -> {T} attributes {{aotc.affinity = "d1"}} {{
      %0 = stablehlo.add %x, %x : {T}
      return %0 : {T} }}"""
    assert imported(text).attrs["affinity"] == {"arguments": ["d1", "d0"], "results": ["d1"]}


def test_an_affinity_in_a_computation_of_scalars_is_refused():
    text = f"""func.func @main(%x: {T}, %z: tensor<f32>) -> tensor<f32> {{
      %0 = "stablehlo.reduce"(%x, %z) ({{
        ^bb0(%a: tensor<f32>, %b: tensor<f32>):
          %s = stablehlo.add %a, %b {{aotc.affinity = "d1"}} : tensor<f32>
          stablehlo.return %s : tensor<f32>
      }}) {{dimensions = array<i64: 0>}} : ({T}, tensor<f32>) -> tensor<f32>
      return %0 : tensor<f32> }}"""
    with pytest.raises(CompileError, match="in the computation of another op has an affinity"):
        imported(text)
