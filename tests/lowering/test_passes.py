"""Golden cases of the tensor-level passes: text in, text out, and the same values before and after.

A case is ``tests/golden/passes/<pass>/<case>.txt``: a line that says what it shows,
the module, ``====``, the module after the pass. A case named ``keeps_...`` must
not change. ``--update`` rewrites the second part.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.growth import check_linear
from support.rank_interpreter import interpret_ranks

from aotc.ir.dims.symbols import evaluate, symbols
from aotc.ir.semantics.run import interpret
from aotc.ir.semantics.verify import verify
from aotc.ir.tensor.ir import Function, Module, Op, Region, TensorType, Value
from aotc.ir.tensor.text import parse_module, print_module
from aotc.options import Options
from aotc.pipeline import PASSES
from aotc.vmfb.dtypes import kind_of, to_numpy
from aotc.vmfb.ranks.layout import mesh_of, whole_shape

pytestmark = pytest.mark.ir

TARGET = "cpu:x86-64-v4"  # tiles are as wide as the target's vectors
# Of passes for others.
TARGETS = {"parallelize_gpu": "cuda:sm_90", "unroll_loops": "cuda:sm_90", "split_attention": "cuda:sm_80"}
TARGETS |= {"narrow_products/of_a_gpu": "cuda:sm_90", "decompose_fft/real_signals_on_gpus": "cuda:sm_90"}
TARGETS |= {"hoist_products": "cuda:sm_90", "mark_concurrent": "cuda:sm_90"}
PAIRS = ("pairs_of_bf16", "pairs_of_channels", "odd_channels_are_widened", "signs_of_bytes")  # of a CPU that has them
TARGETS |= {f"pack_contractions/{case}": "cpu:x86-64-v4-bf16" for case in PAIRS}
MATRICES = ("matrix_of_bf16", "matrix_of_few_rows")  # of one with a matrix unit
TARGETS |= {f"pack_contractions/{case}": "cpu:x86-64-amx" for case in MATRICES}
STEPS = {step.run.__name__: step.run for step in PASSES}
GIVEN = {"specialize": {"specialize": {"b": (2, 3)}}, "bind_weights": {"bind": ("w",)}}
GIVEN |= {"set_precision": {"matmul_precision": "bf16"}}
GIVEN |= {"quantize_weights": {"quantize_weights": "int8"}}
GIVEN |= {f"quantize_weights/{case}": {"quantize_weights": "int4:8"} for case in ("runs_of_terms", "runs_on_a_gpu")}
TARGETS |= {f"quantize_weights/{case}": "cuda:sm_90" for case in ("scales_of_columns_on_a_gpu", "runs_on_a_gpu")}
SMALLER = {  # limits, for constants that a text can hold
    "quantize_weights": {"QUANTIZED_BYTES": 64}, "compute_constants": {"FOLDED_BYTES": 8},
}  # fmt: skip
GIVEN |= {f"set_precision/{case}": {"matmul_precision": way} for case, way in (
    ("three_products", "bf16x3"), ("highest", "highest"),
)}  # fmt: skip
TOLERANCES = {"quantize_weights/runs_of_terms": 0.2, "quantize_weights/runs_on_a_gpu": 0.2}
TOLERANCES |= {"set_precision": 2e-2, "set_precision/three_products": 2e-5}  # of what rounds, as parts of the largest
FOLDER = Path(__file__).parents[1] / "golden" / "passes"
CASES = sorted(FOLDER.glob("*/*.txt"))


def inputs_of(module: Module, seed: int = 0) -> list[np.ndarray]:
    """Return random arguments of ``main``; every symbolic dim is 3."""
    rng = np.random.default_rng(seed)
    arrays = []
    for p in module.functions["main"].body.params:
        shape = [evaluate(d, {s.name: 3 for s in symbols(d)}) for d in p.type.shape]
        integer = kind_of(p.type.dtype) in "iub"
        array = rng.integers(0, 2, shape) if integer else rng.normal(size=shape)
        arrays.append(np.asarray(array).astype(to_numpy(p.type.dtype)))
    return arrays


def results_of(module: Module) -> list[np.ndarray]:
    """Return the results on random arguments; those of all ranks for the program of a rank."""
    main = module.functions["main"]
    if "ranks" not in main.attrs:
        return interpret(module, *inputs_of(module))
    mesh, rng = mesh_of(main.attrs["ranks"]["mesh"]), np.random.default_rng(0)
    shapes = [
        whole_shape(mesh, layout, p.type.shape)
        for p, layout in zip(main.body.params, main.attrs["ranks"]["arguments"], strict=True)
    ]
    arrays = [
        np.asarray(rng.integers(0, 2, shape)).astype(to_numpy(p.type.dtype))
        for p, shape in zip(main.body.params, shapes, strict=True)
    ]
    return [x for results in interpret_ranks(module, arrays) for x in results]


def test_every_pass_has_three_golden_cases():
    assert {c.parent.name for c in CASES} == set(STEPS)
    for name in STEPS:
        assert sum(c.parent.name == name for c in CASES) >= 3, name


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.parent.name}/{c.stem}")
def test_passes_match_the_golden_text_and_keep_values(case, update, monkeypatch):
    head, before, after = _sections(case.read_text())
    module = parse_module(before)
    assert verify(module) == []
    name = case.parent.name
    target = TARGETS.get(f"{name}/{case.stem}") or TARGETS.get(name, TARGET)
    given = GIVEN.get(f"{name}/{case.stem}") or GIVEN.get(name, {})
    options = Options(target=target, **given)
    for row, value in SMALLER.get(name, {}).items():
        step = sys.modules[STEPS[name].__module__]
        monkeypatch.setattr(step, row, replace(getattr(step, row), default=value))
    changed = STEPS[name](module, options)
    assert [f.message for f in verify(changed)] == []
    for x, y in zip(results_of(module), results_of(changed), strict=True):
        scale = max(1.0, float(np.abs(x).max())) if x.size else 1.0
        most = TOLERANCES.get(f"{name}/{case.stem}") or TOLERANCES.get(name, 2e-6)
        np.testing.assert_allclose(y, x, rtol=1e-6, atol=most * scale)
    text = print_module(changed, locs=False)
    assert (text == print_module(module, locs=False)) == case.stem.startswith("keeps_")
    if update:
        case.write_text(f"{head}{before}====\n{text}")
    else:
        assert text == after


def _sections(text: str) -> tuple[str, str, str]:
    head, rest = text.split("\n", 1)
    before, after = rest.split("====\n")
    return head + "\n", before, after


def _long_chain(steps):
    t = TensorType("f32", (4, 4))
    x, ops = Value("x", t), []
    one = Op("constant", (), (Value("c", t),), {"value": np.ones((), np.float32)})
    last = x
    for n in range(steps):
        a, b, c = (Value(f"v{3 * n + k}", t) for k in range(3))
        ops += [
            Op("transpose", (last,), (a,), {"perm": (1, 0)}),
            Op("mul", (a, one.result), (b,)),
            Op("sub", (b, x), (c,)),
        ]
        last = c
    return Module({"main": Function("main", Region((x,), (one, *ops), (last,)), public=True)})


@pytest.mark.parametrize("name", STEPS)
def test_the_time_of_each_pass_is_linear(name):
    """Up to 3,000 ops in a chain: neither recursion nor quadratic time."""
    check_linear(_long_chain, lambda module: STEPS[name](module, Options()), 600)
