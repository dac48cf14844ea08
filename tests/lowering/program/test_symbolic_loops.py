"""Loops over sizes that only a call knows: as one kernel where these are small, and as several where they are not."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.export import SymbolicScope, symbolic_shape

pytest.importorskip("numba")

import aotc
from aotc.frontend.importer import import_model
from aotc.ir.dims.algebra import sym
from aotc.ir.loop.ir import While, walk
from aotc.ir.loop.parser import parse_kernel
from aotc.ir.loop.printer import print_kernel
from aotc.ir.loop.run import run_kernel
from aotc.ir.loop.verify import verify_kernel
from aotc.ir.program.ir import Branch, Launch
from aotc.ir.program.ir import walk as walk_steps
from aotc.lowering.lower import lower
from aotc.lowering.plans.thresholds import LOOP_ELEMENTS, LOOP_VALUE
from aotc.lowering.program.while_kernels.symbolic_loops import SizeBound, bounds_kernel
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.targets import resolve_targets
from aotc.vmfb.host.interruption import RUNNING

pytestmark = [pytest.mark.cpu]
PATIENCE = 60


def edit_distance(a, b):
    """The edits that make one string of the other, row by row and in it cell by cell."""

    def row(above, symbol_and_number):
        symbol, number = symbol_and_number
        least = jnp.minimum(above[1:] + 1, above[:-1] + (b != symbol))

        def cell(left, best):
            found = jnp.minimum(left + 1, best)
            return found, found

        _, rest = lax.scan(cell, number, least)
        return jnp.concatenate([number[None], rest]), None

    first = jnp.arange(b.shape[0] + 1, dtype=jnp.int32)
    last, _ = lax.scan(row, first, (a, 1 + jnp.arange(a.shape[0], dtype=jnp.int32)))
    return last[-1]


def viterbi(scores, moves):
    """The likeliest of three states in each step."""

    def step(best, found):
        through = best[:, None] + moves
        return through.max(0) + found, through.argmax(0).astype(jnp.int32)

    last, back = lax.scan(step, scores[0], scores[1:])
    end = last.argmax().astype(jnp.int32)
    begin, path = lax.scan(lambda state, row: (row[state], state), end, back, reverse=True)
    return jnp.concatenate([begin[None], path]), last.max()


def cells(x, h, w):
    """A recurrent cell over a batch, and its state after each step."""

    def step(h, now):
        h = jnp.tanh(now + h @ w)
        return h, h

    return lax.scan(step, h, x)


def swap(x, y):
    """State that is another's old value."""
    return lax.fori_loop(0, x.shape[0] % 5, lambda i, s: (s[1], s[0] + i), (x, y))


def chosen(x):
    """A branch in the loop, and a value that is not part of the state."""
    iteration = lambda i, h: lax.cond(h[0] > 0, lambda h: h - x, lambda h: h + 2 * x[::-1], h)
    return lax.fori_loop(0, 7, iteration, x + 1)


def strings(n, m):
    random = np.random.default_rng(n + m)
    return random.integers(0, 3, n, dtype=np.int32), random.integers(0, 3, m, dtype=np.int32)


def floats(*shapes):
    random = np.random.default_rng(sum(map(sum, shapes)))
    return [random.standard_normal(shape).astype(np.float32) for shape in shapes]


MODELS = {
    "edit_distance": (edit_distance, ["n", "m"], "int32", [strings(*s) for s in ((1, 1), (1, 9), (7, 2), (33, 4100))]),
    "viterbi": (viterbi, ["t + 2, 3", "3, 3"], "float32", [floats((t, 3), (3, 3)) for t in (3, 4, 17, 5000)]),
    "cells": (
        cells, ["t, b, 4", "b, 4", "4, 4"], "float32",
        [floats((t, b, 4), (b, 4), (4, 4)) for t, b in ((1, 1), (3, 2), (5, 13), (2, 1024), (3, 3001))],
    ),
    "swap": (swap, ["n", "n"], "float32", [floats((n,), (n,)) for n in (1, 2, 3, 5, 4096, 4097)]),
    "chosen": (chosen, ["n"], "float32", [floats((n,)) for n in (1, 2, 31, 4096, 9000)]),
}  # fmt: skip


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    function, shapes, dtype, calls = MODELS[request.param]
    scope = SymbolicScope()
    types = [jax.ShapeDtypeStruct(symbolic_shape(shape, scope=scope), dtype) for shape in shapes]
    return function, aotc.compile(jax.jit(function), *types, verify_each=True), calls


def test_loops_over_symbolic_sizes_match_jax_at_any_thread_count(model):
    function, bundle, calls = model
    alone, shared = aotc.load(bundle, threads=1), aotc.load(bundle, threads=3)
    for arrays in calls:
        found = alone.invoke("main", *arrays)
        for one, other in zip(found, shared.invoke("main", *arrays), strict=True):
            np.testing.assert_array_equal(one, other)
        for one, expected in zip(found, jax.tree.leaves(jax.jit(function)(*arrays)), strict=True):
            np.testing.assert_allclose(one, expected, rtol=2e-5, atol=2e-5)


