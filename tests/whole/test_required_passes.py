"""Optional passes are optional: what the required ones alone make of a model is right, beside XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from jax import export
from support.differential import compare
from support.programs import programs
from support.small_models import MODELS, close

import aotc
from aotc.frontend.mlir import fetch
from aotc.frontend.xla import run_xla

pytestmark = pytest.mark.cpu

SIZES = ({"a": 1, "b": 1}, {"a": 4, "b": 3}, {"a": 7, "b": 5})
REQUIRED = {"bisect": 0, "verify_each": True}
QUICK = settings(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)


@pytest.mark.parametrize("level", [0, 2])
@pytest.mark.parametrize("name", MODELS)
def test_small_models_with_required_passes_only_match_xla(name, level):
    function, weights, x, tolerance = MODELS[name]
    want = jax.jit(function)(weights, x)
    module = aotc.load(aotc.compile(jax.jit(function), weights, x, opt_level=level, **REQUIRED))
    close(module.invoke("main", *weights, x), want, tolerance)
    baked = aotc.load(aotc.compile(jax.jit(lambda x: function(weights, x)), x, opt_level=level, **REQUIRED))
    close(baked.invoke("main", x), want, tolerance)


@settings(QUICK, max_examples=20)
@given(programs(most=6))
def test_programs_of_static_sizes_with_required_passes_only_match_xla(program):
    arrays = program.arrays({})
    with jax.enable_x64(True):
        text = jax.jit(program.function(), keep_unused=True).lower(*arrays).as_text()
    got = aotc.load(aotc.compile(text, opt_level=program.seed % 4, **REQUIRED)).invoke("main", *arrays)
    compare(program, "required passes", got, run_xla(fetch(text), arrays))


@settings(QUICK, max_examples=8)
@given(programs(symbolic=True, most=6))
def test_programs_of_symbolic_sizes_with_required_passes_only_match_xla(program):
    with jax.enable_x64(True):
        exported = export.export(jax.jit(program.function()))(*program.types())
    module = aotc.load(aotc.compile(exported, opt_level=program.seed % 4, **REQUIRED))
    for sizes in SIZES:
        arrays = [program.arrays(sizes)[n] for n in exported.module_kept_var_idx]
        want = run_xla(fetch(exported), arrays)
        compare(program, f"required passes {sizes}", module.invoke("main", *arrays), want)


@pytest.mark.parametrize("dtype", ["int32", "float32", "bool", "complex64", "bfloat16"])
def test_a_concatenation_of_empty_arrays_is_empty(dtype):
    x = jnp.zeros((0, 3), dtype)
    module = aotc.load(aotc.compile(lambda x, y: (jnp.concatenate([x, x]), -y), x, np.float32(2), **REQUIRED))
    empty, negative = module(x, np.float32(2))
    assert (empty.shape, empty.dtype, negative) == ((0, 3), x.dtype, -2)
