"""Write the pictures of ``docs``: how aotc works, and the output of ``aotc explain --picture`` for two small models."""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

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


STEPS = [
    ("Model", "#e3ecfa", ["JAX function", "jax.export file", "StableHLO"]),
    (
        "Bundle: one file",
        "#fdf0d5",
        ["machine code of each kernel", "program, weights, signature", "CPUs and NVIDIA GPUs"],
    ),
    ("Runtime", "#e2f2e3", ["Python: module(x)", "command line: aotc run", "server: aotc serve"]),
]
ARROWS = [("aotc compile", "JAX, Numba"), ("aotc.load", "NumPy, msgpack")]


def overview() -> str:
    """Return the picture of the way from a model to its results: three boxes, and the packages of each step."""
    width, gap, height = 240, 122, 148
    total = 3 * width + 2 * gap + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {height + 40}" width="{total}"'
        ' font-family="system-ui, sans-serif" role="img" aria-label="model, bundle, runtime">',
        f'<rect width="{total}" height="{height + 40}" rx="10" fill="#ffffff"/>',
    ]
    for number, (title, colour, lines) in enumerate(STEPS):
        left = 20 + number * (width + gap)
        parts.append(
            f'<rect x="{left}" y="20" width="{width}" height="{height}" rx="8" fill="{colour}" stroke="#5a6472"/>'
            f'<text x="{left + 16}" y="52" font-size="17" font-weight="600" fill="#1c2430">{escape(title)}</text>'
        )
        for row, line in enumerate(lines):
            y = 84 + 26 * row
            parts.append(f'<text x="{left + 16}" y="{y}" font-size="14" fill="#333d4a">{escape(line)}</text>')
    for number, (action, packages) in enumerate(ARROWS):
        left = 20 + width + number * (width + gap)
        right, middle, y = left + gap - 16, left + gap / 2, 20 + height / 2
        parts.append(
            f'<path d="M{left + 8} {y}H{right}m-8 -6l8 6l-8 6" fill="none" stroke="#5a6472" stroke-width="2"/>'
            f'<text x="{middle}" y="{y - 12}" font-size="13" font-weight="600" fill="#1c2430" text-anchor="middle">'
            f'{action}</text><text x="{middle}" y="{y + 22}" font-size="12" fill="#5a6472" text-anchor="middle">'
            f'{packages}</text>'
        )
    return "\n".join([*parts, "</svg>\n"])


def pictures() -> dict[Path, str]:
    """Return the contents of each picture by its path."""
    folder = Path(__file__).parent
    opened = open_bundle(aotc.compile(DIAMOND, target=TARGET, opt_level=2))
    return {
        folder / "how_it_works.svg": overview(),
        folder / "affinity.svg": explain_affinity(STAGES, devices={"d0": TARGET, "d1": "cuda:sm_90"}).picture,
        folder / "schedule.svg": explain_schedule(opened).picture,
        folder / "memory.svg": explain_memory(opened).picture,
    }


if __name__ == "__main__":
    for path, contents in pictures().items():
        path.write_text(contents)
