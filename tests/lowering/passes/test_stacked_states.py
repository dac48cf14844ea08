"""Stacked inputs of a scan that come out updated are updated in place: caches of layers, and what resembles them.

The oracle is eager JAX: ``jax.disable_jit`` runs a scan as a loop of Python. Numbers are small integers, whose
sums are exact in any order.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from lowering.program.test_carried_buffers import CPU, GPU, lowered

import aotc
from aotc.ir.program.ir import Copy, Launch, walk

pytestmark = pytest.mark.cpu

LAYERS, TERMS, WIDTH = 4, 64, 32
STACK = 4 * LAYERS * TERMS * WIDTH


def at_place(x, cache, place):
    cache = cache.at[place].set(x * 2)
    return x + cache[place - 1], cache


def slice_update(x, cache, place):
    cache = lax.dynamic_update_slice(cache, x[None], (place, 0))
    return x - cache.sum(0) % 5, cache


def two_updates(x, cache, place):
    cache = cache.at[place].set(x).at[place + 1].add(x)
    return cache.max(0), cache


def rows_of_a_batch(x, cache, place):
    cache = cache.at[jnp.arange(3), :2].set(x[:2]).at[jnp.array([place, -1, 99]), 3].min(1.0)
    return x + cache[1], cache


def out_of_bounds(x, cache, place):
    cache = lax.dynamic_update_slice(cache.at[place + 1000].set(x), x[None, :5], (place + 1000, -7))
    return x + cache[-1], cache


def old_is_read(x, cache, place):
    new = cache.at[place].set(x)
    return x + cache[place] - new[place + 1], new


def whole(x, cache, place):
    return x + 1, cache + x


def chosen(x, cache, place):
    cache = lax.cond(x[0] > 3, lambda: cache.at[place].set(x), lambda: cache * 2)
    return x + 1, cache


STEPS = [at_place, slice_update, two_updates, rows_of_a_batch, out_of_bounds, old_is_read, whole, chosen]
IN_PLACE = [at_place, slice_update, two_updates, rows_of_a_batch, out_of_bounds]


def layers(step):
    def function(keys, values, x, place):
        def layer(x, caches):
            x, keys = step(x, caches[0], place)
            x, values = step(x % 7, caches[1], place)
            return x % 7, (keys, values)

        x, (keys, values) = lax.scan(layer, x, (keys, values))
        return keys, values, x

    return function


def tokens(step):
    """A loop over tokens around that over layers."""

    def function(keys, values, x, place):
        token = lambda i, s: layers(step)(*s, place + i)
        return lax.fori_loop(0, 3, token, (keys, values, x))

    return function


def read_later(keys, values, x, place):
    """The old stack is a result too."""
    new, values, x = layers(at_place)(keys, values, x, place)
    return new, values, keys.sum(0) + x


def reversed_layers(keys, values, x, place):
    x, keys = lax.scan(lambda x, cache: at_place(x, cache, place), x, keys, reverse=True)
    return keys, values, x


def exchanged(keys, values, x, place):
    """Each stack is read where the other one is written."""
    x, (keys, values) = lax.scan(lambda x, c: (x, (c[1] + x, c[0] * 2)), x, (keys, values))
    return keys, values, x


def other_place(keys, values, x, place):
    """A slice is read that an earlier iteration has written."""

    def layer(i, s):
        out, x = s
        return out.at[i].set(keys[(i + 3) % LAYERS] + x), x + 1

    return (*lax.fori_loop(0, LAYERS, layer, (jnp.zeros_like(keys), x)), values)


def fewer_iterations(keys, values, x, place):
    """Slices that no iteration writes stay zeros."""
    layer = lambda i, out: out.at[i].set(keys[i] + x)
    return lax.fori_loop(0, LAYERS - 1, layer, jnp.zeros_like(keys)), values, x


def updated_layer(keys, values, x, place):
    """A loop of its own that updates a slice of a slice."""

    def layer(i, keys):
        return keys.at[i].set(keys[i].at[place].set(x).at[place + 2].add(keys[i, 0]))

    return lax.fori_loop(0, LAYERS, layer, keys), values, x


OTHERS = [read_later, reversed_layers, exchanged, other_place, fewer_iterations, updated_layer]
PROGRAMS = {
    **{s.__name__: layers(s) for s in STEPS},
    **{f"tokens, {s.__name__}": tokens(s) for s in STEPS},
    **{f.__name__: f for f in OTHERS},
}


def arguments():
    rng = np.random.default_rng(0)
    stacks = [rng.integers(0, 9, (LAYERS, TERMS, WIDTH)).astype(np.float32) for _ in range(2)]
    return [*stacks, np.arange(WIDTH, dtype=np.float32) % 7, np.int32(5)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_stacked_states_match_eager_jax(name):
    function = PROGRAMS[name]
    with jax.disable_jit():
        want = function(*map(jnp.asarray, arguments()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of donated arguments that JAX has no use for
        module = aotc.load(aotc.compile(jax.jit(function, donate_argnums=(0, 1)), *arguments(), guard=True))
    for how in ({}, {"donate": True}):
        given = arguments()
        for got, one in zip(module.invoke("main", *given, **how), want, strict=True):
            np.testing.assert_array_equal(got, one)
        assert how or all(map(np.array_equal, given, arguments()))


def moved(function, target, donated=(0, 1)):
    """Return the copies and fills of whole stacks in the steps of a program."""
    _, program, _ = lowered(function, arguments(), target, donated)
    steps = list(walk(program.steps))
    copies = [s for s in steps if isinstance(s, Copy) and s.size >= STACK]
    return copies, [s for s in steps if isinstance(s, Launch) and s.kernel.name.startswith("fill_")]


@pytest.mark.ir
@pytest.mark.parametrize("target", [CPU, GPU])
@pytest.mark.parametrize("loop", [layers, tokens])
@pytest.mark.parametrize("step", [*IN_PLACE, whole, chosen], ids=lambda f: f.__name__)
def test_donated_stacks_are_neither_copied_nor_filled(step, loop, target):
    assert moved(loop(step), target) == ([], [])


@pytest.mark.ir
@pytest.mark.parametrize("loop", [layers, tokens])
@pytest.mark.parametrize("step", IN_PLACE, ids=lambda f: f.__name__)
def test_a_layer_of_a_stack_is_read_without_a_copy(step, loop):
    """What an iteration makes is smaller than a layer of a stack."""
    _, program, _ = lowered(loop(step), arguments(), CPU, (0, 1))
    layer = 4 * TERMS * WIDTH
    assert all(s.size < layer for s in program.arena)
    assert not any(isinstance(s, Copy) and s.size >= layer for s in walk(program.steps))


@pytest.mark.ir
def test_a_stack_with_later_readers_is_copied():
    for function, donated in ((tokens(at_place), ()), (read_later, (0, 1))):
        _, program, _ = lowered(function, arguments(), CPU, donated)
        assert 0 not in program.taken.values()
