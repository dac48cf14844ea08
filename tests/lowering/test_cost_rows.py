"""Every row of the cost table decides something: a case on either side, compared with XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import cost_cases_gpu
from support.cost_cases import (
    BLOCKS,
    COLUMNS,
    ESTIMATES,
    GPU,
    LIMITS,
    MATRIX,
    PRODUCT,
    V3,
    V4,
    case,
    pair,
    sizes,
)
from support.differential import close

import aotc
from aotc.frontend.importer import import_model
from aotc.ir.loop_printer import print_kernel
from aotc.ir.loop_verify import verify_kernel
from aotc.lowering.analysis import cost
from aotc.lowering.analysis.costs import (
    table_algorithms,
    table_attention,
    table_columns,
    table_gpu,
    table_gpu_memory,
    table_loops,
    table_products,
    work,
)
from aotc.lowering.analysis.costs.row import BlockSize, Limit
from aotc.lowering.analysis.host.host_only import imply_host
from aotc.lowering.lower import lower
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.targets import resolve

pytestmark = pytest.mark.cpu
# Sums along few or many columns.
TURNED = lambda x, w: x @ w.T
FEW_COLUMNS = [(2, 257, 300), (2, 300, 1)]
FEW_ROWS = [
    *sizes(PRODUCT, lambda m: [(m, 301), (301, 256)], 1, 3, 8),
    *sizes(PRODUCT, lambda m: [(m, 300), (300, 257)], 2, 5, target=V3),
    *sizes(PRODUCT, lambda m: [(m, 301), (301, 256)], 1, 4, dtype="bfloat16"),
]
BATCH = sizes(PRODUCT, lambda m: [(3, m, 300), (3, 300, 300)], 1, 4)
FEW_VECTORS = [
    *sizes(PRODUCT, lambda n: [(259, 300), (300, n)], 1, 3, 8),
    *sizes(TURNED, lambda m: [(m, 301), (258, 301)], 2, 5, 7),
    *sizes(PRODUCT, lambda n: [(259, 300), (300, n)], 1, 4, dtype="float16"),
    case(PRODUCT, *FEW_COLUMNS),
]
SUMS = sizes(COLUMNS, lambda n: [(600, n)], 128, 1000, 9001)


def gelu_of_columns(w, x, b):
    """Return what follows a product in its kernel."""
    return jax.nn.gelu(w @ x + b[:, None])


COLUMN_LIMITS = {
    "thin_rows": pair(PRODUCT, [(8, 512), (512, 160)], [(9, 512), (512, 160)]),
    "many_thin_rows": pair(PRODUCT, [(31, 512), (512, 4)], [(400, 512), (512, 4)]),
    "short_thin_terms": pair(PRODUCT, [(400, 100), (100, 4)], [(400, 200), (200, 4)]),
    "narrow_cpu_columns": pair(COLUMNS, (300, 100), (300, 600)),
    "light_column": (case(COLUMNS, (300, 600)), case(lambda x: jnp.sin(x).sum(0), (300, 600))),
    "shared_rows": pair(lambda x, w: (x[:, :, None] * w[None]).sum(1), [(4, 70), (70, 200)], [(9, 70), (70, 200)]),
    "long_pieces": pair(COLUMNS, (300, 5000), (300, 9000)),
    "few_block_rows": pair(lambda w, x: (w * x).sum(1), [(3, 300), (3, 300)], [(9, 300), (300,)]),
    "short_block_row": pair(lambda w, x: (w * x).sum(1), [(40, 100), (100,)], [(40, 300), (300,)]),
}
DENSE = case(gelu_of_columns, (259, 300), (300, 4), (259,))
COLUMN_BLOCKS = {
    "accumulator_percent": [*FEW_ROWS, *BATCH],
    "column_terms": FEW_ROWS,
    "column_items": BATCH,
    "column_item_elements": BATCH,
    "block_rows": [*FEW_VECTORS, DENSE],
    "row_block_elements": FEW_VECTORS,
    "part_elements": SUMS,
    "column_part_terms": SUMS,
    "unknown_columns": sizes(COLUMNS, lambda n: [(40, n)], 500, 512, 1030, spec="_, n"),
}

LIMITS = {**LIMITS, **COLUMN_LIMITS, **cost_cases_gpu.LIMITS}
BLOCKS = {**BLOCKS, **COLUMN_BLOCKS, **cost_cases_gpu.BLOCKS}


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
    limit = case.memory_limit
    options = Options(target=case.target, opt_level=case.level, memory_limit=limit, verify_each=True)
    module, target, options = imply_host(import_model(case.exported()), target, [target], options)
    variant = lower(run_passes(module, options), target, options)
    for kernel in variant.kernels:
        verify_kernel(kernel)
    return variant


def run(case):
    """Compare with XLA on this machine, whatever CPU it has."""
    arguments = case.arguments()
    target = "cpu" if case.target == V4 else case.target
    data = aotc.compile(case.exported(), opt_level=case.level, target=target, memory_limit=case.memory_limit)
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
    for each in BLOCKS[name]:
        lowered(each) if each.target in (GPU, MATRIX) else run(each)


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
