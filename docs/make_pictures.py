"""Write the pictures of ``docs``: what ``aotc explain --picture`` draws of two small models."""

from __future__ import annotations

from pathlib import Path

import aotc
from aotc.tools.explain.affinity import explain_affinity
from aotc.tools.explain.memory import explain_memory
from aotc.tools.explain.schedule import explain_schedule
from aotc.vmfb.bundle import open_bundle

TARGET = "cpu:x86-64-v2"  # of hardly any machine: what is measured of one's own would be in the picture
STAGES = """\
func.func public @main(%x: tensor<16x128xf32> {aotc.affinity = "d0"},
                       %w0: tensor<128x4096xf32> {aotc.affinity = "d0"},
                       %w1: tensor<4096x64xf32> {aotc.affinity = "d1"}) -> tensor<16x64xf32> {
  %0 = stablehlo.dot_general %x, %w0, contracting_dims = [1] x [0]
     : (tensor<16x128xf32>, tensor<128x4096xf32>) -> tensor<16x4096xf32>
  %1 = stablehlo.custom_call @aotc.transfer(%0) {aotc.to = "d1"} : (tensor<16x4096xf32>) -> tensor<16x4096xf32>
  %2 = stablehlo.dot_general %1, %w1, contracting_dims = [1] x [0]
     : (tensor<16x4096xf32>, tensor<4096x64xf32>) -> tensor<16x64xf32>
  return %2 : tensor<16x64xf32>
}
"""
SORT = """"stablehlo.sort"({0}) ({{
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %less = stablehlo.compare LT, %a, %b : (tensor<f32>, tensor<f32>) -> tensor<i1>
      stablehlo.return %less : tensor<i1>
  }}) {{dimension = {1} : i64}} : (tensor<128x128xf32>) -> tensor<128x128xf32>"""
PRODUCT = """stablehlo.dot_general {0}, {1}, contracting_dims = [1] x [0]
    : (tensor<128x128xf32>, tensor<128x128xf32>) -> tensor<128x128xf32>"""
DIAMOND = f"""\
func.func public @diamond(%x: tensor<128x128xf32>) -> tensor<128x128xf32> {{
  %p = {PRODUCT.format("%x", "%x")}
  %y = stablehlo.tanh %p : tensor<128x128xf32>
  %l = {PRODUCT.format("%y", "%x")}
  %left = {SORT.format("%l", 1)}
  %r = {PRODUCT.format("%x", "%y")}
  %right = {SORT.format("%r", 0)}
  %sum = stablehlo.add %left, %right : tensor<128x128xf32>
  return %sum : tensor<128x128xf32>
}}
"""


def pictures() -> dict[Path, str]:
    """Return the contents of each picture by its path."""
    folder = Path(__file__).parent
    opened = open_bundle(aotc.compile(DIAMOND, target=TARGET, opt_level=2))
    return {
        folder / "affinity.svg": explain_affinity(STAGES, devices={"d0": TARGET, "d1": "cuda:sm_90"}).picture,
        folder / "schedule.svg": explain_schedule(opened).picture,
        folder / "memory.svg": explain_memory(opened).picture,
    }


if __name__ == "__main__":
    for path, contents in pictures().items():
        path.write_text(contents)
