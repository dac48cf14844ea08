"""Placement by the cost model: independent work is shared, a chain stays together, large arguments stay."""

from pathlib import Path

import numpy as np
import pytest

import aotc
from aotc.diagnostics import CompileError
from aotc.frontend.importer import import_model
from aotc.ir.tensor.ir import captured_values, walk
from aotc.lowering.cost_model.model import Costs
from aotc.lowering.cost_model.op_time import move_nanoseconds, op_nanoseconds, size_in_bytes
from aotc.lowering.placement.heft import heft
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.targets import TARGETS, resolve_targets
from aotc.tools.explain.affinity import explain_affinity

pytestmark = pytest.mark.ir

T = "tensor<512x512xf32>"
(HOST,) = resolve_targets("cpu")
GPU = TARGETS["cuda:sm_90a"]
COSTS = Costs(HOST)
CPUS = {"d0": "cpu", "d1": "cpu"}


def product(name, x, y):
    return f"{name} = stablehlo.dot_general {x}, {y}, contracting_dims = [1] x [0] : ({T}, {T}) -> {T}"


def function(body, result, affinity=("", "")):
    a, b = (f' {{aotc.affinity = "{name}"}}' if name else "" for name in affinity)
    return f"func.func public @main(%a: {T}{a}, %b: {T}{b}) -> {T} {{ {body} return {result} : {T} }}"


DIAMOND = function(
    "\n".join(
        [
            product("%0", "%a", "%a"),
            product("%1", "%b", "%b"),
            f"%2 = stablehlo.add %0, %1 : {T}\n",
        ]
    ),
    "%2",
)
_STEPS = product("%0", "%a", "%b"), product("%1", "%0", "%b"), product("%2", "%1", "%b")
CHAIN = function("\n".join(_STEPS) + "\n", "%2")
LOOPS = function(
    "\n".join(
        f"""%i{n} = stablehlo.constant dense<0> : tensor<i32>
        %n{n} = stablehlo.constant dense<3> : tensor<i32>
        %one{n} = stablehlo.constant dense<1> : tensor<i32>
        %r{n}:2 = stablehlo.while(%k{n} = %i{n}, %y{n} = {x}) : tensor<i32>, {T}
        cond {{ %c{n} = stablehlo.compare LT, %k{n}, %n{n} : (tensor<i32>, tensor<i32>) -> tensor<i1>
          stablehlo.return %c{n} : tensor<i1> }}
        do {{ %k1{n} = stablehlo.add %k{n}, %one{n} : tensor<i32>
          {product(f"%p{n}", f"%y{n}", f"%y{n}")}
          stablehlo.return %k1{n}, %p{n} : tensor<i32>, {T} }}"""
        for n, x in enumerate(("%a", "%b"))
    )
    + f"\n%2 = stablehlo.add %r0#1, %r1#1 : {T}\n",
    "%2",
)


def places(text, devices=CPUS, name="dot_general"):
    """The device of each product."""
    options = Options(devices=devices, place="auto", stop_after="assign-devices", verify_each=True)
    module = run_passes(import_model(text), options)
    return [op.attrs["device"] for op in walk(module.functions["main"].body) if op.name == name]


def test_independent_matmuls_run_on_different_devices():
    assert sorted(places(DIAMOND)) == ["d0", "d1"]


def test_independent_loops_run_on_different_devices():
    assert sorted(places(LOOPS)) == ["d0", "d1"]


def test_a_chain_runs_on_one_device():
    assert len(set(places(CHAIN))) == 1


def test_an_affinity_of_a_large_argument_decides_the_device():
    """A large argument stays where it is if moving it takes longer than to wait."""
    devices = {"host": HOST, "gpu": GPU}
    (function,) = import_model(function_of_rows()).functions.values()
    (match,) = heft(function, devices, COSTS).values()
    assert match.device == "host"
    (free,) = import_model(function_of_rows(affinity="")).functions.values()
    assert [m.device for m in heft(free, devices, COSTS).values()] == ["gpu"]


def makespan(ops, device_of, costs=COSTS):
    """When the last of ``ops`` ends if each device runs its own in order; what one reads of another is moved first."""
    busy, ready, home = {}, {}, {}
    for number, op in enumerate(ops):
        device = device_of(number, op)
        arrivals = [0.0]
        for v in (*op.operands, *(v for r in op.regions for v in captured_values(r))):
            moved = home.get(v, device) != device
            arrivals.append(ready.get(v, 0.0) + (move_nanoseconds(size_in_bytes(v), "cpu", "cpu") if moved else 0.0))
        end = max(busy.get(device, 0.0), *arrivals) + costs.of_op(op, HOST, device)
        busy[device] = end
        ready.update(dict.fromkeys(op.results, end))
        home.update(dict.fromkeys(op.results, device))
    return max(busy.values())


