"""Profiles and traces on GPUs and mixes: results as ever, times by kind and name of the device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices.mixes import HALVES
from devices.test_mixed_programs import COMPUTED
from jax import lax
from lowering.test_devices import FIRST, SECOND, T, inputs_of, loop, on_one_device, product, to
from support.small_models import array
from vmfb.simulated_gpu import install

import aotc
from aotc.frontend.importer import import_model
from aotc.ir.semantics.run import interpret
from aotc.tools.explain.schedule import explain_schedule
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.profile.cost_record import record_problem
from aotc.vmfb.profile.stored_records import bundle_with_profile

pytest.importorskip("cuda.bindings.nvjitlink")
pytestmark = pytest.mark.cudasim

BOTH = loop(f"""%t = {to("d1", "%y")}
  %d = {product("%t", "%t")}
  %q = stablehlo.constant dense<0.1> : {T}
  %m = stablehlo.multiply %d, %q : {T}
  %e = {to("d0", "%m")}
  %s = stablehlo.sine %e : {T}""")


def results_of_profile(monkeypatch, module, *arrays):
    """The record, and the results of the call that was measured."""
    function = type(module._functions["main"])
    kept, step = [], function.step

    def noted(self, *arguments):
        kept[:] = step(self, *arguments)
        return kept

    monkeypatch.setattr(function, "step", noted)
    record = module.profile("main", *arrays, repeat=2)
    assert record_problem(record) == ""
    return record, kept


def test_a_gpu(monkeypatch):
    """Kernels that write where they read get their old values back; turns of a loop are counted."""

    def function(x, i):
        y = x.at[i].add(1.0)
        z = lax.fori_loop(0, 4, lambda k, c: jnp.tanh(c @ x) + y, y)
        return jnp.sort(z, 1), lax.dynamic_update_slice(z, y[:2], (i[0], 0)) + y

    x, i = array(8, 8), np.array([1, 3, 1], "i4")
    data = aotc.compile(jax.jit(function), x, i, target="cuda:sm_90")
    install(monkeypatch, data)
    module = aotc.load(data)
    record, results = results_of_profile(monkeypatch, module, x, i)
    assert {tuple(row["ns"]) for row in record["kernels"]} == {("cuda",)}
    assert all(ns > 0 for row in record["kernels"] for ns in row["ns"].values())
    assert record["machine"]["gpu"] == "a simulated GPU"
    for found, want in zip(results, jax.jit(function)(x, i), strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)
    report = explain_schedule(open_bundle(bundle_with_profile(open_bundle(data), record)))
    assert not report.unknown
    assert report.measured_on == "a simulated GPU"
    assert all(row.measured for row in report.rows if row.kernel in {k["name"] for k in record["kernels"]})


@pytest.mark.parametrize("halves", HALVES)
def test_a_mix(halves, monkeypatch):
    data = aotc.compile(BOTH, devices=HALVES[halves])
    install(monkeypatch, data, count=2)
    module = aotc.load(data)
    arrays = inputs_of(module)
    record, results = results_of_profile(monkeypatch, module, *arrays)
    for found, want in zip(results, interpret(import_model(on_one_device(BOTH)), *arrays), strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4)
    devices = {name: target.partition(":")[0] for name, target in HALVES[halves].items()}
    want = {("cpu",) if kind == "cpu" else (kind, name) for name, kind in devices.items()}
    assert {tuple(row["ns"]) for row in record["kernels"]} == want
    again = aotc.compile(BOTH, devices=HALVES[halves], costs=record)
    install(monkeypatch, again, count=2)
    for x, y in zip(aotc.load(again).invoke("main", *arrays, results="numpy"), results, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("halves", HALVES)
def test_sizes_that_are_values(halves, monkeypatch):
    data = aotc.compile(COMPUTED, devices=HALVES[halves])
    install(monkeypatch, data, count=2)
    x = array(8)
    _, results = results_of_profile(monkeypatch, aotc.load(data), x, np.int32(3))
    np.testing.assert_allclose(results[0], np.concatenate([np.sin(x), np.full(4, 1.5, "f4")]), rtol=1e-5)


def _output(arrays):
    """The name of the array that comes last, which is written."""
    return str(arrays["dtypes"][-1]).partition("=")[0]


def test_a_trace_of_a_mix(monkeypatch, tmp_path):
    """What each dispatch read and wrote, wherever it ran."""
    text = f"""func.func public @main(%x: {T} {FIRST}, %w: {T} {SECOND}) -> {T} {{
      %0 = stablehlo.sine %x : {T}
      %1 = {to("d1", "%0")}
      %2 = stablehlo.multiply %1, %w : {T}
      return %2 : {T} }}"""
    data = aotc.compile(text, devices=HALVES["cpu, cuda"])
    install(monkeypatch, data)
    x, w = array(8, 8), array(8, 8, seed=1)
    aotc.load(data).invoke("main", x, w, trace=tmp_path)
    first, second = (np.load(path) for path in sorted(tmp_path.glob("*.npz")))
    np.testing.assert_allclose(first[_output(first)], np.sin(x), rtol=1e-5)
    np.testing.assert_allclose(second[_output(second)], np.sin(x) * w, rtol=1e-5)


def test_a_device_by_name_decides_the_place(monkeypatch):
    """Of two GPUs the one that was measured to be quick gets the product."""
    text = f"""func.func public @main(%x: {T} {FIRST}) -> {T} {{
      %0 = {product("%x", "%x")}
      return %0 : {T} }}"""
    devices = {"d0": "cuda:sm_90", "d1": "cuda:sm_90"}
    data = aotc.compile(text, devices=devices, place="auto")
    install(monkeypatch, data, count=2)
    record = aotc.load(data).profile("main", array(8, 8), repeat=1)
    (row,) = record["kernels"]
    for quick, slow in (("d0", "d1"), ("d1", "d0")):
        row["ns"] = {"cuda": 1e6, quick: 1e5, slow: 1e9}
        manifest = open_bundle(aotc.compile(text, devices=devices, place="auto", costs=record)).manifest
        assert len(manifest["variants"][0].get("transfers", [])) == (0 if quick == "d0" else 1)
