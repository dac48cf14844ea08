"""Independent loops and branches run at the same time: proven by their meeting, and compared with XLA."""

import random
import threading
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from support.differential import LEVELS, check, close, normal
from support.programs import programs
from whole.test_fuzz import QUICK
from whole.test_fuzz import check as check_program

import aotc
from aotc.lowering.cost_model.model import Costs
from aotc.lowering.program import graphs
from aotc.tools.explain.schedule import explain_schedule
from aotc.vmfb.abi import Control, Graph
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.commands import all_nodes
from aotc.vmfb.verify.buffers import load_command_buffers

pytestmark = pytest.mark.cpu

lax = jax.lax
PATIENCE = 60
SQUARE = jax.ShapeDtypeStruct((128, 128), np.float32)


def iterations(w, x, n=5):
    return lax.fori_loop(0, n, lambda i, c: jnp.tanh(c @ w * 0.1), x)


def until(w, x):
    """How often it turns depends on the data."""
    return lax.while_loop(lambda c: jnp.abs(c).sum() > 1, lambda c: jnp.tanh(c @ w) * 0.3, x)


def arm(w, x, p):
    return lax.cond(p > 0, lambda: jnp.tanh(x @ w @ w), lambda: jnp.sin(w @ x @ w))


def controls(data):
    """The control commands of each graph that has some, those at the top first."""
    opened = open_bundle(data)
    (buffer,) = load_command_buffers(opened, opened.manifest["variants"][0]).nodes
    every = [node for node in all_nodes(buffer) if isinstance(node, Graph)]
    found = [[c for c in graph.commands if isinstance(c, Control)] for graph in every]
    return [some for some in found if some]


@pytest.fixture
def all_overlap(monkeypatch):
    """Loops and branches are commands wherever they can be, and no graph is too small to be shared."""

    def overlap(steps, edges, costs):
        return len(steps) > 1 and any(map(graphs.is_control, steps))

    monkeypatch.setattr(graphs, "_is_faster_as_one_graph", overlap)
    monkeypatch.setattr(Costs, "is_serial", lambda self, times: False)


# ---------------------------------------------------------------- that they do

MEETING = """
func.func public @main(%n: tensor<i32>, %x: tensor<128x128xf32>) -> (tensor<4xf32>, tensor<4xf32>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %start = stablehlo.constant dense<1.0> : tensor<4xf32>
  ONE
  OTHER
  return %a#1, %b#1 : tensor<4xf32>, tensor<4xf32>
}
"""
MEETING_LOOP = """
  %NAME:3 = stablehlo.while(%i = %zero, %c = %start, %y = %x) : tensor<i32>, tensor<4xf32>, tensor<128x128xf32> cond {
    %p = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %p : tensor<i1>
  } do {
    %one = stablehlo.constant dense<1> : tensor<i32>
    %j = stablehlo.add %i, %one : tensor<i32>
    %d = stablehlo.custom_call @meets_NAME(%c) : (tensor<4xf32>) -> tensor<4xf32>
    %z = stablehlo.dot_general %y, %x, contracting_dims = [1] x [0]
      : (tensor<128x128xf32>, tensor<128x128xf32>) -> tensor<128x128xf32>
    stablehlo.return %j, %d, %z : tensor<i32>, tensor<4xf32>, tensor<128x128xf32>
  }
"""
MEETING_BRANCH = """
  %NAME:2 = "stablehlo.case"(%n) ({
    %d = stablehlo.custom_call @meets_NAME(%start) : (tensor<4xf32>) -> tensor<4xf32>
    %z = stablehlo.dot_general %x, %x, contracting_dims = [1] x [0]
      : (tensor<128x128xf32>, tensor<128x128xf32>) -> tensor<128x128xf32>
    stablehlo.return %z, %d : tensor<128x128xf32>, tensor<4xf32>
  }, {
    %d = stablehlo.custom_call @meets_NAME(%start) : (tensor<4xf32>) -> tensor<4xf32>
    %z = stablehlo.sine %x : tensor<128x128xf32>
    stablehlo.return %z, %d : tensor<128x128xf32>, tensor<4xf32>
  }) : (tensor<i32>) -> (tensor<128x128xf32>, tensor<4xf32>)
"""
MEETING_COMMAND = """
  %bx = stablehlo.custom_call @meets_NAME(%start) : (tensor<4xf32>) -> tensor<4xf32>
  %NAME:2 = stablehlo.optimization_barrier %zero, %bx : tensor<i32>, tensor<4xf32>
"""


