"""How often loops turn, as far as it can be read off, and what is decided by it."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from aotc.frontend.importer import import_model
from aotc.ir.program.ir import Loop
from aotc.ir.program.ir import walk as walk_steps
from aotc.ir.program.text import parse_program, print_program
from aotc.ir.tensor.ir import walk
from aotc.lowering.analysis.constant_values import constants_in
from aotc.lowering.analysis.trip_counts import trip_count
from aotc.lowering.cost_model.model import Costs
from aotc.lowering.lower import lower
from aotc.lowering.program.graphs import command_nanoseconds
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.targets import resolve_targets
from aotc.vmfb.abi import Control, Graph
from aotc.vmfb.commands import all_graphs, decode_commands

pytestmark = pytest.mark.ir
OPTIONS = Options(target="cpu:x86-64-v3")
X = jax.ShapeDtypeStruct((8,), "float32")


def imported(function, *types):
    return import_model(jax.jit(function).lower(*types).as_text())


def counts(module):
    """How often each loop of a module turns."""
    body = module.functions["main"].body
    constants = {op.result: op for op in walk(body) if op.name == "constant"}
    return [trip_count(op, constants, module.functions) for op in body.ops if op.name == "while"]


def loop(begin, end, step, goes=lambda i, n: i < n):
    """A loop whose counter goes from ``begin`` by ``step`` while ``goes``."""
    return lambda x: lax.while_loop(lambda c: goes(c[0], end), lambda c: (c[0] + step, jnp.sin(c[1])), (begin, x))[1]


CASES = {
    "fori": (lambda x: lax.fori_loop(0, 1000, lambda i, c: jnp.sin(c) + i, x), 1000),
    "scan": (lambda x: lax.scan(lambda c, y: (c * y, c + 1), x[0], jnp.arange(50.0)), 50),
    "steps": (loop(3, 20, 4), 5),
    "at most": (loop(0, 12, 4, lambda i, n: i <= n), 4),
    "down": (loop(10, 0, -3, lambda i, n: i > n), 4),
    "turned": (loop(0, 7, 1, lambda i, n: n >= i), 8),
    "until": (loop(0, 12, 4, lambda i, n: i != n), 3),
    "past": (loop(0, 13, 4, lambda i, n: i != n), None),
    "none": (loop(5, 5, 1), 0),
    "begins anew": (loop(jnp.int8(120), jnp.int8(127), jnp.int8(3)), None),
    "ends at its type's last": (loop(jnp.int8(121), jnp.int8(127), jnp.int8(3)), 2),
    "away": (loop(0, 5, -1), None),
    "stands": (loop(0, 5, 0), None),
    "data": (lambda x: lax.while_loop(lambda c: c[0] < 3, jnp.sin, x), None),
    "doubles": (lambda x: lax.while_loop(lambda c: c[0] < 9, lambda c: (c[0] * 2, c[1] + 1), (1, x))[1], None),
    "argument": (lambda x: lax.fori_loop(0, x.astype(int)[0], lambda i, c: c + 1, x), None),
}


@pytest.mark.parametrize("name", CASES)
def test_trip_counts_are_found_before_and_after_fusion(name):
    function, wanted = CASES[name]
    module = imported(function, X)
    assert counts(module) == [wanted]
    assert counts(run_passes(module, OPTIONS)) == [wanted]


@pytest.mark.parametrize(("turns", "serial"), [(2, True), (5000, False)])
def test_two_long_loops_run_in_parallel_and_two_short_ones_do_not(turns, serial):
    """Each is one kernel; with turns that are guessed both programs would be the same."""

    def function(x, y):
        return [lax.fori_loop(0, turns, lambda i, c: c * 0.5 + i, v) for v in (x, y)]

    (target,) = resolve_targets(OPTIONS.target)
    variant = lower(run_passes(imported(function, X, X), OPTIONS), target, OPTIONS)
    (buffer,) = variant.command_buffers
    (graph,) = all_graphs(decode_commands(buffer.code))
    assert len(graph.commands) == 2
    assert graph.serial == serial


def program(turns):
    """Two loops of several kernels that turn so often, or as often as an argument says."""

    def function(x, n):
        last = n if turns is None else turns
        return [lax.fori_loop(0, last, lambda i, c: jnp.tanh(c @ x), v) for v in (x, x * 2)]

    square = jax.ShapeDtypeStruct((64, 64), "float32")
    (target,) = resolve_targets(OPTIONS.target)
    module = imported(function, square, jax.ShapeDtypeStruct((), "int32"))
    return module, lower(run_passes(module, OPTIONS), target, OPTIONS), Costs(target)


@pytest.mark.parametrize(("turns", "iterations", "counted"), [(3, 3, 3), (1000, 500, 500), (None, None, 16)])
def test_loop_times_scale_with_their_trip_count(turns, iterations, counted):
    """The loop of 1000 iterations is unrolled twice: its state changes buffers in each."""
    _, variant, costs = program(turns)
    steps = variant.steps["main"].steps
    loops = [step for step in steps if isinstance(step, Loop)]
    assert [step.iterations for step in loops] == [iterations] * 2
    for step in loops:
        inside = sum(command_nanoseconds([*step.cond, *step.body], costs))
        assert command_nanoseconds([step], costs) == pytest.approx([counted * inside])
    assert variant.command_buffers[0].iterations == [iterations] * 2
    assert [step.iterations for step in walk_steps(again(variant)) if isinstance(step, Loop)] == [iterations] * 2


def again(variant):
    """The steps, written and read."""
    steps = variant.steps["main"]
    return parse_program(print_program(steps), steps.kernels).steps


@pytest.mark.parametrize(("turns", "counted"), [(3, 3), (1000, 1000), (None, 16)])
def test_while_op_times_scale_with_their_trip_count(turns, counted):
    module, _, costs = program(turns)
    body = module.functions["main"].body
    op = next(op for op in body.ops if op.name == "while")
    inside = sum(costs.of_op(one, costs.target) for region in op.regions for one in region.ops)
    assert costs.of_op(op, costs.target, constants=constants_in(body)) == pytest.approx(counted * inside)


@pytest.mark.parametrize(("turns", "together"), [(1, False), (1000, True)])
def test_loops_with_enough_iterations_overlap(turns, together):
    _, variant, _ = program(turns)
    nodes = decode_commands(variant.command_buffers[0].code)
    assert any(isinstance(c, Control) for node in nodes if isinstance(node, Graph) for c in node.commands) == together
