"""Mixture-of-experts routing, every subset of its dims dynamic: one answer for every build and level."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from support.mixed_dims import DIMS, PROGRAMS, SUBSETS

import aotc
from aotc.frontend.importer import import_model
from aotc.ir.dims.algebra import sym
from aotc.ir.dims.symbols import evaluate
from aotc.ir.semantics.run import interpret
from aotc.ir.tensor.ir import Op, TensorType, Value
from aotc.lowering.analysis.index_maps import result_index_of_movement

SIZES = (0, 1, 2, 7, 64)


def build(program, dynamic, sizes, level=2):
    return aotc.load(aotc.compile(PROGRAMS[program][0](dynamic, sizes).encode(), opt_level=level), threads=1)


def check(program, module, sizes, seed):
    arguments, wanted = PROGRAMS[program][1](sizes, seed)
    (found,) = module.invoke("main", *arguments)
    np.testing.assert_array_equal(found, wanted, err_msg=str(sizes))


def tuples(dynamic, count, seed):
    """Return sizes for all dims: static ones never change, dynamic ones take every size at least once."""
    rng = random.Random(seed)
    fixed = {d: rng.choice(SIZES[1:]) for d in DIMS}
    columns = {d: rng.sample(SIZES, len(SIZES)) * (count // len(SIZES) + 1) for d in DIMS}
    return [{d: columns[d][n] if d in dynamic else fixed[d] for d in DIMS} for n in range(count)]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(
    "dynamic", [SUBSETS[n] for n in (0, 1, 6, 9, 15)], ids=lambda s: "+".join(d for d in DIMS if d in s) or "static"
)
def test_programs_with_some_dynamic_dims_match_numpy(program, dynamic):
    cases = tuples(dynamic, 5, len(dynamic))
    module = build(program, dynamic, cases[0])
    for seed, sizes in enumerate(cases):
        check(program, module, sizes, seed)


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_reference_interpreter_matches_numpy(program):
    sizes = {"tokens": 7, "experts": 2, "k": 3, "features": 5}
    for dynamic in (frozenset(), frozenset(DIMS)):
        module = import_model(PROGRAMS[program][0](dynamic, sizes))
        arguments, wanted = PROGRAMS[program][1](sizes)
        np.testing.assert_array_equal(interpret(module, *arguments)[0], wanted)


def reshape(source, target):
    x, y = (Value(n, TensorType("f32", shape)) for n, shape in (("x", source), ("y", target)))
    return Op("reshape", (x,), (y,))


A, B, C = sym("a"), sym("b"), sym("c")
PROVEN = {
    "two dims to one": ((A, B), (A * B,)),
    "one dim to two": ((A * B, C), (A, B, C)),
    "beside a static dim": ((A, 6), (A, 2, 3)),
    "across dims": ((2 * A, 3), (A, 6)),
    "all at once": ((A, B, C), (C * A * B,)),
}
UNPROVEN = {
    "a product and another name": ((A, B), (C,)),
    "a static product": ((A, B), (12,)),
    "two and two": ((A, B), (C, 4)),
    "only the tail agrees": ((A, B, 5), (C, 5)),
}


def numbers_of(shape, sizes):
    return [evaluate(d, sizes) for d in shape]


@pytest.mark.parametrize("name", [*PROVEN, *UNPROVEN])
def test_a_reshape_is_folded_into_a_store_only_where_its_extents_are_proven_equal(name):
    source, target = {**PROVEN, **UNPROVEN}[name]
    index = tuple(sym(f"i{k}", 0, d) for k, d in enumerate(source))
    found = result_index_of_movement(reshape(source, target), index)
    assert (found is None) == (name in UNPROVEN)
    for values in itertools.product((1, 2, 3, 4, 6, 12), repeat=3):
        sizes = dict(zip("abc", values))
        shape, after = numbers_of(source, sizes), numbers_of(target, sizes)
        if found is None or np.prod(shape) > 100:
            continue
        for flat in range(int(np.prod(shape))):
            place = dict(zip([f"i{k}" for k in range(len(shape))], map(int, np.unravel_index(flat, shape))))
            assert int(np.ravel_multi_index(numbers_of(found, sizes | place), after)) == flat


def test_extents_that_are_not_proven_equal_are_compared_at_the_call():
    text = """module { func.func public @main(%x: tensor<?x?xf32>, %y: tensor<?xf32>) -> tensor<?xf32> {
      %n = stablehlo.get_dimension_size %y, dim = 0 : (tensor<?xf32>) -> tensor<i32>
      %s = stablehlo.reshape %n : (tensor<i32>) -> tensor<1xi32>
      %t = stablehlo.exponential %x : tensor<?x?xf32>
      %f = stablehlo.dynamic_reshape %t, %s : (tensor<?x?xf32>, tensor<1xi32>) -> tensor<?xf32>
      %z = stablehlo.add %f, %y : tensor<?xf32>
      return %z : tensor<?xf32>
    } }"""
    for level in range(4):
        module = aotc.load(aotc.compile(text.encode(), opt_level=level))
        x, y = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(6, np.float32)
        np.testing.assert_allclose(module.invoke("main", x, y)[0], np.exp(x).reshape(-1) + 1, rtol=1e-6)
        with pytest.raises(aotc.vmfb.errors.CallError, match="reshape of 6 elements to 5"):
            module.invoke("main", x, y[:5])


@pytest.mark.slow
@pytest.mark.parametrize("level", range(4))
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("number", range(16))
def test_every_subset_of_dynamic_dims_matches_numpy_at_every_level(program, number, level):
    dynamic = SUBSETS[number]
    for seed in range(2):
        cases = tuples(dynamic, 15 if dynamic else 1, 100 * seed + number)
        module = build(program, dynamic, cases[0], level)
        for n, sizes in enumerate(cases):
            check(program, module, sizes, n)


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_one_build_with_all_dims_dynamic_matches_numpy_for_all_sizes(program):
    """One build with every dim dynamic takes all 625 tuples of sizes."""
    module = build(program, frozenset(DIMS), dict.fromkeys(DIMS, 2))
    for n, chosen in enumerate(itertools.product(SIZES, repeat=4)):
        check(program, module, dict(zip(DIMS, chosen)), n)
