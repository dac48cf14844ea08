"""Plans of regions are values: they print, and their text reads back to an equal plan."""

import pytest

from aotc.ir.loop.forms.tiling import Tiling, Wgmma, Window
from aotc.lowering.plans.cpu_columns import ColumnPlan
from aotc.lowering.plans.gpu_contract import TensorCorePlan
from aotc.lowering.plans.gpu_reductions import GroupRowPlan
from aotc.lowering.plans.gpu_rows import RowGroup
from aotc.lowering.plans.linalg.gpu_factors import EigenPlan
from aotc.lowering.plans.linalg.gpu_jacobi import jacobi_layout
from aotc.lowering.plans.linalg.gpu_triangles import BlockCholeskyPlan, TriangleBlock
from aotc.lowering.plans.linalg.triangles import CholeskyPlan
from aotc.lowering.plans.region_plan import parse_plan
from aotc.lowering.plans.row_values import StoredValue
from aotc.lowering.plans.single_ops import LapackCallPlan

pytestmark = pytest.mark.ir

WINDOW = Window((3, 3), (1, 1), (1, 1), (0, 0), (1, 1), (8, 8), 64)
PLANS = (
    ColumnPlan(kept=(0, 2), reduced=(1,), together=(0,), width=200, terms=8, streams=(1,)),
    GroupRowPlan((0,), (1,), ((1,),), (StoredValue("5"), StoredValue("7", "9")), RowGroup(32, 4, 4, 2), (0,)),
    TensorCorePlan("f32", Tiling(Wgmma(), 128, 64, 8, WINDOW)),
    CholeskyPlan(loop_rows=None),
    BlockCholeskyPlan(TriangleBlock(threads=512, panel=32, side=4), mirror=16),
    EigenPlan(jacobi_layout(given=33, rows=33, size=4, more=0), sweeps=30),
    LapackCallPlan(),
)


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: type(p).__name__)
def test_region_plans_parse_back_from_their_text(plan):
    assert parse_plan(str(plan)) == plan


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "is not a plan"),
        ("ColumnPlan(kept=(0,)", "is not a plan"),
        ("ColumnPlan(kept=(0,))", "is not a plan: .*missing"),
        ("Unknown(kept=(0,))", r"'Unknown\(kept=\(0,\)\)' is not a part of a plan"),
        ("__import__('os').abort()", "is not a part of a plan"),
        ("(1, 2)", "is not a plan"),
    ],
)
def test_invalid_plan_text_is_refused(text, found):
    with pytest.raises(ValueError, match=found):
        parse_plan(text)