def lowered(function, *shapes, dtype="float32"):
    """Return the kernels of a function, and its steps."""
    scope, options = SymbolicScope(), Options(target="cpu:x86-64-v3", verify_each=True)
    types = [jax.ShapeDtypeStruct(symbolic_shape(shape, scope=scope), dtype) for shape in shapes]
    exported = jax.export.export(jax.jit(function), platforms=["cpu"])(*types)
    variant = lower(run_passes(import_model(exported), options), *resolve_targets(options.target), options)
    return variant.kernels, variant.steps["main"].steps


@pytest.mark.parametrize("name", MODELS)
def test_loop_kernels_verify_and_parse_back(name):
    function, shapes, dtype, _ = MODELS[name]
    kernels, _ = lowered(function, *shapes, dtype=dtype)
    loops = [k for k in kernels if any(isinstance(s, While) for s in walk(k.body))]
    assert loops
    for kernel in loops:
        assert verify_kernel(kernel) == []
        assert parse_kernel(print_kernel(kernel)) == kernel


def judges(function, *shapes):
    """How many kernels of a function compare sizes."""
    kernels, steps = lowered(function, *shapes)
    found = [k.name for k in kernels if k.name.startswith("fits_")]
    branches = [s for s in walk_steps(steps) if isinstance(s, Branch)]  # some on an unrolled loop's condition
    first = [[s.kernel.name for s in walk_steps(b.branches[0]) if isinstance(s, Launch)] for b in branches]
    assert len(found) == sum(any("_loop_" in name for name in names) for names in first)
    return len(found)


def test_a_large_loop_becomes_several_kernels():
    assert judges(cells, "t, b, 4", "b, 4", "4, 4") == 1
    assert judges(cells, "t, b, 300", "b, 300", "300, 300") == 0


def test_unknown_trip_counts_need_no_size_test():
    assert judges(viterbi, "t + 2, 3", "3, 3") == 0


@pytest.mark.parametrize(("size", "way"), [(0, 0), (3, 0), (4, 1), (1 << 40, 1)])
def test_the_bounds_kernel_compares_all_sizes(size, way):
    """The second number is twice the first: both are to be within their bounds."""
    n = sym("n")
    kernel = bounds_kernel("fits", [SizeBound(n, 4), SizeBound(2 * n, 7)])
    out = np.full((), 9, np.int32)
    run_kernel(kernel, [out], {"n": size})
    assert out == way
    assert verify_kernel(kernel) == []


SIZES = """
func.func @main(%x: tensor<?xf32>, %n: tensor<i32>) -> tensor<?xf32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %0:2 = stablehlo.while(%i = %zero, %a = %x) : tensor<i32>, tensor<?xf32> cond {
    %p = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %p : tensor<i1>
  } do {
    %j = stablehlo.add %i, %one : tensor<i32>
    %s = stablehlo.sine %a : tensor<?xf32>
    stablehlo.return %j, %s : tensor<i32>, tensor<?xf32>
  }
  return %0#1 : tensor<?xf32>
}
"""


@pytest.fixture(scope="module")
def sines():
    return aotc.load(aotc.compile(SIZES, verify_each=True), threads=2)


@pytest.mark.parametrize("size", [0, 1, 3, LOOP_VALUE.value, LOOP_VALUE.value + 1, LOOP_ELEMENTS.value + 5])
@pytest.mark.parametrize("iterations", [0, 1, 4])
def test_loops_match_numpy_on_both_sides_of_the_size_limit(sines, size, iterations):
    x = expected = np.linspace(-3, 3, size, dtype=np.float32)
    for _ in range(iterations):
        expected = np.sin(expected)
    (found,) = sines.invoke("main", x, np.int32(iterations))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [5, 9000])
def test_a_loop_over_a_symbolic_size_is_cancelled(sines, size):
    fence = sines.submit("main", np.ones(size, np.float32), np.int32(2**31 - 1))
    end = time.monotonic() + PATIENCE
    while fence not in RUNNING.values() and time.monotonic() < end:
        time.sleep(0.001)
    assert fence.cancel()
    with pytest.raises(aotc.FenceCancelled):
        fence.result(PATIENCE)
    np.testing.assert_array_equal(sines.invoke("main", np.zeros(2, np.float32), np.int32(3))[0], np.zeros(2))


def test_a_donated_state_is_updated_in_place_at_both_sizes():
    """The state is taken over: neither way copies it."""
    iteration = lambda x: lax.fori_loop(0, 3, lambda i, h: jnp.sin(h), x)
    shape = jax.ShapeDtypeStruct(symbolic_shape("n"), "float32")
    module = aotc.load(aotc.compile(jax.jit(iteration, donate_argnums=0), shape, verify_each=True), threads=1)
    for n in (3, 5000):
        x = np.linspace(0, 1, n, dtype=np.float32)
        np.testing.assert_allclose(module.invoke("main", x)[0], np.sin(np.sin(np.sin(x))), rtol=1e-5)
