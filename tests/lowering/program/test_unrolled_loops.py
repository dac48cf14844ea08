"""Kernels of whole loops unroll loops of little code, and no copies between arrays in memory."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

pytest.importorskip("numba")

import aotc
from aotc.frontend.importer import import_model
from aotc.ir.loop.ir import For, walk
from aotc.ir.loop.parser import parse_kernel
from aotc.ir.loop.run import run_kernel
from aotc.lowering.lower import lower
from aotc.lowering.program.while_kernels.unrolled_loops import (
    COMPLEX_CODE,
    LOOP_CODE,
    TILE_CODE,
    UNROLLED_CODE,
    code_size,
    roll_long_loops,
)
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.targets import resolve_targets

pytestmark = [pytest.mark.cpu]

KERNEL = '''def k(a: "{dtype}[8, 24]", /, o: "{dtype}[8, 24]", *, grid: "1"):
{body}
'''


def kernel_of(body, dtype="f32"):
    lines = "\n".join("    " + line for line in body.strip("\n").splitlines())
    return parse_kernel(KERNEL.format(dtype=dtype, body=lines))


def loops(body):
    return {s.var: s.kind for s in walk(body) if isinstance(s, For)}


def rolled(text, dtype="f32"):
    """Return the kinds of the loops after the pass; check that the kernel computes what it did."""
    kernel = kernel_of(text, dtype)
    after = replace(kernel, body=roll_long_loops(kernel.body))
    values = np.random.default_rng(0).standard_normal((8, 24)).astype("float32")
    values = values + 1j * values[::-1] if dtype == "c64" else values
    outs = [np.zeros_like(values) for _ in range(2)]
    for one, out in zip((kernel, after), outs):
        run_kernel(one, [values, out])
    np.testing.assert_array_equal(*outs)
    return loops(after.body)


TINY = """
v = private("f32[4]")
for i in unroll(0, 4):
    v[i] = a[i, 0] * a[i, 1]
for j in unroll(0, 4):
    o[j, 0] = v[j] + v[3]
"""
AROUND_A_LONG_LOOP = """
for i in unroll(0, 8):
    for j in range(0, 24):
        o[i, j] = a[i, j] * a[i, 0] + a[i, 1]
"""
COPIES = """
v = private("f32[8, 24]")
for c in unroll(0, 8):
    for d in unroll(0, 2):
        v[c, d] = a[c, d]
for i in range(0, 8):
    o[i, 0] = v[i, 0] * v[i, 1]
"""
REGISTERS = """
v = private("f32[8]")
for c in unroll(0, 8):
    v[c] = a[c, 0]
for i in unroll(0, 8):
    o[i, 0] = v[i] * v[7]
"""


def test_short_loops_stay_unrolled():
    assert rolled(TINY) == {"i": "unroll", "j": "unroll"}
    assert rolled(REGISTERS) == {"c": "unroll", "i": "unroll"}


def test_a_loop_around_a_long_loop_is_not_unrolled():
    assert rolled(AROUND_A_LONG_LOOP) == {"i": "serial", "j": "serial"}


def test_copies_between_arrays_in_memory_are_not_unrolled():
    assert rolled(COPIES) == {"c": "serial", "d": "serial", "i": "serial"}


LARGE = "\n".join(f"    o[i, {n}] = w[i] * w[i] + w[{n % 8}] * a[i, {n}] - a[{n % 8}, i]" for n in range(24))
BEFORE_A_LARGE_LOOP = f"""
v = private("f32[8]")
w = private("f32[8]")
for c in unroll(0, 8):
    v[c] = a[c, 0]
for k in unroll(0, 8):
    w[k] = SOURCE
for i in unroll(0, 8):
{LARGE}
"""


@pytest.mark.parametrize(("source", "kind"), [("v[k]", "unroll"), ("a[k, 2]", "serial")])
def test_loops_over_an_array_in_memory_are_not_unrolled(source, kind):
    kinds = rolled(BEFORE_A_LARGE_LOOP.replace("SOURCE", source))
    assert kinds == {"c": "unroll", "k": kind, "i": "serial"}


def test_the_unrolling_limit_counts_scalar_operations():
    body = kernel_of("for i in unroll(0, 8):\n    o[i, 0] = a[i, 0] * a[i, 1]").body
    assert code_size(body) == 8 * 4  # 2 loads, a product, a store
    assert UNROLLED_CODE.holds(code_size(body))
    complex_ = kernel_of("for i in unroll(0, 8):\n    o[i, 0] = a[i, 0] * a[i, 1]", "c64").body
    assert code_size(complex_) == 8 * (3 + COMPLEX_CODE.value)
    serial = kernel_of("for i in range(0, 8):\n    o[i, 0] = a[i, 0] * a[i, 1]").body
    assert code_size(serial) == 4 * LOOP_CODE.value
    dear = kernel_of("for i in unroll(0, 8):\n    o[i, 0] = sin(a[i, 0])").body
    assert not UNROLLED_CODE.holds(code_size(dear))
    assert TILE_CODE.value > 0


def recurrence(rows, units):
    def run(h, xs, w):
        step = lambda h, x: (jnp.tanh(x + h @ w), h.sum())
        return lax.scan(step, h, xs)

    rng = np.random.default_rng(0)
    shapes = (rows, units), (20, rows, units), (units, units)
    return run, tuple((rng.standard_normal(s) * 0.4).astype("float32") for s in shapes)


def lowered(function, args):
    (target,) = resolve_targets("cpu:x86-64-v4")
    options = Options(target="cpu:x86-64-v4")
    model = import_model(jax.export.export(jax.jit(function))(*args))
    return lower(run_passes(model, options), target, options).kernels


@pytest.mark.parametrize(("rows", "units", "unrolled"), [(1, 3, True), (8, 10, False)])
def test_loop_kernels_of_small_and_large_cells_match_jax(rows, units, unrolled):
    function, args = recurrence(rows, units)
    (kernel,) = (k for k in lowered(function, args) if "_loop_" in k.name)
    assert ("unroll" in loops(kernel.body).values()) is unrolled
    got = aotc.load(aotc.compile(function, *args)).invoke("main", *args)
    for ours, theirs in zip(got, jax.tree.leaves(jax.jit(function)(*args)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


def test_code_of_a_loop_kernel_does_not_grow_with_short_axes():
    """A batch of 8 has little more code than a batch of 2: loops around long loops are in the code once."""
    sizes = [
        sum(code_size(k.body) for k in lowered(*recurrence(rows, 10)) if "_loop_" in k.name) for rows in (2, 8)
    ]  # fmt: skip
    assert 0 < sizes[1] < 1.5 * sizes[0]