@pytest.mark.parametrize(("one", "other", "iterations"), [
    (MEETING_LOOP, MEETING_LOOP, 3), (MEETING_LOOP, MEETING_BRANCH, 1), (MEETING_BRANCH, MEETING_BRANCH, 1),
    (MEETING_LOOP, MEETING_COMMAND, 1),
])  # fmt: skip
def test_independent_loops_run_concurrently(all_overlap, one, other, iterations):
    """In each turn both wait until the other one is there; one after the other they would wait for ever."""
    barrier = threading.Barrier(2)

    def meet(x, result):
        barrier.wait(PATIENCE)
        result[:] = x + 1

    for name in "ab":
        aotc.register_custom_call(f"meets_{name}", meet, native=False)
    text = MEETING.replace("ONE", one.replace("NAME", "a")).replace("OTHER", other.replace("NAME", "b"))
    module = aotc.load(aotc.compile(text), threads=2)
    for result in module(np.int32(iterations), np.zeros((128, 128), "f4")):
        np.testing.assert_array_equal(result, 1 + iterations)


# ---------------------------------------------------------------- when, by the cost model

CASES = {
    "loops": (lambda w, x, y: (iterations(w, x), iterations(w, y)), 2),
    "loops that end with the data": (lambda w, x, y: (until(w, x), until(x, y)), 2),
    "a loop beside a product": (lambda w, x, y: (iterations(w, x, 16), jnp.sin(x @ y @ w @ y @ x @ y @ w) @ x), 1),
    "a loop beside a branch": (lambda w, x, y: (iterations(w, x), arm(w, y, y[0, 0]) @ y), 2),
    "a loop and what it needs": (lambda w, x, y: iterations(w, jnp.sin(x @ y)), 0),
    "a chain of loops": (lambda w, x, y: iterations(w, iterations(x, iterations(w, y))), 0),
}


