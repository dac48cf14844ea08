"""Kernels that read equal parts of arrays at different places become one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.differential import normal

import aotc
from aotc.diagnostics import InternalError
from aotc.ir.loop.parser import parse_kernel
from aotc.lowering import lower as lowering
from aotc.lowering.program.merge_by_offsets import rows_read_by_kernel
from aotc.vmfb.bundle import open_bundle

pytestmark = pytest.mark.cpu

ROWS = 12


def kernels_of(bundle):
    """Return how many kernels a bundle has."""
    (variant,) = open_bundle(bundle).manifest["variants"]
    return len(variant["kernels"])


def unrolled(x, w):
    h = jnp.zeros((4, 16), "float32")
    for n in range(ROWS):
        h = jnp.tanh(x[n] + h) * w[n % 3, :16]
    return h


@pytest.mark.parametrize("threads", [1, 3])
def test_unrolled_iterations_share_a_few_kernels(threads):
    x, w = normal(ROWS, 4, 16), normal(3, 32, seed=1)
    bundle = aotc.compile(unrolled, x, w, verify_each=True, opt_level=1)
    assert kernels_of(bundle) < ROWS
    got = aotc.load(bundle, threads=threads)(x, w)
    np.testing.assert_allclose(got, jax.jit(unrolled)(x, w), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("width", "kernels"), [(16, 1), (24, 2), (3, 4)])
def test_only_aligned_parts_share_a_kernel(width, kernels, monkeypatch):
    """Rows of 64, 96 and 12 bytes: a multiple of 64 is each of them, every second one, and every 16th."""
    monkeypatch.setattr(lowering, "merge_by_sizes", lambda *_: {})  # a row may be a number that a kernel is given

    def rows(x):
        return [jnp.tanh(x[n : n + 1]) for n in (0, 2, 5, 7)]

    x = normal(32, width)
    bundle = aotc.compile(rows, x, verify_each=True, cache=False)
    assert kernels_of(bundle) == kernels
    for got, want in zip(aotc.load(bundle)(x), jax.jit(rows)(x), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_parts_of_a_computed_array_share_a_kernel():
    """Parts of the arena; what reads them waits for who writes them, and for no other part's bytes."""

    def parts(x):
        y = jnp.cumsum(x, 1)
        return [jnp.sin(y[n]) for n in range(8)], y

    x = normal(8, 32)
    bundle = aotc.compile(parts, x, verify_each=True)
    assert kernels_of(bundle) == 2
    got, want = aotc.load(bundle, threads=2)(x), jax.jit(parts)(x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_compiling_merged_parts_twice_gives_the_same_bytes():
    x, w = normal(ROWS, 4, 16), normal(3, 32, seed=1)
    assert aotc.compile(unrolled, x, w, cache=False) == aotc.compile(unrolled, x, w, cache=False)


@pytest.mark.parametrize("wrong", [(8,), (64 * 31,)], ids=["not aligned", "beyond"])
def test_the_verifier_finds_a_wrong_part(monkeypatch, wrong):
    share = lowering.merge_by_offsets

    def planted(kernels, programs):
        kernels, programs = share(kernels, programs)
        for program in programs.values():
            for step in program.steps:
                object.__setattr__(step, "begins", wrong)
        return kernels, programs

    monkeypatch.setattr(lowering, "merge_by_offsets", planted)
    with pytest.raises(InternalError, match="bytes of argument 0 from"):
        aotc.compile(lambda x: [jnp.tanh(x[3:5]), jnp.tanh(x[9:11])], normal(32, 16), verify_each=True)


HEAD = 'def k(x: "f32[8, 16]", j: "i32[1]", /, out: "f32[1, 16]", *, grid: "1"{more}):\n'
LOOP = "    for i in range(0, 16):\n        out[0, i] = {value}\n"


@pytest.mark.parametrize(
    ("value", "more", "found"),
    [
        ("x[5, i] + x[6, i]", "", (5, 2)),
        ("x[min(2, i // 4), i]", "", (0, 3)),
        ("x[i // 2, i]", "", None),
        ("x[5, i]", ', aliases: "[(0, 0)]"', None),
        ("out[0, i]", "", None),
    ],
    ids=["two rows", "up to a row", "all rows", "written over", "not loaded"],
)
def test_rows_read_by_kernel_finds_constant_row_ranges(value, more, found):
    parts = rows_read_by_kernel(parse_kernel(HEAD.format(more=more) + LOOP.format(value=value)))
    assert {name: (p.first, p.rows) for name, p in parts.items()} == ({} if found is None else {"x": found})


def test_rows_with_a_runtime_index_are_not_merged():
    text = HEAD.format(more="") + "    t = j[0]\n" + LOOP.format(value="x[t, i]")
    assert rows_read_by_kernel(parse_kernel(text)) == {}


def test_kernels_with_tiles_have_no_row_ranges():
    tile = 'tile(out, x, x, rows=1, cols=16, out_base=0, out_row=16, a_base=0, a_row=16, b_base=0, levels=[(1, 1, 16)]'
    text = HEAD.format(more="") + LOOP.format(value="x[5, i]") + f'    {tile})\n'
    assert rows_read_by_kernel(parse_kernel(text)) == {}
