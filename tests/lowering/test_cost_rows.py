"""Every row of the cost table decides something: a case on either side, compared with XLA."""

import jax
import numpy as np
import pytest
from support import cost_cases_gpu
from support.cost_cases import BLOCKS, ESTIMATES, GPU, LIMITS, MATRIX, V4, VNNI
from support.differential import close
from support.sizes import cost_cases_attention, cost_cases_columns, cost_cases_quantized
from support.threshold_rows import all_rows

import aotc
from aotc.frontend.importer import import_model
from aotc.ir.loop.printer import print_kernel
from aotc.ir.loop.verify import verify_kernel
from aotc.lowering.lower import lower
from aotc.lowering.placement.host_only import imply_host
from aotc.lowering.threshold import BlockSize, Limit
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.targets import resolve_targets

pytestmark = pytest.mark.cpu
OTHERS = (cost_cases_attention, cost_cases_columns, cost_cases_gpu)
LIMITS = {**LIMITS, **cost_cases_quantized.LIMITS, **{k: v for x in OTHERS for k, v in x.LIMITS.items()}}
BLOCKS = {**BLOCKS, **{k: v for x in OTHERS for k, v in x.BLOCKS.items()}}


# Numbers of formulas that predict times, and tables of tiles that these compare: their tests are beside the formulas.
PREDICTIONS = (
    "cost_model.machines", "cost_model.op_time", "plans.attention.sizes", "plans.attention.gpu_tiles", "plans.gpu_conv",
    "plans.attention.gpu_decode", "plans.gpu_matmul_tiles",
)  # fmt: skip
ASKED_BY_THEM = {
    "memory_bound", "placed_ns", "short_extent", "widened_in_tiles", "widened_percent", "widened_runs",
}  # fmt: skip
FOUND = all_rows()
DECIDING = {f.name: f.row for f in FOUND if f.module not in PREDICTIONS and f.name not in ASKED_BY_THEM}
WITH_CASES = {f.name: f.row for f in FOUND if f.name in {*LIMITS, *BLOCKS, *ESTIMATES}} | DECIDING
NAMES = {id(row): name for name, row in WITH_CASES.items()}


@pytest.fixture
def answers(monkeypatch):
    """The answers of all decisions, by row."""
    seen = {}
    holds = Limit.holds

    def record(self, size):
        answer = holds(self, size)
        seen.setdefault(NAMES.get(id(self)), set()).add(answer)
        return answer

    monkeypatch.setattr(Limit, "holds", record)
    return seen


def lowered(case):
    """The kernels of a case, verified."""
    (target,) = resolve_targets(case.target)
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


def test_each_threshold_has_a_unit():
    assert [f"{found.module}: {found.name}" for found in FOUND if not found.row.unit] == []


def test_names_of_thresholds_are_unique():
    names = [found.name for found in FOUND if found.module not in PREDICTIONS]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_each_limit_has_test_cases():
    missing = sorted({name for name, row in DECIDING.items() if isinstance(row, Limit)} - set(LIMITS))
    assert not missing, f"add cases to LIMITS in tests/support/cost_cases.py: {missing}"
    assert all(isinstance(WITH_CASES[name], Limit) for name in LIMITS)


@pytest.mark.parametrize("name", LIMITS)
def test_each_limit_decides_both_ways(answers, name):
    for each, answer in zip(LIMITS[name], (True, False), strict=True):
        answers.clear()
        lowered(each)
        assert answer in answers.get(name, ()), f"{name} was never {answer}, only {answers.get(name)}"


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("name", [n for n, cases in LIMITS.items() if cases[0].target != GPU])
def test_both_sides_of_each_limit_match_xla(name, side):
    run(LIMITS[name][side])


def test_each_block_size_has_test_cases():
    missing = sorted({name for name, row in DECIDING.items() if isinstance(row, BlockSize)} - set(BLOCKS))
    assert not missing, f"add cases to BLOCKS in tests/support/cost_cases.py: {missing}"
    assert all(isinstance(WITH_CASES[name], BlockSize) for name in BLOCKS)


@pytest.mark.parametrize("name", BLOCKS)
def test_sizes_next_to_each_block_size_match_xla(name):
    """Below it, at it, and no multiple of it."""
    for case in BLOCKS[name]:
        lowered(case) if case.target in (GPU, MATRIX) or "aarch64" in case.target else run(case)


def prices(case):
    variant = lowered(case)
    return [(print_kernel(k), variant.costs.of(k).ns, variant.costs.grain(k)) for k in variant.kernels]


@pytest.mark.parametrize("name", ESTIMATES)
def test_each_estimate_changes_the_cost(name):
    row = WITH_CASES[name]
    before = prices(ESTIMATES[name])
    value = row.value
    try:
        object.__setattr__(row, "default", 4 * value)
        assert prices(ESTIMATES[name]) != before
    finally:
        object.__setattr__(row, "default", value)
