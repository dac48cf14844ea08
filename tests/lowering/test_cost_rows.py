"""Every row of the cost table decides something: a case on either side, compared with XLA."""

import jax
import numpy as np
import pytest
from support import cost_cases_gpu
from support.cost_cases import BLOCKS, ESTIMATES, GPU, LIMITS, MATRIX, V4, VNNI
from support.differential import close
from support.sizes import cost_cases_attention, cost_cases_columns, cost_cases_quantized

import aotc
from aotc.frontend.importer import import_model
from aotc.ir.loop.printer import print_kernel
from aotc.ir.loop.verify import verify_kernel
from aotc.lowering.cost_model import work
from aotc.lowering.lower import lower
from aotc.lowering.placement.host_only import imply_host
from aotc.lowering.plans import attention as table_attention
from aotc.lowering.plans import cpu_reductions as table_columns
from aotc.lowering.plans import gpu_algorithms as table_algorithms
from aotc.lowering.plans import gpu_loops_rows as table_gpu
from aotc.lowering.plans import gpu_memory as table_gpu_memory
from aotc.lowering.plans import gpu_while as table_loops
from aotc.lowering.plans import matmul as table_products
from aotc.lowering.plans import thresholds as cost
from aotc.lowering.threshold import BlockSize, Limit
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.targets import resolve

pytestmark = pytest.mark.cpu
OTHERS = (cost_cases_attention, cost_cases_columns, cost_cases_gpu)
LIMITS = {**LIMITS, **cost_cases_quantized.LIMITS, **{k: v for x in OTHERS for k, v in x.LIMITS.items()}}
BLOCKS = {**BLOCKS, **{k: v for x in OTHERS for k, v in x.BLOCKS.items()}}


@pytest.fixture
def answers(monkeypatch):
    """The answers of all decisions, by row."""
    seen = {}
    holds = Limit.holds

    def record(self, size):
        answer = holds(self, size)
        seen.setdefault(self.name, set()).add(answer)
        return answer

    monkeypatch.setattr(Limit, "holds", record)
    return seen


def lowered(case):
    """The kernels of a case, verified."""
    (target,) = resolve(case.target)
    options = Options(
        target=case.target, opt_level=case.level, memory_limit=case.memory_limit, quantize_weights=case.quantize,
        verify_each=True,
    )  # fmt: skip
    module, target, options = imply_host(import_model(case.exported()), target, [target], options)
    variant = lower(run_passes(module, options), target, options)
    for kernel in variant.kernels:
        verify_kernel(kernel)
    return variant


def run(case):
    """Compare with XLA on this machine, whatever CPU it has."""
    arguments = case.arguments()
    target = "cpu" if case.target in (V4, VNNI, MATRIX) else case.target
    data = aotc.compile(
        case.exported(), opt_level=case.level, target=target, memory_limit=case.memory_limit,
        quantize_weights=case.quantize,
    )  # fmt: skip
    got = aotc.load(data, threads=2).invoke("main", *[np.asarray(a) for a in jax.tree.leaves(arguments)])
    close(got, jax.jit(case.function)(*arguments), factor=40)


def test_each_row_has_a_unit_and_says_where_it_was_measured():
    tables = (table_algorithms, table_attention, table_columns, table_gpu, table_gpu_memory, table_loops)
    for module in (cost, *tables, table_products, work):
        for name, row in vars(module).items():
            if isinstance(row, Limit | BlockSize | work.Estimate):
                assert row.name == name.lower()
                assert row.unit
                assert row.measured
                assert row in cost.ROWS
    assert len({row.name for row in cost.ROWS}) == len(cost.ROWS)


def test_each_decision_has_cases():
    rows = {row.name for row in cost.ROWS if isinstance(row, Limit)}
    missing = sorted(rows - set(LIMITS))
    assert not missing, f"add cases to LIMITS in tests/support/cost_cases.py: {missing}"
    assert set(LIMITS) <= rows


@pytest.mark.parametrize("name", LIMITS)
def test_a_decision_falls_on_either_side(answers, name):
    for each, answer in zip(LIMITS[name], (True, False), strict=True):
        answers.clear()
        lowered(each)
        assert answer in answers.get(name, ()), f"{name} was never {answer}, only {answers.get(name)}"


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("name", [n for n, cases in LIMITS.items() if cases[0].target != GPU])
def test_both_sides_compute_what_xla_does(name, side):
    run(LIMITS[name][side])


def test_each_block_has_cases():
    rows = {row.name for row in cost.ROWS if isinstance(row, BlockSize)}
    missing = sorted(rows - set(BLOCKS))
    assert not missing, f"add cases to BLOCKS in tests/support/cost_cases.py: {missing}"
    assert set(BLOCKS) <= rows


@pytest.mark.parametrize("name", BLOCKS)
def test_any_size_fits_a_block(name):
    """Below it, at it, and no multiple of it."""
    for case in BLOCKS[name]:
        lowered(case) if case.target in (GPU, MATRIX) or "aarch64" in case.target else run(case)


def prices(case):
    variant = lowered(case)
    return [(print_kernel(k), variant.costs.of(k).ns, variant.costs.grain(k)) for k in variant.kernels]


@pytest.mark.parametrize("name", ESTIMATES)
def test_an_estimate_counts(name):
    (row,) = (row for row in cost.ROWS if row.name == name)
    before = prices(ESTIMATES[name])
    value = row.value
    try:
        object.__setattr__(row, "value", 4 * value)
        assert prices(ESTIMATES[name]) != before
    finally:
        object.__setattr__(row, "value", value)
