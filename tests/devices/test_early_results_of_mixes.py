"""Results of the CPU that are read while a simulated GPU works."""

import numpy as np
import pytest
from devices.mixes import ORDERS, alone
from devices.test_gpu_fences import PATIENCE, gate  # noqa: F401 - a fixture
from lowering.test_devices import inputs_of, random_program
from vmfb.simulated_gpu import install

import aotc

pytest.importorskip("cuda.bindings.nvjitlink")
pytestmark = [pytest.mark.cudasim, pytest.mark.usefixtures("bundles_anew")]

T = "tensor<64x64xf32>"
TEXT = f"""func.func public @main(%x: {T} {{aotc.affinity = "d0"}}, %y: {T} {{aotc.affinity = "d1"}})
    -> ({T}, {T}, {T}) {{
  %0 = stablehlo.sine %x : {T}
  %1 = stablehlo.dot_general %y, %y, contracting_dims = [1] x [0] : ({T}, {T}) -> {T}
  %2 = stablehlo.custom_call @aotc.transfer(%1) {{aotc.to = "d0"}} : ({T}) -> {T}
  %3 = stablehlo.add %2, %x : {T}
  return %0, %1, %3 : {T}, {T}, {T} }}"""
X = np.linspace(0, 1, 64 * 64, dtype="float32").reshape(64, 64)


def test_a_result_of_the_cpu_is_read_while_the_gpu_works(monkeypatch, gate):  # noqa: F811
    data = aotc.compile(TEXT, devices={"d0": "cpu", "d1": "cuda:sm_90"})
    install(monkeypatch, data, count=1)
    module = aotc.load(data)
    gate.close()
    fence = module.submit("main", X, X)
    np.testing.assert_allclose(fence[0].result(PATIENCE), np.sin(X), rtol=1e-6)
    assert not fence.done
    assert not fence[1].ready()
    assert not fence[2].ready()
    gate.open()
    want = alone(TEXT, X, X)
    for found, expected in zip(fence.results, want, strict=True):
        np.testing.assert_allclose(np.asarray(found), expected, rtol=2e-3)  # products of TF32


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("seed", [1, 3, 5])
def test_random_programs(seed, order, monkeypatch):
    """Whichever result is waited for first is whole, whatever the GPU has left to do."""
    text = random_program(np.random.default_rng(seed))
    devices = {f"d{n}": "cuda:sm_90" if n % 2 else "cpu" for n in range(4) if f'"d{n}"' in text}
    data = aotc.compile(text, devices=devices)
    install(monkeypatch, data, count=2, order=ORDERS[order])
    module = aotc.load(data)
    arrays = inputs_of(module)
    want = alone(text, *arrays)
    for first in range(2):
        fence = module.submit("main", *arrays)
        for n in (first, 1 - first):
            np.testing.assert_allclose(np.array(fence[n].result(PATIENCE)), want[n], rtol=1e-4, atol=1e-4)
