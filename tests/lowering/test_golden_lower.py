"""Golden cases of the lowering of regions: tensor IR in, the kernel's text out, and the same values from both.

A case is ``tests/golden/lower/<kind>/<case>.txt``: a line that says what it shows, a module with the region ``@k``,
``====``, its kernel. The kernel runs on NumPy, as the loop IR means it. ``--update`` rewrites the second part.
"""

from __future__ import annotations

import numpy as np
import pytest
from support.golden import FOLDER, arguments, close, sections, sizes_of

from aotc.ir.loop.printer import print_kernel
from aotc.ir.loop.run import run_kernel
from aotc.ir.loop.verify import verify_kernel
from aotc.ir.opset import OPS
from aotc.ir.semantics.run import interpret
from aotc.ir.semantics.verify import verify
from aotc.ir.tensor.ir import Function
from aotc.ir.tensor.text import parse_module
from aotc.lowering.analysis.fft_tables import twiddles
from aotc.lowering.analysis.in_place import count_overwritten_parameters
from aotc.lowering.plans.plan_region import PLANNERS, PLANNERS_OF_OPS
from aotc.lowering.plans.region_plan import parse_plan
from aotc.lowering.regions.lower_region import lower_region
from aotc.targets import resolve_targets
from aotc.vmfb.dtypes import to_numpy

pytestmark = pytest.mark.ir

CASES = sorted((FOLDER / "lower").glob("*/*.txt"))
ELSEWHERE = {"custom_call"}  # its function is the user's: tests/vmfb/test_custom_calls.py
CPU, CUDA = (resolve_targets(name)[0] for name in ("cpu:x86-64-v4", "cuda:sm_90"))
OTHER_CPUS = {
    "pairs_": resolve_targets("cpu:x86-64-v4-bf16")[0],
    "matrix_": resolve_targets("cpu:x86-64-amx")[0],
}  # by cases' names


def positive_definite(op, arrays):
    x = arrays[0]
    return [x @ x.swapaxes(-1, -2) + 4 * np.eye(x.shape[-1], dtype=x.dtype)]


def well_conditioned(op, arrays):
    return [a + 4 * np.eye(a.shape[-1], dtype=a.dtype) if a.shape[-1] == a.shape[-2] else a for a in arrays]


def sparse_rows(op, arrays):
    data, columns, starts, dense = arrays
    ends = np.linspace(0, len(data), len(starts)).astype(starts.dtype)
    return [data, columns % len(dense), ends, dense]


def table_of_roots(op, arrays):
    if op.attrs["real"]:  # a call's meaning asks for no table
        return arrays
    table = twiddles(op.attrs["radices"], op.attrs["inverse"])
    return [arrays[0], np.asarray(table).astype(arrays[1].dtype)]


def neutral_start(op, arrays):
    """The order of a scan says nothing of how often its first value counts."""
    start = {"add": 0, "mul": 1, "max": -1e30, "min": 1e30}[op.regions[0].ops[0].name]
    return [arrays[0], np.full_like(arrays[1], start)]


def sorted_runs(op, arrays):
    keys, *others = arrays
    done = op.attrs["done"]
    if done == 1:
        return arrays
    return [np.concatenate([np.sort(keys[at : at + done]) for at in range(0, len(keys), done)]), *others]


def summed_counts(op, arrays):
    """The keys are the elements of the first array."""
    (counts,) = OPS["digit_counts"].reference(arrays[:-1], op.attrs, [lambda *xs: xs[:1]], ())
    return [*arrays[:-1], np.cumsum(counts, -1, dtype=np.int32)]


PREPARE = {
    "cholesky": positive_definite,
    "digit_sort": summed_counts,
    "csr_dot": sparse_rows,
    "dft": table_of_roots,
    "reduce_window": neutral_start,
    "sort_runs": sorted_runs,
    "triangular_solve": well_conditioned,
}


def run(function: Function, kernel, arrays):
    """Return the results of a region from its kernel; what it updates in place holds the operands."""
    dims = sizes_of([p.type for p in function.body.params])
    shared = count_overwritten_parameters(function)
    outputs = []
    for n, v in enumerate(function.body.results):
        shape = tuple(d if isinstance(d, int) else dims[str(d)] for d in v.type.shape)
        outputs.append(arrays[n].copy() if n < shared else np.full(shape, 77, to_numpy(v.type.dtype)))
    run_kernel(kernel, [*arrays[shared:], *outputs], dims)
    return outputs


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.parent.name}/{c.stem}")
def test_lowered_kernels_match_the_golden_text(case, update):
    head, before, after = sections(case)
    module = parse_module(before)
    assert verify(module) == []
    function = module.functions["k"]
    cpu = next((target for name, target in OTHER_CPUS.items() if case.stem.startswith(name)), CPU)
    target = CUDA if case.parent.name.endswith("_cuda") else cpu
    kernel = lower_region(function, target)
    assert verify_kernel(kernel) == []
    op, arrays = function.body.ops[-1], arguments([p.type for p in function.body.params])
    if function.attrs["kind"] == "single" and op.name in PREPARE:
        arrays = PREPARE[op.name](op, arrays)
    rounding = 2**-5 if case.stem.startswith("short_floats") else 0.0
    close(run(function, kernel, arrays), interpret(module, *arrays, function="k"), rounding)
    text = print_kernel(kernel)
    if kernel.plan:
        again = lower_region(function, target, parse_plan(kernel.plan))
        assert print_kernel(again) == text  # a kernel with NaN differs from itself
        text = f"# plan: {kernel.plan}\n{text}"
    if update:
        case.write_text(f"{head}{before}====\n{text}")
    else:
        assert text == after


def test_every_region_kind_has_three_golden_cases():
    """Three for each kind of region, those of a lowering for CUDA alone apart, and one for each op with planners."""
    folders = [c.parent.name for c in CASES]
    kinds = {kind if way is PLANNERS[kind, "cpu"] else f"{kind}_{of}" for (kind, of), way in PLANNERS.items()}
    assert all(folders.count(name) >= 3 for name in kinds | {*folders})
    functions = [parse_module(sections(c)[1]).functions["k"] for c in CASES]
    ops = {f.body.ops[-1].name for f in functions if f.attrs["kind"] == "single"}
    assert ops == {name for name, _ in PLANNERS_OF_OPS} - ELSEWHERE