def test_placing_by_cost_beats_round_robin():
    """Two products and 64 short chains: in turn, both products come to one device."""
    text = (Path(__file__).parents[1] / "support" / "programs" / "diamond.mlir").read_text()
    options = Options(devices=CPUS, place="auto", stop_after="assign-devices", default_device="d0", verify_each=True)
    imported = import_model(text)
    (name,) = imported.functions
    ops = run_passes(imported, options).functions[name].body.ops
    by_cost = makespan([op for op in ops if op.name != "transfer"], lambda _, op: op.attrs["device"])
    before = imported.functions[name].body.ops
    in_turn = makespan(before, lambda number, _: f"d{number % 2}")
    alone = makespan(before, lambda number, _: "d0")
    assert by_cost < 0.7 * in_turn
    assert by_cost < 0.7 * alone


def function_of_rows(affinity=' {aotc.affinity = "host"}'):
    """A sum of 64 MB, which is far less work than to move them."""
    return f"""func.func public @main(%x: tensor<16777216xf32>{affinity}) -> tensor<f32> {{
      %0 = stablehlo.constant dense<0.0> : tensor<f32>
      %1 = stablehlo.reduce(%x init: %0) applies stablehlo.add across dimensions = [0]
        : (tensor<16777216xf32>, tensor<f32>) -> tensor<f32>
      return %1 : tensor<f32> }}"""


def test_placement_reasons_state_times():
    rows = [row for row in explain_affinity(DIAMOND, devices=CPUS, place="auto").rows if row.name == "dot_general"]
    assert all(row.reason.startswith("ends first, after ") for row in rows)


def test_op_and_transfer_times_grow_with_sizes():
    small, large = (import_model(CHAIN.replace("512", str(n))).functions["main"].body.ops[0] for n in (64, 512))
    for target in (HOST, GPU):
        assert op_nanoseconds(small, target) < op_nanoseconds(large, target)
    assert move_nanoseconds(1 << 30, "cpu", "cpu") < move_nanoseconds(1 << 20, "cuda", "cuda")
    assert move_nanoseconds(1 << 20, "cuda", "cuda") < move_nanoseconds(1 << 20, "cpu", "cuda")


def test_an_unknown_place_option_is_refused():
    with pytest.raises(CompileError, match="place is 'best'"):
        aotc.compile(CHAIN, place="best")


@pytest.mark.cpu
@pytest.mark.parametrize("text", [DIAMOND, LOOPS], ids=["diamond", "loops"])
def test_auto_placement_matches_one_device(text):
    rng = np.random.default_rng(0)
    arrays = [(rng.standard_normal((512, 512)) / 32).astype("float32") for _ in range(2)]
    found = aotc.load(aotc.compile(text, devices=CPUS, place="auto", verify_each=True)).invoke("main", *arrays)
    alone = aotc.load(aotc.compile(text)).invoke("main", *arrays)
    np.testing.assert_allclose(found[0], alone[0], rtol=1e-5, atol=1e-6)


def predicted(text, places):
    """When the last op ends, in nanoseconds, if ops run in the program's order on the devices ``places``."""
    ops = [op for op in import_model(text).functions["main"].body.ops if op.name != "constant"]
    ends, homes, busy = {}, {}, dict.fromkeys(CPUS, 0.0)
    for op, place in zip(ops, places, strict=True):
        begin = busy[place]
        for value in op.operands:
            if value in ends:
                far = homes[value] != place
                begin = max(begin, ends[value] + (move_nanoseconds(size_in_bytes(value), "cpu", "cpu") if far else 0.0))
        busy[place] = begin + op_nanoseconds(op, HOST)
        ends.update((value, busy[place]) for value in op.results)
        homes.update((value, place) for value in op.results)
    return max(ends.values())


UNEQUAL = function(
    f"{product('%0', '%a', '%a')} %1 = stablehlo.add %a, %a : {T} {product('%2', '%1', '%a')} "
    f"{product('%3', '%2', '%a')} %4 = stablehlo.add %0, %3 : {T}\n",
    "%4",
)


@pytest.mark.parametrize("text", [DIAMOND, UNEQUAL], ids=["diamond", "unequal"])
def test_heft_is_no_slower_than_round_robin(text):
    """By a simulation of its own; devices in turn may happen to be as good, but not where both products take one."""
    module = run_passes(
        import_model(text), Options(devices=CPUS, place="auto", stop_after="assign-devices", verify_each=True)
    )
    found = [op.attrs["device"] for op in module.functions["main"].body.ops if op.name in ("dot_general", "add")]
    iterations = [list(CPUS)[n % 2] for n in range(len(found))]
    assert predicted(text, found) <= predicted(text, iterations)
    assert predicted(UNEQUAL, ["d0", "d1", "d0", "d1", "d0"]) > predicted(UNEQUAL, ["d0", "d1", "d1", "d1", "d1"])
