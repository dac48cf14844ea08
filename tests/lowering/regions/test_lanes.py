"""Loops on a GPU whose threads do several elements: which ones, and that every element is done."""

import ml_dtypes
import numpy as np
import pytest

from aotc.ir.loop.ir import For, walk
from aotc.ir.loop.run import run_kernel
from aotc.ir.loop.verify import verify_kernel
from aotc.ir.semantics.run import interpret
from aotc.ir.tensor.text import parse_module
from aotc.lowering.regions.lower_region import lower_region
from aotc.targets import resolve_targets

pytestmark = pytest.mark.ir

(CUDA,) = resolve_targets("cuda:sm_90")
LOOP = 'attributes {kind = "loop", root = "1"}'
CASES = {
    "neighbours": ("%a: f32[1024, 512]", "  %1 = exp %a : f32[1024, 512]\n", 4),
    "neighbours of rows": (
        "%a: f32[4096, 100], %b: f32[100]",
        "  %0 = broadcast %b {dims = (1,)} : f32[4096, 100]\n  %1 = add %a, %0 : f32[4096, 100]\n", 4,
    ),
    "apart along the first axis": ("%a: f32[1024, 514]", "  %1 = slice %a {limit = (1024, 513), start = (0, 1), "
                                   "stride = (1, 1)} : f32[1024, 512]\n", 4),
    "apart": ("%a: f32[1021, 516]", "  %1 = slice %a {limit = (1021, 514), start = (0, 2), stride = (1, 1)} : "
              "f32[1021, 512]\n", 4),
    "fewer at the end": ("%a: f32[524291]", "  %1 = exp %a : f32[524291]\n", 4),
    "of two bytes": ("%a: bf16[524288]", "  %1 = neg %a : bf16[524288]\n", 8),
    "few": ("%a: f32[8192]", "  %1 = exp %a : f32[8192]\n", 0),
}  # fmt: skip


def lowered(name):
    parameters, body, lanes = CASES[name]
    module = parse_module(f"module @main {{\nfunc @k({parameters}) {LOOP} {{\n{body}  return %1\n}}\n}}\n")
    return module, lower_region(module.functions["k"], CUDA), lanes


@pytest.mark.parametrize("name", CASES)
def test_each_element_has_exactly_one_thread(name):
    """The first and the last threads write what the region means; each element has one thread."""
    module, kernel, lanes = lowered(name)
    assert verify_kernel(kernel) == []
    loops = [s for s in walk(kernel.body) if isinstance(s, For) and s.kind == "lanes"]
    assert [s.end for s in loops] == ([lanes] if lanes else [])
    dtypes = {"f32": np.float32, "bf16": ml_dtypes.bfloat16}
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(b.shape).astype(dtypes[b.dtype]) for b in kernel.inputs]
    (want,) = interpret(module, *arrays, function="k")
    found = np.full(want.shape, np.nan, want.dtype)
    ends = 0, 40, kernel.grid - 40, kernel.grid
    for begin, end in (ends[:2], ends[2:]):
        run_kernel(kernel, [*arrays, found], begin=begin, end=end)
    written = ~np.isnan(found)
    each = max(lanes, 1)
    assert written.sum() == 80 * each - (kernel.grid * each - found.size)
    np.testing.assert_allclose(found[written].astype("f8"), np.asarray(want)[written].astype("f8"), rtol=1e-2)


def test_lane_loops_may_update_in_place():
    """Each thread reads what it then writes, also where it does its elements one by one."""
    for name in ("neighbours", "fewer at the end", "neighbours of rows"):
        assert lowered(name)[1].aliases == ((0, 0),)
