"""Which devices there are, and where what nobody asked for goes: names, defaults, constants, kinds of memory."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aotc
from aotc.diagnostics import CompileError
from aotc.frontend.importer import import_raw
from aotc.frontend.mlir import fetch
from aotc.ir.tensor.ir import walk
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.tools.explain.affinity import explain_affinity

pytestmark = pytest.mark.ir

T = "tensor<4x4xf32>"
TWO = f"""func.func public @main(%x: {T} {{aotc.affinity = "d0"}}, %w: {T} {{aotc.affinity = "d1"}}) -> {T} {{
  %0 = stablehlo.add %x, %w : {T}
  return %0 : {T} }}"""
PLAIN = f"func.func public @main(%x: {T}) -> {T} {{ %0 = stablehlo.sine %x : {T}\n return %0 : {T} }}"
CPUS = {"d0": "cpu", "d1": "cpu"}


def solved(model, *arguments, **flags):
    """The entry of a model after the pass that assigns devices."""
    options = Options(**flags)
    module = import_raw(fetch(model, arguments, {}), options=options)
    return run_passes(module, replace(options, stop_after="assign-devices")).functions["main"]


def ops_of(function):
    """The device of each op but constants, and how many values are moved."""
    ops = [op for op in walk(function.body) if op.name != "constant"]
    placed = [(op.name, op.attrs["device"]) for op in ops if op.name != "transfer"]
    return placed, len(ops) - len(placed)


@pytest.mark.parametrize(
    ("text", "flags", "parts"),
    [
        (TWO, {"default_device": "zz"}, ["'zz'", "the model names d0, d1", "the options name none", "one of d0, d1"]),
        (TWO, {"default_device": "d7", "devices": CPUS}, ["'d7'", "the options name d0, d1"]),
        (PLAIN, {"default_device": "d0"}, ["'d0'", "the model names no device", "leave it out"]),
        (TWO, {"devices": {"d9": "cpu"}}, ["no op is placed on d9", "the model names d0, d1", "place=auto"]),
        (TWO, {"devices": {**CPUS, "d9": "cpu"}, "default_device": "d0"}, ["no op is placed on d9"]),
        (PLAIN, {"devices": CPUS}, ["no op is placed on d0, d1: the model names no device"]),
    ],
)
def test_invalid_devices_are_refused(text, flags, parts):
    with pytest.raises(CompileError) as caught:
        solved(text, **flags)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        (TWO, {"devices": {**CPUS, "d9": "cpu"}, "place": "auto"}), (TWO, {"devices": {"d1": "cpu"}}),
        (TWO, {"devices": {**CPUS, "d9": "cpu"}, "default_device": "d9"}), (PLAIN, {"devices": {"d9": "cpu"}}),
        (TWO, {"devices": {**CPUS, "host": "cpu", "device": "cpu"}}),
    ],
)  # fmt: skip
def test_valid_devices_are_accepted(text, flags):
    assert solved(text, **flags).attrs["devices"]["known"]


def test_a_function_without_devices_uses_the_default_device():
    text = TWO.replace("@main", "@other") + PLAIN
    assert "devices" not in solved(text).attrs
    assert solved(text, default_device="d1").attrs["devices"]["results"] == ["d1"]
    with pytest.raises(CompileError, match="argument 'arg0' of @main"):
        solved(text, devices=CPUS)


IOTA = f"""func.func public @main(%x: {T} {{aotc.affinity = "d0"}}, %w: {T} {{aotc.affinity = "d1"}})
    -> ({T}, tensor<4xi32> {{}}) {{
  %0 = stablehlo.add %x, %w : {T}
  %1 = stablehlo.iota dim = 0 : tensor<4xi32>
  return %0, %1 : {T}, tensor<4xi32> }}"""


def test_a_result_of_constants_needs_a_device():
    with pytest.raises(CompileError) as caught:
        solved(IOTA)
    what = "the device of result 1 of @main, which depends only on constants, is not"
    for part in (what, "one of d0, d1", "--default-device"):
        assert part in str(caught.value)
    assert solved(IOTA, default_device="d1").attrs["devices"]["results"] == ["d0", "d1"]
    assert solved(IOTA.replace("{}", '{aotc.affinity = "d1"}')).attrs["devices"]["results"] == ["d0", "d1"]


def test_branches_on_constants_need_a_default_device():
    text = f"""func.func public @main(%i: tensor<i32> {{aotc.affinity = "d0"}}, %w: {T} {{aotc.affinity = "d1"}})
        -> ({T}, {T}) {{
      %r = "stablehlo.case"(%i) ({{
        %a = stablehlo.constant dense<1.0> : {T}
        stablehlo.return %a : {T}
      }}, {{
        %b = stablehlo.constant dense<2.0> : {T}
        stablehlo.return %b : {T}
      }}) : (tensor<i32>) -> {T}
      return %r, %w : {T}, {T} }}"""
    with pytest.raises(CompileError, match="result 0 of @main"):
        solved(text)
    assert solved(text, default_device="d1").attrs["devices"]["results"] == ["d1", "d1"]


@pytest.mark.parametrize(
    ("rows", "product", "moved"), [(4, "%x, %1", "64 B"), (4, "%1, %x", "64 B"), (2, "%x, %1", "32 B")]
)
def test_a_matmul_runs_where_the_model_moves_its_constant(rows, product, moved):
    """What is read there follows it, if no more is to be moved; its own bytes are not."""
    left = f"tensor<{rows}x4xf32>"
    types = f"({left}, {T})"
    text = f"""func.func public @main(%x: {left} {{aotc.affinity = "d0"}}) -> ({left} {{aotc.affinity = "d1"}}) {{
      %w = stablehlo.constant dense<[[1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0], [0.0, 1.0, 1.0, 0.0],
        [1.0, 1.0, 1.0, 2.0]]> : {T}
      %1 = stablehlo.custom_call @aotc.transfer(%w) {{aotc.to = "d1"}} : ({T}) -> {T}
      %2 = stablehlo.dot_general {product}, contracting_dims = [1] x [0] : {types} -> {left}
      return %2 : {left} }}"""
    function = solved(text)
    assert ops_of(function) == ([("dot_general", "d1")], 1)
    (product_op,) = [op for op in walk(function.body) if op.name == "dot_general"]
    assert product_op.attrs["reason"] == f"the model moves a constant there; moves {moved}"


@pytest.mark.cpu
def test_a_constant_that_the_model_moves_is_on_that_device():
    weights = np.random.default_rng(0).normal(size=(4, 4)).astype("float32")
    rows = ", ".join(str(row.tolist()) for row in weights)
    text = f"""func.func public @main(%x: {T} {{aotc.affinity = "d0"}}) -> {T} {{
      %w = stablehlo.constant dense<[{rows}]> : {T}
      %1 = stablehlo.custom_call @aotc.transfer(%w) {{aotc.to = "d1"}} : ({T}) -> {T}
      %2 = stablehlo.dot_general %x, %1, contracting_dims = [1] x [0] : ({T}, {T}) -> {T}
      return %2 : {T} }}"""
    module = aotc.load(aotc.compile(text, devices=CPUS, verify_each=True))
    np.testing.assert_allclose(module(weights), weights @ weights, rtol=1e-5)
    assert module.main.signature.results[0]["device"] == "d1"


def offloaded(x, w):
    return jax.device_put(jnp.tanh(x @ w), jax.memory.Space.Host)


def test_offloading_a_result_keeps_the_op_on_its_device():
    """JAX's arguments are in the device's memory unless they say otherwise."""
    x = np.ones((4, 4), "float32")
    function = solved(jax.jit(offloaded), x, x, devices={"host": "cpu", "device": "cpu"}, default_device="device")
    assert function.attrs["devices"]["arguments"] == ["device", "device"]
    assert function.attrs["devices"]["results"] == ["host"]
    assert ops_of(function) == ([("dot_general", "device"), ("tanh", "device")], 1)


def test_arguments_have_the_reasons_of_the_solver():
    text = f"""func.func public @main(%x: {T}, %y: {T} {{aotc.affinity = "d1"}}, %z: {T}) -> ({T}, {T}) {{
      %0 = stablehlo.sine %x : {T}
      %1 = stablehlo.custom_call @aotc.transfer(%0) {{aotc.to = "d1"}} : ({T}) -> {T}
      %2 = stablehlo.add %1, %z : {T}
      return %1, %2 : {T}, {T} }}"""
    rows = explain_affinity(text, devices=CPUS, default_device="d0").rows
    assert [(r.device, r.reason) for r in rows if r.name.startswith("arg")] == [
        ("d0", "default device"), ("d1", "affinity of the argument"), ("d1", "add reads it there"),
    ]  # fmt: skip
