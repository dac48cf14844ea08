"""Products for tensor cores: which kernels get a tiling, under whatever names."""

import pytest

from aotc.ir.loop.forms.matmul import read_product
from aotc.ir.loop.forms.tiling import Mma, Wgmma
from aotc.ir.loop.parser import parse_kernel
from aotc.ir.loop.printer import print_kernel
from aotc.ir.loop.verify import verify_kernel
from aotc.ir.tensor.text import parse_module
from aotc.lowering.regions.lower_region import lower_region
from aotc.targets import TARGETS

pytestmark = pytest.mark.ir

MODULE = """module @main {{
func @k(%a: {kind}[{rows}, 64], %b: {kind}[64, 128]) attributes {{kind = "contract", root = "matmul"}} {{
  %matmul = matmul %a, %b {{lhs_transposed = False, rhs_transposed = False{more}}} : {result}[{rows}, 128]
  return %matmul
}}
}}
"""


def lowered(kind="bf16", rows="48", result="bf16", more="", target="cuda:sm_90a"):
    (function,) = parse_module(
        MODULE.format(kind=kind, rows=rows, result=result, more=more)
    ).functions.values()
    return lower_region(function, TARGETS[target])


@pytest.mark.parametrize("name", ["k", "row", "col", "z", "m", "total"])
def test_a_dim_named_like_a_loop_variable_is_tiled(name):
    kernel = lowered(rows=name)
    assert verify_kernel(kernel) == []
    assert parse_kernel(print_kernel(kernel)) == kernel
    product = read_product(kernel)
    assert str(product.row[1]) == name
    assert product.view().pitch == 64
    assert kernel.tiling.template == Wgmma()


@pytest.mark.parametrize(
    ("target", "template"), [("sm_90a", Wgmma()), ("sm_89", Mma()), ("sm_80", Mma()), ("compute_80", Mma())]
)
def test_each_gpu_has_the_template_of_its_instructions(target, template):
    assert lowered(target=f"cuda:{target}").tiling.template == template


@pytest.mark.parametrize(("precision", "is_rounded"), [("", True), ("HIGH", False), ("HIGHEST", False)])
def test_f32_uses_tensor_cores_only_if_the_precision_allows(precision, is_rounded):
    more = f', precision = "{precision}"' if precision else ""
    kernel = lowered("f32", result="f32", more=more)
    assert (kernel.tiling is not None) is is_rounded
    assert ("reduce_precision" in print_kernel(kernel)) is is_rounded


def test_a_limit_without_effect_returns_the_same_target():
    whole = TARGETS["cuda:sm_90a"]
    assert whole.with_limits(0, 0) is whole.with_limits(whole.stack, whole.shared_memory + 1) is whole
    assert whole.with_limits(whole.stack - 1, 0).stack == whole.stack - 1


def test_tiles_fit_the_shared_memory_limit():
    whole, small = TARGETS["cuda:sm_90a"], TARGETS["cuda:sm_90a"].with_limits(0, 48 << 10)
    (function,) = parse_module(MODULE.format(kind="bf16", rows="48", result="bf16", more="")).functions.values()
    assert lower_region(function, whole).tiling.shared <= whole.shared_memory
    kernel = lower_region(function, small)
    assert kernel.tiling is None or kernel.tiling.shared <= 48 << 10
