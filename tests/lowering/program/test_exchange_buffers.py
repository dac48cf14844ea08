"""States that a branch swaps exchange the roles of their buffers: no iteration copies a whole array.

The oracle is the same body on NumPy arrays, one iteration after the other. Copies are counted as the steps run.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from lowering.program.test_alternate_buffers import SIZE, Counted, arrays, counted, unknown, written
from lowering.program.test_carried_buffers import CPU, GPU, lowered, unroll_small_arrays

import aotc
from aotc.lowering.program.memories import Memories

pytestmark = pytest.mark.ir


def choose(xp, index, branches, *state):
    if xp is np:
        return branches[min(max(int(index), 0), len(branches) - 1)](*state)
    return lax.switch(jnp.asarray(index, "int32"), branches, *state)


def swap_or_update(xp, i, a, b, c):
    sides = lambda a, b, c: (a, written(b, i, a + c), c), lambda a, b, c: (b, a, c)
    return choose(xp, i % 3 == 0, sides, a, b, c)


def swap_by_data(xp, i, a, b, c):
    sides = lambda a, b, c: (b, a, written(c, i, b)), lambda a, b, c: (written(a, i + 1, c), written(b, i, a + 1), c)
    return choose(xp, a[i % SIZE] % 3 == 0, sides, a, b, c)


def swap_then_update(xp, i, a, b, c):
    a, b, c = choose(xp, i & 1, (lambda a, b, c: (b, a, c), lambda a, b, c: (a, b, c)), a, b, c)
    return written(a, i, b + i), b, written(c, i, a)


def update_and_swap(xp, i, a, b, c):
    """Each side updates; one of three swaps."""
    sides = (
        lambda a, b, c: (written(b, i, a), written(a, i + 1, c), c),
        lambda a, b, c: (a, written(b, 2, a), c),
        lambda a, b, c: (written(a, i, b), b, written(c, i, a)),
    )
    return choose(xp, (i * 5 + b[1]) % 4, sides, a, b, c)


def another_pair(xp, i, a, b, c):
    """One side swaps two states, and the other two others: one of them copies, and the results are right."""
    return choose(xp, i % 3 == 0, (lambda a, b, c: (b, a, c), lambda a, b, c: (a, c, written(b, i, a))), a, b, c)


BODIES = [swap_or_update, swap_by_data, swap_then_update, update_and_swap]


def run(function, values, target):
    """Return the copies of whole arrays that a call makes, and its results."""
    main, steps, constants = lowered(function, values, target)
    call = Counted(steps, main, constants, values)
    call.take_arena()
    call.steps(steps.steps)
    return call.copies, [call.result(n) for n in range(len(values))]


def expected(body, count, state):
    for i in range(count):
        state = [np.asarray(x, np.int32) for x in body(np, np.int32(i), *state)]
    return state


@pytest.fixture(params=["kernels", "steps"])
def small_arrays(monkeypatch, request):
    unroll_small_arrays(monkeypatch)
    if request.param == "steps":
        monkeypatch.setattr(Memories, "loop_flops", lambda *_: None)


@pytest.mark.parametrize("loop", [counted, unknown])
@pytest.mark.parametrize("body", [*BODIES, another_pair], ids=lambda f: f.__name__)
def test_swapped_states_match_numpy_for_any_iteration_count(body, loop, small_arrays):
    for count in (0, 1, 2, 5, 12):
        _, results = run(loop(body, count), arrays(), CPU)
        for got, want in zip(results, expected(body, count, arrays()), strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("target", [CPU, GPU])
@pytest.mark.parametrize("body", BODIES, ids=lambda f: f.__name__)
def test_swapped_states_are_not_copied_per_iteration(body, target, monkeypatch):
    unroll_small_arrays(monkeypatch)
    monkeypatch.setattr(Memories, "loop_flops", lambda *_: None)
    most = 2 * len(arrays()) + 1  # before and after the loop
    copies, results = run(unknown(body, 30), arrays(), target)
    for got, want in zip(results, expected(body, 30, arrays()), strict=True):
        np.testing.assert_array_equal(got, want)
    assert copies <= most


def test_two_pairs_of_states_swap_together(monkeypatch):
    unroll_small_arrays(monkeypatch)
    monkeypatch.setattr(Memories, "loop_flops", lambda *_: None)

    def body(xp, i, a, b, c, d):
        sides = lambda a, b, c, d: (a, written(b, i, a), written(c, i, d), d), lambda a, b, c, d: (b, a, d, c)
        return choose(xp, i % 3 == 0, sides, a, b, c, d)

    def function(*state):
        return lax.fori_loop(0, 30, lambda i, s: body(jnp, i, *s), state)

    values = [*arrays(), np.arange(SIZE, dtype=np.int32) * 3]
    copies, results = run(function, values, CPU)
    for got, want in zip(results, expected(body, 30, values), strict=True):
        np.testing.assert_array_equal(got, want)
    assert copies <= 2 * len(values) + 2


def test_swaps_in_inner_loops_match_numpy(small_arrays):
    def body(xp, i, a, b, c):
        state = a, b, c
        if xp is np:
            for j in range(3):
                state = swap_by_data(np, np.int32(j) + i, *state)
        else:
            state = lax.fori_loop(0, 3, lambda j, s: swap_by_data(jnp, j + i, *s), state)
        return choose(xp, i & 1, (lambda a, b, c: (b, a, c), lambda a, b, c: (a, written(b, i, c), c)), *state)

    _, results = run(counted(body, 7), arrays(), CPU)
    for got, want in zip(results, expected(body, 7, arrays()), strict=True):
        np.testing.assert_array_equal(got, want)


def test_loops_whose_condition_reads_swapped_states_match_numpy(small_arrays):
    def function(a, b, c):
        step = lambda s: (s[0] + 1, *swap_or_update(jnp, s[0], *s[1:]))
        return lax.while_loop(lambda s: (s[0] < 20) & (s[1][2] < 90), step, (0, a, b, c))[1:]

    i, state = 0, arrays()
    while i < 20 and state[0][2] < 90:
        state = [np.asarray(x, np.int32) for x in swap_or_update(np, np.int32(i), *state)]
        i += 1
    for got, want in zip(run(function, arrays(), CPU)[1], state, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.cpu
@pytest.mark.parametrize("body", [swap_by_data, update_and_swap], ids=lambda f: f.__name__)
def test_compiled_loops_with_swapped_states_match_numpy(body):
    x = [np.arange(1 << 12, dtype=np.int32) * n for n in (1, 5, 7)]
    for count in (20, 21):
        module = aotc.load(aotc.compile(jax.jit(unknown(body, count)), *x, guard=True))
        for got, want in zip(module.invoke("main", *x), expected(body, count, x), strict=True):
            np.testing.assert_array_equal(got, want)
