"""Every op of StableHLO and CHLO that jaxlib knows: at least one module each, beside an oracle.

The oracle is XLA; where that does not take an op it is jaxlib's reference interpreter, or NumPy. The test of the names
fails when jaxlib learns an op that this table does not have.
"""

import jax
import numpy as np
import pytest
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import _chlo_ops_gen, _stablehlo_ops_gen, stablehlo
from support.checklists.checklist import F, module
from support.checklists.checklist_all import CASES

import aotc
from aotc.diagnostics import CompileError
from aotc.frontend.contexts import make_context

pytestmark = pytest.mark.cpu

ELSEWHERE = {
    "stablehlo.send",
    "stablehlo.recv",
    "stablehlo.infeed",
    "stablehlo.outfeed",
    "stablehlo.rng",
    "stablehlo.async_start",
    "stablehlo.async_done",
    "stablehlo.uniform_quantize",
    "stablehlo.uniform_dequantize",
    "stablehlo.return",
}
BY_HAND = {
    "chlo.ragged_dot": lambda a, b, sizes: np.concatenate([a[:1] @ b[0], a[1:] @ b[1]]),
    "stablehlo.unary_einsum": lambda a: a.T,
    "stablehlo.collective_broadcast": lambda a: a,
    "stablehlo.collective_reduce": lambda a: a,
}
INTERPRETED = {"stablehlo.dynamic_conv"}
"""XLA does not run these on the CPU; the interpreter ends the process at ops that it does not know."""


def reference(name, text, args):
    if name in BY_HAND:
        return [BY_HAND[name](*args)]
    if name in INTERPRETED:
        with make_context():
            values = [ir.DenseElementsAttr.get(np.ascontiguousarray(a)) for a in args]
            return [np.array(v) for v in stablehlo.eval_module(ir.Module.parse(text), values)]
    device = jax.devices("cpu")[0]
    with jax.enable_x64(True):
        held = [jax.device_put(a, device) for a in args]
        return [np.asarray(v) for v in device.client.compile_and_load(text, [device]).execute(held)]


@pytest.mark.parametrize("name", sorted(CASES))
def test_each_op_agrees_with_the_reference(name):
    for line, args, results in CASES[name]:
        text = module(line, args, results)
        found = aotc.load(aotc.compile(text.encode(), verify_each=True)).invoke("main", *args)
        for got, want in zip(found, reference(name, text, args), strict=True):
            assert got.shape == want.shape
            tolerance = 3e-6 if got.dtype.kind in "fc" and got.dtype.itemsize > 2 else 0
            np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


def test_every_name_has_a_case():
    names = {
        value.OPERATION_NAME
        for generated in (_chlo_ops_gen, _stablehlo_ops_gen)
        for name, value in vars(generated).items()
        if name.endswith("Op")
    }
    assert names - set(CASES) - ELSEWHERE == set()


def test_an_unknown_op_is_refused_with_its_line():
    with pytest.raises(CompileError, match="<model>:2"):
        aotc.compile(module('%y = "stablehlo.no_such_op"(%a) : (@T0) -> @T0', (F,), ["3x4xf32"]).encode())


REDUCE = """
  %y = "stablehlo.collective_reduce"(%a, %b) ({
  ^bb0(%p: tensor<f32>, %q: tensor<f32>):
    %s = stablehlo.add %p, %q : tensor<f32>
    stablehlo.return %s : tensor<f32>
  }) {replica_groups = dense<GROUPS> : tensor<1xNxi64>, has_dynamic_root} : (@T0, @T1) -> @T0
"""


@pytest.mark.skipif("stablehlo.collective_reduce" not in CASES, reason="jaxlib does not know it")
def test_a_reduction_to_a_root_value_matches_numpy():
    """Alone this process is the root; the operand that says so is not read."""
    alone = REDUCE.replace("GROUPS", "[[0]]").replace("N", "1")
    root = np.zeros(1, np.int32)
    (found,) = aotc.load(aotc.compile(module(alone, (F, root), ["3x4xf32"]).encode())).invoke("main", F, root)
    np.testing.assert_array_equal(found, F)
    with pytest.raises(CompileError, match="collective_reduce exchanges between 2 processes"):
        aotc.compile(module(REDUCE.replace("GROUPS", "[[0, 1]]").replace("N", "2"), (F, root), ["3x4xf32"]).encode())
