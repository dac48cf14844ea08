"""Who waits for whom: without a wait, a simulated GPU that works late, early or by chance computes something else."""

from random import Random

import numpy as np
import pytest
from devices.mixes import HALVES, alone
from lowering.test_devices import FIRST, SECOND, T, inputs_of, product, to
from vmfb.simulated_gpu import SimulatedGpu, install

import aotc
from aotc.vmfb.devices.mixed.program import Pending

pytest.importorskip("numba_cuda")
pytestmark = pytest.mark.cudasim

# Each device works on what the other has made, three times; memory is used again.
ROUND = f"""func.func public @main(%x: {T} {FIRST}, %w: {T} {SECOND}) -> {T} {{
  %a0 = {product("%x", "%x")}
  %b0 = {to("d1", "%a0")}
  %c0 = stablehlo.multiply %b0, %w : {T}
  %d0 = {to("d0", "%c0")}
  %a1 = {product("%d0", "%x")}
  %b1 = {to("d1", "%a1")}
  %c1 = stablehlo.multiply %b1, %w : {T}
  %d1 = {to("d0", "%c1")}
  %a2 = {product("%d1", "%x")}
  return %a2 : {T} }}"""


def differs(module, arrays, want):
    return not all(
        np.allclose(np.asarray(x), y, rtol=1e-4, atol=1e-4)
        for x, y in zip(module.invoke("main", *arrays), want, strict=True)
    )


def found(monkeypatch, text, halves):
    """In which orders a program computes something else than one device."""
    data = aotc.compile(text, devices=HALVES[halves])
    orders = [SimulatedGpu.LATE, SimulatedGpu.EARLY, *map(Random, range(12))]
    wrong = []
    for n, order in enumerate(orders):
        install(monkeypatch, data, count=2, order=order)
        module = aotc.load(data)
        arrays = inputs_of(module)
        if any(differs(module, arrays, alone(text, *arrays)) for _ in range(2)):
            wrong.append(n)
    return wrong


FAULTS = {
    "the host does not wait for copies": ("cpu, cuda", Pending, "wait_for_bytes", lambda self, touches: None),
    "a GPU does not wait for another": ("cuda, cuda", SimulatedGpu, "wait_for_event", lambda self, event: None),
    "an event comes at once": ("cuda, cuda", SimulatedGpu, "record_event", lambda me, event: setattr(event, "gpu", me)),
}


@pytest.mark.parametrize("halves", ["cpu, cuda", "cuda, cuda"])
def test_every_order_is_right(halves, monkeypatch):
    assert found(monkeypatch, ROUND, halves) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wait_that_is_missing_is_seen(fault, monkeypatch):
    halves, owner, name, planted = FAULTS[fault]
    monkeypatch.setattr(owner, name, planted)
    assert found(monkeypatch, ROUND, halves)


def test_copies_between_gpus_do_not_pass_through_the_host(monkeypatch):
    data = aotc.compile(ROUND, devices=HALVES["cuda, cuda"])
    install(monkeypatch, data, count=2)
    module = aotc.load(data)
    arrays = inputs_of(module)
    logs = [loaded.gpu.log for loaded in module._executable.gpus]
    module.invoke("main", *arrays)
    for log in logs:
        log.clear()
    module.invoke("main", *arrays, results="device")
    assert [log.count("copy_from") for log in logs] == [2, 2]
    assert [log.count("upload") for log in logs] == [1, 1]
    assert [log.count("download") for log in logs] == [0, 0]
    assert [log.count("finish") for log in logs] == [1, 1]  # at the end, for the argument that went up


def test_the_host_waits_for_what_it_touches_alone(monkeypatch):
    """While a copy to the GPU is under way the CPU goes on with something else."""
    text = f"""func.func public @main(%x: {T} {FIRST}, %w: {T} {SECOND}) -> ({T}, {T}) {{
      %0 = stablehlo.sine %x : {T}
      %1 = {to("d1", "%0")}
      %2 = stablehlo.multiply %1, %w : {T}
      %3 = {to("d0", "%w")}
      %4 = stablehlo.cosine %3 : {T}
      %5 = {product("%4", "%4")}
      return %2, %5 : {T}, {T} }}"""
    data = aotc.compile(text, devices=HALVES["cpu, cuda"], opt_level=0)
    install(monkeypatch, data)
    module = aotc.load(data)
    module.invoke("main", *inputs_of(module))
    log = module._executable.gpu.log
    log.clear()
    module.invoke("main", *inputs_of(module))
    before = log[: log.index("graph")]
    assert before.count("finish") == 1  # before the cosine; nobody writes over what the first copy reads


def test_an_error_leaves_nothing_under_way(monkeypatch):
    text = f"""func.func public @main(%x: {T} {FIRST}, %w: {T} {SECOND}) -> {T} {{
      %z = stablehlo.constant dense<0.0> : tensor<f32>
      %t = {to("d1", "%x")}
      %y = stablehlo.multiply %t, %w : {T}
      %s = stablehlo.reduce(%y init: %z) applies stablehlo.add across dimensions = [0, 1]
        : ({T}, tensor<f32>) -> tensor<f32>
      %c = stablehlo.compare GT, %s, %z : (tensor<f32>, tensor<f32>) -> tensor<i1>
      stablehlo.custom_call @shape_assertion(%c) {{error_message = "too small", has_side_effect = true}}
        : (tensor<i1>) -> ()
      return %y : {T} }}"""
    data = aotc.compile(text, devices=HALVES["cpu, cuda"])
    install(monkeypatch, data)
    module = aotc.load(data)
    x = np.ones((8, 8), "f4")
    for sign in (1, -1, 1):
        if sign < 0:
            with pytest.raises(aotc.CallError, match="too small"):
                module.invoke("main", x, sign * x)
        else:
            np.testing.assert_array_equal(np.asarray(module(x, x)), x)
        gpu = module._executable.gpu
        assert gpu.done == gpu.given
