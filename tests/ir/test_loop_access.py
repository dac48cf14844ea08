"""Which outputs may take the memory of an input."""

from __future__ import annotations

import pytest

from aotc.ir.loop.access import accesses, may_overwrite
from aotc.ir.loop.parser import parse_kernel
from aotc.ir.loop.verify import verify_kernel

pytestmark = pytest.mark.ir

MAY = {
    "the element that is written": "for i in parallel(0, 8):\n  for j in range(0, 8):\n    o[i, j] = a[i, j]",
    "twice": "for i in parallel(0, 8):\n  for j in range(0, 8):\n    o[i, j] = a[i, j] * (a[i, j] + a[i, j])",
    "before other work": """for i in parallel(0, 8):
  for j in range(0, 8):
    v = a[i, j] + f32(1.0)
    for k in range(0, 8):
      s = b[k, j]
    o[i, j] = v""",
    "in pieces": """for p in parallel(0, 4):
  for i in range(2*p, 2*p + 2):
    for j in range(0, 8):
      o[i, j] = a[i, j]""",
    "under a test": """for i in parallel(0, 8):
  for j in range(0, 8):
    if b[i, j] < f32(0.0):
      v = a[i, j]
    o[i, j] = b[i, j]""",
    "one turn": "for i in parallel(0, 8):\n  for k in range(0, 1):\n    for j in range(0, 8):\n      o[i, j] = a[i, j]",
}
MAY["in two arms, of different rows"] = """for q in parallel(0, 4):
  for t in range(q, q + 1, extent=4):
    if index(t) < i64(2):
      for r in range(0, 2):
        for j in range(0, 8):
          o[2*t + r, j] = a[2*t + r, j]
    else:
      for r in range(0, 2):
        for j in range(0, 8):
          o[2*t + r, j] = a[2*t + r, j] + b[0, 0]"""
MAY_NOT = {
    "in two arms, of rows that meet": """for q in parallel(0, 4):
  for t in range(q, q + 1, extent=4):
    if index(t) < i64(2):
      for r in range(0, 3):
        for j in range(0, 8):
          o[2*t + r, j] = a[2*t + r, j]
    else:
      for r in range(0, 2):
        for j in range(0, 8):
          o[2*t + r, j] = a[2*t + r, j]""",
    "in two arms, the other one's row": """for q in parallel(0, 4):
  for t in range(q, q + 1, extent=4):
    if index(t) < i64(2):
      for j in range(0, 8):
        o[t, j] = a[t, j]
    else:
      for j in range(0, 8):
        o[t, j] = a[t - 2, j]""",
    "another element": "for i in parallel(0, 8):\n  for j in range(0, 8):\n    o[i, j] = a[j, i]",
    "the element and another": "for i in parallel(0, 8):\n  for j in range(0, 8):\n    o[i, j] = a[i, j] + a[i, 0]",
    "after the store": "for i in parallel(0, 8):\n  for j in range(0, 8):\n    o[i, j] = b[i, j]\n    v = a[i, j]",
    "in a later loop": """for i in parallel(0, 8):
  for j in range(0, 8):
    o[i, j] = b[i, j]
  for j in range(0, 8):
    v = a[i, j]""",
    "in an earlier loop that runs again": """for i in parallel(0, 8):
  for k in range(0, 2):
    for j in range(0, 8):
      v = a[i, j]
    for j in range(0, 8):
      o[i, j] = b[i, j]""",
    "again and again": """for i in parallel(0, 8):
  for k in range(0, 2):
    for j in range(0, 8):
      o[i, j] = a[i, j]""",
    "as long as it holds": """for i in parallel(0, 8):
  for j in range(0, 8):
    while True:
      if not (a[i, j] < f32(0.0)):
        break
      o[i, j] = a[i, j]""",
    "by a tile": """for q in parallel(0, 8):
  for j in range(0, 8):
    o[q, j] = a[q, j]
  t = private("f32[1, 8]")
  tile(t, a, b, SHAPE)""",
    "by a tile, before": """for q in parallel(0, 8):
  t = private("f32[1, 8]")
  tile(t, b, a, SHAPE)
  for j in range(0, 8):
    o[q, j] = a[q, j] + t[0, j]""",
    "written by a tile": """for q in parallel(0, 8):
  tile(o, b, b, rows=1, cols=8, out_base=8*q, out_row=8, a_base=8*q, a_row=8, b_base=0, levels=[(8, 1, 8)])
  v = a[q, 0]""",
    "by a function": """for q in parallel(0, 8):
  call("f", b[0, 0], a[q, 0])
  for j in range(0, 8):
    o[q, j] = a[q, j]""",
    "as a sum": "for i in parallel(0, 8):\n  for j in range(0, 8):\n    o[i, j] += a[i, j]",
}


SHAPE = 'rows=1, cols=8, out_base=0, out_row=8, a_base=8*q, a_row=8, b_base=0, levels=[(8, 1, 8)]'
BUFFERS = 'a: "f32[8, 8]", b: "f32[8, 8]", /, o: "f32[8, 8]"'


def kernel(body, aliases=""):
    head = f'def k({BUFFERS}, *, grid: "{4 if "parallel(0, 4)" in body else 8}"{aliases}):'
    lines = body.replace("SHAPE", SHAPE).splitlines()
    return parse_kernel("\n".join([head, *("    " + line for line in lines)]) + "\n")


@pytest.mark.parametrize("case", [*MAY, *MAY_NOT])
def test_may_overwrite_allows_only_safe_aliases(case):
    body, want = (MAY[case], True) if case in MAY else (MAY_NOT[case], False)
    k = kernel(body)
    assert may_overwrite(accesses(k.body), k.inputs[0], k.outputs[0]) is want


@pytest.mark.parametrize("case", [*MAY, *MAY_NOT])
def test_the_verifier_refuses_unsafe_aliases(case):
    found = verify_kernel(kernel(MAY.get(case) or MAY_NOT[case], ', aliases: "[(0, 0)]"'))
    assert [f for f in found if "memory of a" in f] == found
    assert bool(found) is (case in MAY_NOT)


def test_accesses_are_in_program_order():
    body = """for i in parallel(0, 8):
  while True:
    if not (b[0, i] < f32(0.0)):
      break
    v = a[i, 0]
  o[i, 0] += b[i, 0]"""
    listed = [(a.buffer.name, a.index is not None, a.write, len(a.loops)) for a in accesses(kernel(body).body)]
    assert listed == [
        ("b", True, False, 2),
        ("a", True, False, 2),
        ("b", True, False, 1),
        ("o", True, False, 1),
        ("o", True, True, 1),
    ]
