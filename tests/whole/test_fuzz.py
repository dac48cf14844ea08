"""Random programs: the reference interpreter, XLA and compiled code agree at each optimization level.

The quick set is the same in every run. More: ``pytest -m slow tests/whole/test_fuzz.py``, or for as long as you like
``AOTC_FUZZ_EXAMPLES=20000 pytest -m slow tests/whole/test_fuzz.py -s``, which draws new programs in every run and
shrinks those that fail. A failure prints the program as a Python function and its arguments' types.
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from jax import export, lax
from support.differential import compare
from support.programs import programs
from support.programs.values import Program, array

import aotc
from aotc.frontend.importer import import_model
from aotc.frontend.mlir import fetch
from aotc.frontend.xla import run_xla
from aotc.ir.semantics.run import interpret

pytestmark = pytest.mark.cpu

EXAMPLES = int(os.environ.get("AOTC_FUZZ_EXAMPLES", "150"))
SIZES = ({"a": 1, "b": 1}, {"a": 4, "b": 3}, {"a": 7, "b": 5})
COMMON = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
QUICK = settings(COMMON, derandomize=True, database=None)


def check(program: Program, levels):
    """Run a program of static sizes everywhere."""
    arrays = program.arrays({})
    with jax.enable_x64(True):
        text = jax.jit(program.function(), keep_unused=True).lower(*arrays).as_text()
    want = run_xla(fetch(text), arrays)
    compare(program, "reference", interpret(import_model(text), *arrays), want)
    for level in levels:
        got = aotc.load(aotc.compile(text, opt_level=level, verify_each=True)).invoke("main", *arrays)
        compare(program, f"-O{level}", got, want)


def check_sizes(program: Program, levels):
    """Run a program of symbolic sizes: one bundle for all of them."""
    with jax.enable_x64(True):
        exported = export.export(jax.jit(program.function()))(*program.types())
    raw = fetch(exported)
    kept = exported.module_kept_var_idx
    module = import_model(exported)
    bundles = {n: aotc.load(aotc.compile(exported, opt_level=n, verify_each=True)) for n in levels}
    for sizes in SIZES:
        arrays = [program.arrays(sizes)[n] for n in kept]
        want = run_xla(raw, arrays)
        compare(program, f"reference {sizes}", interpret(module, *arrays), want)
        for level, bundle in bundles.items():
            compare(program, f"-O{level} {sizes}", bundle.invoke("main", *arrays), want)


def reversed_beside_a_reduction(x):
    y = lax.neg(x)
    return lax.argmax(y, 0, jnp.int32), lax.rev(y, (0,))


def reduced_beside_its_reverse(x):
    start = x.dtype.type(-100), x.dtype.type(0)
    return lax.reduce((x, lax.rev(x, (0,))), start, lambda p, q: (lax.max(p[0], q[0]), p[1] + q[1]), (0,))


def empty_slice_of_a_slice(x):
    return lax.slice(lax.slice(x, (0,), (3,), (2,)), (2,), (2,))


FOUND = [
    (empty_slice_of_a_slice, [("int32", (3,))]),
    (reduced_beside_its_reverse, [("int8", (5,))]),
    (reduced_beside_its_reverse, [("int32", (3, 4))]),
    (reversed_beside_a_reduction, [("int32", (7,))]),
]
"""What random programs found: functions, and the types of their arguments."""


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize(("function", "types"), FOUND, ids=lambda x: getattr(x, "__name__", ""))
def test_programs_found_by_fuzzing_match_xla(function, types, level):
    generator = np.random.default_rng(0)
    arrays = [array(generator, shape, dtype) for dtype, shape in types]
    with jax.enable_x64(True):
        text = jax.jit(function, keep_unused=True).lower(*arrays).as_text()
    want = run_xla(fetch(text), arrays)
    got = aotc.load(aotc.compile(text, opt_level=level, verify_each=True)).invoke("main", *arrays)
    for side in (got, interpret(import_model(text), *arrays)):
        for a, b in zip(side, want, strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)


@settings(QUICK, max_examples=20)
@given(programs(most=6))
def test_random_programs_of_static_sizes_match_xla(program):
    check(program, [program.seed % 4])


@settings(QUICK, max_examples=8)
@given(programs(symbolic=True, most=6))
def test_random_programs_of_symbolic_sizes_match_xla(program):
    check_sizes(program, [program.seed % 4])


@pytest.mark.slow
@settings(COMMON, max_examples=EXAMPLES)
@given(programs(most=12))
def test_many_random_programs_of_static_sizes_match_xla(program):
    check(program, [program.seed % 4, (program.seed + 2) % 4])


@pytest.mark.slow
@settings(COMMON, max_examples=EXAMPLES)
@given(programs(symbolic=True, most=12))
def test_many_random_programs_of_symbolic_sizes_match_xla(program):
    check_sizes(program, [program.seed % 4, (program.seed + 2) % 4])
