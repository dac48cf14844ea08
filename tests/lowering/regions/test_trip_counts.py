"""How often loops turn, as far as it can be read off, and what is decided by it."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from aotc.frontend.importer import import_model
from aotc.ir.tensor_ir import walk
from aotc.lowering.analysis.trip_counts import trip_count
from aotc.lowering.lower import lower
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.targets import resolve
from aotc.vmfb.commands import all_graphs, read_commands

pytestmark = pytest.mark.ir
OPTIONS = Options(target="cpu:x86-64-v3")
X = jax.ShapeDtypeStruct((8,), "float32")


def imported(function, *types):
    return import_model(jax.jit(function).lower(*types).as_text(), OPTIONS)


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
    "away": (loop(0, 5, -1), None),
    "stands": (loop(0, 5, 0), None),
    "data": (lambda x: lax.while_loop(lambda c: c[0] < 3, jnp.sin, x), None),
    "doubles": (lambda x: lax.while_loop(lambda c: c[0] < 9, lambda c: (c[0] * 2, c[1] + 1), (1, x))[1], None),
    "argument": (lambda x: lax.fori_loop(0, x.astype(int)[0], lambda i, c: c + 1, x), None),
}


@pytest.mark.parametrize("name", CASES)
def test_turns_before_and_after_fusion(name):
    function, wanted = CASES[name]
    module = imported(function, X)
    assert counts(module) == [wanted]
    assert counts(run_passes(module, OPTIONS)) == [wanted]


@pytest.mark.parametrize(("turns", "serial"), [(2, True), (5000, False)])
def test_two_long_loops_share_the_threads_and_two_short_ones_do_not(turns, serial):
    """Each is one kernel; with turns that are guessed both programs would be the same."""

    def function(x, y):
        return [lax.fori_loop(0, turns, lambda i, c: c * 0.5 + i, v) for v in (x, y)]

    (target,) = resolve(OPTIONS.target)
    variant = lower(run_passes(imported(function, X, X), OPTIONS), target, OPTIONS)
    (buffer,) = variant.command_buffers
    (graph,) = all_graphs(read_commands(buffer.code))
    assert len(graph.commands) == 2
    assert graph.serial == serial
