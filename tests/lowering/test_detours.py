"""Values that a model moves to another device and back."""

import numpy as np
import pytest
from lowering.test_devices import FIRST, T, product, to

import aotc
from aotc.vmfb.bundle import open_bundle

pytestmark = pytest.mark.cpu

DETOUR = f"""func.func public @main(%x: {T} {FIRST}) -> {T} {{
  %0 = {product("%x", "%x")}
  %1 = {to("d1", "%0")}
  %2 = stablehlo.sine %1 : {T}
  %3 = {to("d0", "%2")}
  %4 = {to("d1", "%3")}
  %5 = stablehlo.exponential %4 : {T}
  %6 = {to("d0", "%5")}
  %7 = {product("%6", "%x")}
  return %7 : {T} }}"""


def test_a_transfer_to_a_device_and_back_is_removed():
    data = aotc.compile(DETOUR, devices={"d0": "cpu", "d1": "cpu"}, verify_each=True)
    transfers = open_bundle(data).manifest["variants"][0]["transfers"]
    assert [(t["from"], t["to"]) for t in transfers] == [("d0", "d1"), ("d1", "d0")]
    x = np.linspace(-1, 1, 64, dtype="float32").reshape(8, 8)
    np.testing.assert_allclose(aotc.load(data)(x), np.exp(np.sin(x @ x)) @ x, rtol=1e-4)