@pytest.mark.parametrize("unrolled", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_loops_overlap_only_if_it_saves_time(name, unrolled, request):
    """Unrolled by two, five iterations have fewer graphs that several threads share: less to save, but known."""
    function, count = CASES[name]
    if not unrolled:
        request.getfixturevalue("no_unrolling")
    data = aotc.compile(jax.export.export(jax.jit(function))(SQUARE, SQUARE, SQUARE), verify_each=True)
    assert sum(map(len, controls(data))) == count
    arrays = [normal(128, 128, seed=n, scale=0.1) for n in range(3)]
    want = jax.jit(function)(*arrays)
    got = [aotc.load(data, threads=n).invoke("main", *arrays) for n in (1, 2, 5)]
    close(got[1], want, factor=20)
    for some in got[1:]:
        assert [a.tobytes() for a in got[0]] == [a.tobytes() for a in some]


def test_overlap_may_use_memory_up_to_the_limit():
    def function(w, x, y):
        return [lax.fori_loop(0, 5, lambda i, c, x=x: jnp.tanh(x * c @ w).sum(0) * 0.01, x[0]) for x in (x, y)]

    types = [jax.ShapeDtypeStruct((200, 200), np.float32)] * 3
    exported = jax.export.export(jax.jit(function))(*types)
    free = aotc.compile(exported)
    taken = open_bundle(free).manifest["variants"][0]["memory"]["main"]
    limit = taken["arena"] * 3 // 4 + taken["scratch"]
    small = aotc.compile(exported, memory_limit=limit, verify_each=True)
    assert [sum(map(len, controls(data))) for data in (free, small)] == [2, 0]
    assert open_bundle(small).manifest["variants"][0]["memory"]["main"]["arena"] + taken["scratch"] <= limit
    arrays = [normal(200, 200, seed=n, scale=0.1) for n in range(3)]
    one, other = (aotc.load(data, threads=2).invoke("main", *arrays) for data in (free, small))
    assert [a.tobytes() for a in one] == [a.tobytes() for a in other]


# ---------------------------------------------------------------- that results are right

PROGRAMS = {
    "swapped": lambda w, x, n: (iterations(x, w, n), *lax.fori_loop(0, n, lambda i, c: (c[1], c[0] @ w), (x, w))),
    "no turn": lambda w, x, n: (iterations(w, x, n - n), iterations(x, w, 0), until(w, x * 0)),
    "shared": lambda w, x, n: (iterations(w, jnp.sin(x), n), iterations(jnp.sin(x), w, n), jnp.sin(x) @ w),
    "nested": lambda w, x, n: lax.fori_loop(
        0, n, lambda i, c: (iterations(w, c[0], i), iterations(x, c[1], 2), c[2] @ w), (x, w, x)
    ),
    "in a branch": lambda w, x, n: (
        lax.cond(n > 1, lambda: (iterations(w, x, n), until(x, w)), lambda: (x, iterations(w, x))),
        lax.switch(n, [lambda: x, lambda: until(w, x), lambda: iterations(w, x, n)]),
    ),
    "a branch in loops": lambda w, x, n: [
        lax.fori_loop(0, n, lambda i, c, k=k: lax.cond(i % 2 == k, lambda: c @ w, lambda: jnp.tanh(c)), x)
        for k in (0, 1)
    ],
    "one after two": lambda w, x, n: iterations(iterations(w, x, n), iterations(x, w, n)) + iterations(x, w, n),
    "scans": lambda w, x, n: [
        lax.scan(lambda c, r, v=v: (jnp.tanh(c @ v) + r, c.sum(0)), x, w[:4] * n) for v in (w, x)
    ],
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_overlapping_loops_match_jax(all_overlap, name, level):
    for n in (0, 1, 3):
        args = [normal(24, 24, seed=1, scale=0.3), normal(24, 24, seed=2, scale=0.3), np.int32(n)]
        check(PROGRAMS[name], args, level, factor=100)


def test_overlapping_loops_of_symbolic_sizes_match_jax(all_overlap):
    (b,) = jax.export.symbolic_shape("b")
    types = [jax.ShapeDtypeStruct((b, 40), np.float32), jax.ShapeDtypeStruct((40, 40), np.float32)]

    def function(x, w):
        return iterations(w, x), until(w, x), iterations(w.T, x + 1)

    module = aotc.load(aotc.compile(jax.export.export(jax.jit(function))(*types), verify_each=True), threads=2)
    for size in (1, 7, 64):
        args = [normal(size, 40, seed=size, scale=0.3), normal(40, 40, seed=1, scale=0.2)]
        close(module.invoke("main", *args), jax.jit(function)(*args), factor=100)


@pytest.mark.usefixtures("no_unrolling")
def test_overlapping_loops_update_donated_arguments_in_place(all_overlap):
    def function(x, y, w):
        return iterations(w, x), iterations(w, y)

    args = [normal(64, 64, seed=n, scale=0.2) for n in range(3)]
    want = jax.jit(function)(*args)
    module = aotc.load(aotc.compile(jax.jit(function, donate_argnums=(0, 1)), *args, verify_each=True), threads=2)
    given = [a.copy() for a in args]
    got = module.invoke("main", *given, donate=True)
    close(got, want, factor=100)
    assert np.shares_memory(got[0], given[0])
    assert np.shares_memory(got[1], given[1])


def random_function(seed):
    """Loops and branches, in each other too, over values of which some are read again and again."""

    def grown(rng, values, depth):
        values = list(values)
        for _ in range(rng.choice((2, 3, 5))):
            x, y = rng.choice(values), rng.choice(values)
            kind, inner = rng.randrange(6 if depth < 2 else 2), rng.randrange(1 << 30)

            def block(c, *more, inner=inner, values=tuple(values)):
                return grown(random.Random(inner), [c, *more, *values], depth + 1)[-1]

            match kind:
                case 0:
                    made = jnp.tanh(x @ y)
                case 1:
                    made = jnp.sin(x) + y
                case 2:
                    made = lax.fori_loop(0, rng.randrange(4), lambda i, c, block=block: jnp.tanh(block(c)), x)
                case 3:
                    limit = rng.random()
                    start = (jnp.int32(0), x)
                    go = partial(lambda c, limit: (c[0] < 3) & (jnp.abs(c[1]).mean() > limit), limit=limit)
                    made = lax.while_loop(go, lambda c, block=block: (c[0] + 1, jnp.tanh(block(c[1]))), start)[1]
                case 4:
                    made = lax.cond(x[0, 0] > y[0, 0], lambda block=block, x=x: block(x), lambda y=y: y * 2)
                case _:
                    step = partial(lambda i, c, block: (c[1], jnp.tanh(block(*c))), block=block)
                    pair = lax.fori_loop(0, rng.randrange(4), step, (x, y))
                    made = pair[0] - pair[1]
            values.append(made)
        return values

    return lambda x, y: grown(random.Random(seed), [x, y], 0)[2:]


@pytest.mark.parametrize("seed", [*range(10), *(pytest.param(n, marks=pytest.mark.slow) for n in range(10, 100))])
def test_overlapping_loops_in_random_functions_match_jax(all_overlap, seed):
    args = [normal(9, 9, seed=seed, scale=0.4), normal(9, 9, seed=seed + 100, scale=0.4)]
    check(random_function(seed), args, 2, factor=2000)


@settings(QUICK, max_examples=15)
@given(programs(most=6))
def test_overlapping_loops_in_random_programs_match_xla(all_overlap, program):
    check_program(program, [2])


# ---------------------------------------------------------------- how calls end


def endless(x, y):
    return [lax.while_loop(lambda c: c[0, 0] < 2, lambda c: jnp.sin(c @ c), v) for v in (x, y)]


@pytest.fixture(scope="module")
def module_without_end():
    exported = jax.export.export(jax.jit(endless))(SQUARE, SQUARE)
    data = aotc.compile(exported)
    assert sum(map(len, controls(data))) == 2
    return aotc.load(data, threads=2)


def test_a_deadline_ends_overlapping_loops(module_without_end):
    args = [np.full((128, 128), 0.5, np.float32)] * 2
    for _ in range(3):
        with pytest.raises(aotc.DeadlineExceeded):
            module_without_end.submit("main", *args, deadline=0.05).result(PATIENCE)
    done = [np.full((128, 128), 3, np.float32)] * 2
    for result in module_without_end.invoke("main", *done):
        np.testing.assert_array_equal(result, 3)


def test_an_endless_overlapping_loop_is_cancelled(module_without_end):
    args = [np.full((128, 128), 3, np.float32), np.full((128, 128), 0.5, np.float32)]
    fence = module_without_end.submit("main", *args)
    assert not fence.done
    assert fence.cancel()
    with pytest.raises(aotc.FenceCancelled):
        fence.result(PATIENCE)


# ---------------------------------------------------------------- what is said of it


def test_a_trace_has_every_iteration_of_overlapping_loops(tmp_path):
    function = CASES["loops"][0]
    data = aotc.compile(jax.export.export(jax.jit(function))(SQUARE, SQUARE, SQUARE))
    arrays = [normal(128, 128, seed=n, scale=0.1) for n in range(3)]
    module = aotc.load(data, threads=2)
    plain, traced = module.invoke("main", *arrays), module.invoke("main", *arrays, trace=tmp_path)
    assert [a.tobytes() for a in plain] == [a.tobytes() for a in traced]
    assert len([p for p in tmp_path.iterdir() if "matmul" in p.name]) == 10


@pytest.mark.usefixtures("no_unrolling")
def test_explain_schedule_has_a_row_for_each_overlapping_loop():
    data = aotc.compile(jax.export.export(jax.jit(CASES["loops"][0]))(SQUARE, SQUARE, SQUARE))
    report = explain_schedule(open_bundle(data))
    rows = {row.kernel: row for row in report.rows if row.bound == "control"}
    assert set(rows) == {"loop 0", "loop 1"}
    assert len({row.graph for row in rows.values()}) == 1
    for name, row in rows.items():
        inside = [r for r in report.rows if r.within == name]
        assert row.predicted == pytest.approx(5 * sum(r.predicted for r in inside))
        assert {(r.runs, r.guessed) for r in inside} == {(5, False)}
        assert not set(row.after) & {other.number for other in rows.values()}
    assert report.work == pytest.approx(sum(r.ns for r in report.rows if not r.within))
    assert report.path < report.work * 0.6
