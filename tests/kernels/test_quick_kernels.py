"""Kernels that are compiled in little time, as at -O0 and -O1: right, no vectors but in tiles, and cached apart."""

import jax
import numpy as np
import pytest
from support.differential import normal

import aotc
from aotc.ir.loop_parser import parse_kernel
from aotc.kernels import back_end
from aotc.kernels.cpu.compile import compile_kernel, optimized_module
from aotc.kernels.limits import QUICK_LEVEL
from aotc.kernels.workers import cache
from aotc.targets import TARGETS, host
from aotc.tools.native_code import disassemble
from aotc.vmfb.bundle import open_bundle

pytestmark = pytest.mark.cpu

TARGET = TARGETS["cpu:x86-64-v4"]
SUM = """def k(x: "f32[4, 64]", /, out: "f32[4]", *, grid: "4"):
    for p in parallel(0, 4):
        acc = private("f32[]")
        acc[()] = f32(0.0)
        for i in range(0, 64):
            acc[()] += exp(x[p, i])
        out[p] = acc[()]
"""
TILE = """def k(a: "f32[64, 64]", b: "f32[64, 32]", /, out: "f32[64, 32]", *, grid: "8"):
    for p in parallel(0, 8):
        tile(out, a, b, rows=8, cols=32, out_base=256*p, out_row=32, a_base=512*p, a_row=64, b_base=0, \
levels=[(64, 1, 32)], form="f32")
"""


def test_loops_are_not_made_vectors():
    text = {quick: str(optimized_module(parse_kernel(SUM), TARGET, quick)) for quick in (False, True)}
    assert "x float>" in text[False]
    assert "x float>" not in text[True]


def test_tiles_keep_their_sums_in_registers():
    """Without a level of code generation each product's sum goes to the stack and back."""
    kernel = parse_kernel(TILE)
    module = optimized_module(kernel, TARGET, quick=True)
    code = [back_end.target_machine(TARGET, level).emit_assembly(module) for level in (0, 1)]
    assert [text.count("(%rsp), %zmm") > 0 for text in code] == [True, False]
    assert compile_kernel(kernel, TARGET, quick=True) == back_end.emit_object(module, TARGET, 1)


def test_what_is_quick_is_cached_apart():
    assert cache.key_of(SUM, host()) != cache.key_of(SUM, host(), quick=True)


@pytest.mark.parametrize("level", range(QUICK_LEVEL + 2))
def test_only_low_levels_are_quick(level):
    bundle = open_bundle(aotc.compile(lambda x: x + 1, normal(640), target=TARGET.name, opt_level=level))
    (variant,) = bundle.manifest["variants"]
    assert ("zmm" in disassemble(bundle.checked(variant["library"]), 0, 1 << 40)) == (level > QUICK_LEVEL)


@pytest.mark.parametrize("level", [0, 1])
def test_results(level):
    def f(x, w):
        y = jax.nn.gelu(x @ w)
        return jax.nn.softmax(y, -1), jax.numpy.sort(y, 1), jax.lax.erf_inv(y / (1 + abs(y)))

    x, w = normal(33, 40), normal(40, 48, seed=1)
    for got, want in zip(aotc.load(aotc.compile(f, x, w, opt_level=level))(x, w), jax.jit(f)(x, w), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5)
