"""Loops are cut where the tests of what is put side by side change their answer, if that is not too much code."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.differential import check, normal

import aotc
from aotc.frontend.importer import import_model
from aotc.ir.loop.access import scalars_in
from aotc.ir.loop.ir import Apply, For, Let, Store, walk
from aotc.lowering.lower import lower
from aotc.lowering.plans.cpu_loops import MANY_SEGMENTS, SEGMENT_OPERATIONS
from aotc.lowering.plans.thresholds import SEGMENTS
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.targets import TARGETS

pytestmark = pytest.mark.cpu

TARGET = TARGETS["cpu:x86-64-v3"]
X = normal(6, 300)
FEW, MANY = SEGMENTS.value - 1, MANY_SEGMENTS.value - 1


def side_by_side(parts, then=lambda x: x):
    """Return the function that puts overlapping parts of rows beside each other."""
    return lambda x: then(jnp.concatenate([x[:, i : i + 5 + i % 3] for i in range(parts)], 1))


def copies(count):
    """Return the text of a program that puts copies of its argument side by side: JAX puts 16 at a time."""
    x, many = "tensor<6x7xf32>", f"tensor<6x{7 * count}xf32>"
    types = ", ".join([x] * count)
    operands = ", ".join(["%x"] * count)
    return f"""func.func @main(%x: {x}) -> {many} {{
      %0 = "stablehlo.concatenate"({operands}) {{dimension = 1 : i64}} : ({types}) -> {many}
      return %0 : {many}
    }}"""


def loops_of(model):
    """Return the loops along rows of all kernels, and whether one of them has a test."""
    options = Options(target=TARGET.name)
    kernels = lower(run_passes(import_model(model), options), TARGET, options).kernels
    loops = [s for k in kernels for s in walk(k.body) if isinstance(s, For) and s.var == "i1"]
    values = [s.value for loop in loops for s in walk(loop.body) if isinstance(s, Let | Store)]
    return loops, any(isinstance(s, Apply) and s.fn == "select" for s in scalars_in(values))


@pytest.mark.parametrize("parts", [2, FEW, FEW + 1, 20])
def test_a_concatenation_becomes_one_loop_per_part_without_tests(parts):
    loops, tests = loops_of(jax.jit(side_by_side(parts)).lower(X).as_text())
    assert len(loops) == parts
    assert not tests
    check(side_by_side(parts), [X], 2)


@pytest.mark.parametrize(("count", "cut"), [(FEW + 1, True), (MANY, True), (MANY + 1, False)])
def test_many_parts_stay_one_loop_with_tests(count, cut):
    loops, tests = loops_of(copies(count))
    assert (len(loops) == count) is cut is not tests
    x = normal(6, 7)
    got = aotc.load(aotc.compile(copies(count))).invoke("main", x)[0]
    np.testing.assert_array_equal(got, np.tile(x, count))


@pytest.mark.parametrize(("operations", "cut"), [(SEGMENT_OPERATIONS.value // 16, True), (20, False)])
def test_loops_with_many_operations_are_not_cut(operations, cut):
    def then(x):
        for n in range(operations):
            x = x * (n + 0.5) if n % 2 else jnp.abs(x)
        return x

    function = side_by_side(16, then)
    loops, tests = loops_of(jax.jit(function).lower(X).as_text())
    assert (len(loops) == 16) is cut is not tests
    check(function, [X], 2)


@pytest.mark.parametrize("dtype", ["float16", "int8", "bool", "complex64"])
def test_concatenations_of_each_dtype_match_jax(dtype):
    check(side_by_side(30), [(X > 0.3).astype(dtype) if dtype == "bool" else (X * 9).astype(dtype)], 2)


def test_parts_of_no_and_one_element_match_jax():
    parts = [np.zeros((3, n), "float32") + n for n in (0, 1, 1, 0, 2, 1, 1, 1, 1, 1, 1, 1, 0)]
    check(lambda *xs: jnp.concatenate(xs, 1), parts, 2)
