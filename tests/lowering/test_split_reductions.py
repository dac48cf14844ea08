"""Reductions of a GPU in two steps: as many blocks as it runs at once, the same sums."""

import numpy as np
import pytest

from aotc.ir.semantics.run import interpret
from aotc.ir.semantics.verify import verify
from aotc.ir.tensor.text import parse_module
from aotc.lowering.passes.split_reductions import split_reductions
from aotc.options import Options

pytestmark = pytest.mark.ir

# By the shape and the reduced dims: the shape between the two steps, or none.
STEPS = {
    ((1 << 18,), (0,)): (1024,),
    ((32, 32 << 10), (1,)): None,  # a block holds a row
    ((32, 64 << 10), (1,)): (32, 32),  # as many rows as parts
    ((4, 1, 60 << 10), (1, 2)): (4, 240),
    ((2048, 300), (0,)): (8, 300),
    ((600, 20, 30), (0, 1)): (40, 30),
    ((1 << 16, 8), (1,)): None,
}


@pytest.mark.parametrize(("shape", "dims"), STEPS)
def test_reductions_with_few_results_have_two_steps_on_gpus(shape, dims):
    kept = [n for d, n in enumerate(shape) if d not in dims]
    module = parse_module(f"""module @main {{
func @main(%x: f32{list(shape)}) {{
  %0 = constant {{value = dense("f32", (), [0.0])}} : f32[]
  %1 = reduce %x, %0 {{dims = {dims}}} : f32{kept} {{
    region(%a: f32[], %b: f32[]) {{
      %2 = add %a, %b : f32[]
      yield %2
    }}
  }}
  return %1
}}
}}
""")
    changed = split_reductions(module, Options(target="cuda:sm_90"))
    assert verify(changed) == []
    partial = [op.result.type.shape for op in changed.functions["main"].body.ops if op.name == "reduce"][:-1]
    assert partial == ([STEPS[shape, dims]] if STEPS[shape, dims] else [])
    x = np.random.default_rng(0).integers(0, 5, shape).astype("f4")
    np.testing.assert_array_equal(interpret(changed, x)[0], x.sum(dims))
