"""The two halves of a function with bound arguments compute what it computed."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.growth import check_linear

from aotc.ir.dims.algebra import sym
from aotc.ir.semantics.run import interpret
from aotc.ir.semantics.verify import verify
from aotc.ir.tensor.ir import Function, Module, Op, Region, TensorType, Value
from aotc.ir.tensor.text import parse_module
from aotc.lowering.analysis.constant_values import is_computable_from_weights
from aotc.lowering.passes.split_weights import split_weights
from aotc.options import Options

pytestmark = pytest.mark.ir

CASES = sorted((Path(__file__).parents[1] / "golden" / "passes" / "split_weights").glob("*.txt"))
OPTIONS = Options(target="cpu:x86-64-v4")


def run(function, *arrays):
    return interpret(Module({"main": replace(function, name="main")}), *arrays)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.stem)
def test_prepare_and_call_together_match_the_function(case):
    module = parse_module(case.read_text().split("\n", 1)[1].split("====")[0])
    made = split_weights(module, OPTIONS).functions
    prepare = next((f for f in made.values() if "prepares" in f.attrs), None)
    rng = np.random.default_rng(0)
    for name, whole in module.functions.items():
        if "weights" not in whole.attrs or prepare is None:
            assert name in made or prepare is None
            continue
        shapes = [[d if isinstance(d, int) else 3 for d in p.type.shape] for p in whole.body.params]
        arrays = [rng.normal(size=s).astype(np.float32) for s in shapes]
        values = [*arrays, *run(prepare, *(arrays[n] for n in prepare.attrs["weights"]))]
        got = run(made[name], *(values[n] for n in made[name].attrs["takes"]))
        for x, y in zip(got, run(whole, *arrays), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-6)


def test_equal_weights_are_prepared_once():
    """One that is read transposed twice, and what is in no result twice."""
    t = TensorType("f32", (4, 4))
    x, w, a, b, y, z = (Value(name, t) for name in "xwabyz")
    iteration = {"perm": (1, 0)}
    ops = (Op("transpose", (w,), (a,), iteration), Op("transpose", (w,), (b,), iteration), Op("add", (a, x), (y,)),
           Op("mul", (b, y), (z,)))  # fmt: skip
    whole = Function("main_bound", Region((x, w), ops, (z, b)), True, {"binds": "main", "weights": (1,)})
    module = split_weights(Module({"main_bound": whole}), OPTIONS)
    assert verify(module) == []
    assert len(module.functions["main_prepare"].body.results) == 1
    assert module.functions["main_bound"].attrs["takes"] == (0, 2)


def test_values_that_depend_on_a_call_are_not_prepared():
    """An effect, a function of the user's, a size that only a call knows, a value of the call's."""
    t = TensorType("f32", (4,))
    w, x, out = Value("w", t), Value("x", t), Value("out", t)
    dim = Value("d", TensorType("i32"))
    known = Op("constant", (), (Value("c", t),), {"value": np.ones(4, np.float32)})
    size = Op("dim", (), (dim,), {"expr": sym("n") + 1})
    definitions = {known.result: known, dim: size}
    assert is_computable_from_weights(Op("exp", (w,), (out,)), {w}, definitions)
    assert is_computable_from_weights(Op("add", (w, known.result), (out,)), {w}, definitions)
    assert not is_computable_from_weights(Op("exp", (known.result,), (out,)), {w}, definitions)
    assert not is_computable_from_weights(Op("add", (w, x), (out,)), {w}, definitions)
    assert not is_computable_from_weights(Op("assert", (w,), (), {"message": ""}), {w}, definitions)
    assert not is_computable_from_weights(Op("custom_call", (w,), (out,), {"target": "f"}), {w}, definitions)
    start = {"start": (sym("n"),), "limit": (sym("n") + 2,), "stride": (1,)}
    assert not is_computable_from_weights(Op("slice", (w,), (out,), start), {w}, definitions)
    grown = Value("g", TensorType("f32", (sym("n"), 4)))
    assert not is_computable_from_weights(Op("broadcast", (w,), (grown,), {"dims": (1,)}), {w}, definitions)
    assert not is_computable_from_weights(Op("dynamic_slice", (w, dim), (out,), {"sizes": (4,)}), {w}, definitions)


def _chain(steps):
    t = TensorType("f32", (4, 4))
    x, w = Value("x", t), Value("w", t)
    last, ops = w, []
    for n in range(3 * steps):
        ops.append(Op("exp" if n % 2 else "sin", (last,), (Value(f"v{n}", t),)))
        last = ops[-1].result
    ops.append(Op("add", (x, last), (Value("y", t),)))
    attrs = {"binds": "main", "weights": (1,)}
    return Module({"main_bound": Function("main_bound", Region((x, w), tuple(ops), (ops[-1].result,)), True, attrs)})


def test_split_weights_time_is_linear():
    check_linear(_chain, lambda module: split_weights(module, OPTIONS), 600)
