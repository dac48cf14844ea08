"""Values that are made where a result will be: no copy from the arena in between."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.differential import integers, normal
from support.gpu_program import gpu_program

import aotc
from aotc.frontend.importer import import_raw
from aotc.frontend.mlir import fetch
from aotc.ir.program.ir import Copy, Launch, walk
from aotc.lowering.lower import lower
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.targets import resolve_targets

ARGUMENTS = [normal(40, 8), integers(5, low=0, high=40), normal(5, 8)]


def steps_of(function, arguments=ARGUMENTS):
    options = Options(target="cpu:x86-64-v3", verify_each=True)
    raw = fetch(jax.jit(function), arguments, {})
    module = run_passes(import_raw(raw, options=options, platform="cpu"), options)
    (name,) = (f.name for f in module.functions.values() if f.public)
    return list(walk(lower(module, resolve_targets(options.target)[0], options).steps[name].steps))


def copies(steps):
    return [s for s in steps if isinstance(s, Copy)]


def twice(x, i, u):
    return x.at[i].set(u).at[i[::-1]].add(u)


@pytest.mark.cpu
def test_results_of_updates_are_copied_once():
    steps = steps_of(twice)
    assert len(copies(steps)) == 1
    assert {s.target.kind for s in copies(steps)} == {"result"}
    got = aotc.load(aotc.compile(twice, *ARGUMENTS))(*ARGUMENTS)
    np.testing.assert_allclose(got, jax.jit(twice)(*ARGUMENTS), rtol=1e-6)


@pytest.mark.cpu
def test_values_with_other_readers_match_jax():
    def function(x, i, u):
        first = x.at[i].set(u)
        second = first.at[i[::-1]].add(u)
        return second, first * second

    assert len(copies(steps_of(function))) == 2
    got = aotc.load(aotc.compile(function, *ARGUMENTS))(*ARGUMENTS)
    for a, b in zip(got, jax.jit(function)(*ARGUMENTS), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.cpu
def test_two_results_of_one_update_chain_match_jax():
    def function(x, i, u):
        first = x.at[i].set(u)
        return first, first.at[i[::-1]].add(u)

    got = aotc.load(aotc.compile(function, *ARGUMENTS))(*ARGUMENTS)
    for a, b in zip(got, jax.jit(function)(*ARGUMENTS), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.cudasim
def test_row_sums_on_a_gpu_are_copied_once():
    arguments = [np.zeros((5000, 64), "f"), np.zeros(4096, "i4"), np.zeros((4096, 64), "f")]
    _, variant = gpu_program(lambda x, i, u: x.at[i].add(u), arguments)
    steps = list(walk(variant.steps["main"].steps))
    large = [s for s in copies(steps) if s.size == arguments[0].nbytes]
    assert [s.target.kind for s in large] == ["result"]
    assert sum(isinstance(s, Launch) and s.writes[0].kind == "result" for s in steps) == 2


def test_programs_without_updates_have_no_copies():
    assert copies(steps_of(lambda x: jnp.sin(x) @ x.T, ARGUMENTS[:1])) == []
