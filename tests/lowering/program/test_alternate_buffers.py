"""States that swap, rotate, or alternate between two buffers are not copied in each iteration of a loop.

The oracle is the same body on NumPy arrays, one iteration after the other. Copies are counted as the steps run: an
iteration more must not copy an array more.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from lowering.program.test_carried_buffers import CPU, GPU, lowered, unroll_small_arrays
from support.program_run import _Run

import aotc
from aotc.ir.program.ir import Copy
from aotc.lowering.program.memories import Memories
from aotc.lowering.program.owners import alternate_buffers
from aotc.lowering.program.owners.alternate_buffers import ALTERNATED_BYTES

pytestmark = pytest.mark.ir

SIZE = 7


def neighbours(xp, x):
    return xp.roll(x, 1) + xp.roll(x, -1) * 3


def written(x, i, y):
    if isinstance(x, np.ndarray):
        x = x.copy()
        x[i % SIZE] = y[0]
        return x
    return x.at[i % SIZE].set(y[0])


BODIES = {
    "fibonacci": lambda xp, i, a, b, c: (b, a + b, c),
    "swap": lambda xp, i, a, b, c: (b, written(a, i, c), c),
    "stencil": lambda xp, i, a, b, c: (neighbours(xp, a), b, c),
    "ping-pong": lambda xp, i, a, b, c: (neighbours(xp, a), a, c),
    "leapfrog": lambda xp, i, a, b, c: (b, 2 * b - a + neighbours(xp, b), c),
    "ring of three": lambda xp, i, a, b, c: (b, c, a * 2 + i),
    "ring of three and a stencil": lambda xp, i, a, b, c: (b, c, neighbours(xp, a)),
    "matmul": lambda xp, i, a, b, c: (a @ xp.outer(b, c), b, c),
    "three old states": lambda xp, i, a, b, c: (neighbours(xp, a) + c, a, b),
    "two pairs": lambda xp, i, a, b, c: (b + i, a * 3, neighbours(xp, c)),
}  # fmt: skip


def counted(body, count):
    def function(a, b, c):
        return lax.fori_loop(0, count, lambda i, s: body(jnp, i, *s), (a, b, c))

    return function


def unknown(body, count):
    """The same with a number of iterations that only the data decides."""

    def function(a, b, c):
        limit = count + a[0] * 0
        step = lambda s: (s[0] + 1, *body(jnp, s[0], *s[1:]))
        return lax.while_loop(lambda s: s[0] < limit, step, (0, a, b, c))[1:]

    return function


class Counted(_Run):
    """Counts the copies of whole arrays as they are made."""

    copies = 0

    def steps(self, steps):
        for step in steps:
            self.copies += isinstance(step, Copy) and step.size == 4 * SIZE
            super().steps([step])


def arrays():
    return [np.arange(SIZE, dtype=np.int32) + n for n in (0, 3, 5)]


def executed(function, target):
    """Return the copies of whole arrays that a call makes, and its results."""
    main, steps, constants = lowered(function, arrays(), target)
    run = Counted(steps, main, constants, arrays())
    run.take_arena()
    run.steps(steps.steps)
    return run.copies, [run.result(n) for n in range(3)]


def expected(body, count):
    state = arrays()
    for i in range(count):
        state = [np.asarray(x, np.int32) for x in body(np, np.int32(i), *state)]
    return state


@pytest.fixture(autouse=True)
def small_arrays(monkeypatch):
    """Unroll for arrays of a few bytes, and let no loop be a kernel, whose copies are no steps."""
    monkeypatch.setattr(Memories, "loop_flops", lambda *_: None)
    unroll_small_arrays(monkeypatch)


@pytest.mark.parametrize("target", [CPU, GPU])
@pytest.mark.parametrize("loop", [counted, unknown])
@pytest.mark.parametrize("name", BODIES)
def test_alternating_states_are_not_copied_per_iteration(name, loop, target):
    copied = []
    for count in (12, 24):  # multiples of each period
        copies, results = executed(loop(BODIES[name], count), target)
        copied.append(copies)
        for got, want in zip(results, expected(BODIES[name], count), strict=True):
            np.testing.assert_array_equal(got, want)
    assert copied[0] == copied[1]


@pytest.mark.parametrize("loop", [counted, unknown])
@pytest.mark.parametrize("name", BODIES)
def test_alternating_states_match_numpy_for_any_iteration_count(name, loop):
    for count in (0, 1, 2, 3, 5, 9, 10, 11):
        _, results = executed(loop(BODIES[name], count), CPU)
        for got, want in zip(results, expected(BODIES[name], count), strict=True):
            np.testing.assert_array_equal(got, want)


def test_nested_loops_copy_nothing_per_iteration():
    def function(count):
        body = BODIES["ping-pong"]
        inner = lambda s: lax.fori_loop(0, 8, lambda i, s: body(jnp, i, *s), s)
        return lambda a, b, c: lax.fori_loop(0, count, lambda i, s: inner((s[1], s[0], s[2])), (a, b, c))

    assert executed(function(4), CPU)[0] == executed(function(8), CPU)[0]


def test_a_loop_that_copies_little_is_not_unrolled(monkeypatch):
    monkeypatch.setattr(alternate_buffers, "ALTERNATED_BYTES", ALTERNATED_BYTES)
    fewer, more = (executed(counted(BODIES["fibonacci"], count), CPU)[0] for count in (12, 24))
    assert more > fewer


@pytest.mark.cpu
@pytest.mark.parametrize("loop", [counted, unknown])
def test_compiled_loops_with_rotating_states_match_numpy(loop):
    """Three states of 64 KiB that rotate: the loop runs as commands, for each remainder of the number of iterations."""
    x = [np.arange(1 << 14, dtype=np.int32) * n for n in (1, 5, 7)]
    for count in (9, 10, 11, 12):
        module = aotc.load(aotc.compile(loop(BODIES["ring of three and a stencil"], count), *x, guard=True))
        state = x
        for i in range(count):
            state = [np.asarray(y, np.int32) for y in BODIES["ring of three and a stencil"](np, np.int32(i), *state)]
        for got, want in zip(module.invoke("main", *x), state, strict=True):
            np.testing.assert_array_equal(got, want)
