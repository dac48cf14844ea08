"""How much LLVM is given to compile, which is what compilation takes: kernels and lines of unoptimised IR."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aotc
from aotc.ir.loop.ir import Store, Tile, walk
from aotc.kernels import back_end
from aotc.kernels.cpu.compile import optimized_kernel_module, unoptimized_kernel_module
from aotc.targets import TARGETS

pytestmark = pytest.mark.cpu

TARGET = "cpu:x86-64-v4"
X, W, V = np.ones((32, 100), "float32"), np.ones((100, 128), "float32"), np.ones((128, 10), "float32")
IMAGE, FILTER = np.ones((2, 16, 16, 8), "float32"), np.ones((3, 3, 8, 24), "float32")


def perceptron(x, w, v):
    return jnp.tanh(x @ w + 1) @ v


def convolution(x, w):
    y = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jax.nn.relu(y + 1)


def adam(w, m, v, g):
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    return w - 1e-3 * m / (jnp.sqrt(v) + 1e-8), m, v


# A tenth more than was measured; one of two epilogues more, a loop written out twice, and it is too much.
BUDGETS = [
    (perceptron, (X, W, V), 3, 1160),
    (convolution, (IMAGE, FILTER), 3, 700),
    (adam, (W, W, W, W), 2, 260),  # four vectors an iteration, which no pass of LLVM writes
    (lambda x: jax.nn.softmax(x), (X,), 1, 175),
    (lambda x: jnp.sort(x), (X,), 1, 375),
]


@pytest.mark.parametrize(("function", "args", "kernels", "lines"), BUDGETS)
def test_kernels_and_lines_of_llvm_ir_stay_within_their_budgets(function, args, kernels, lines, compiled):
    found = compiled(function, *args)
    given = sum(str(unoptimized_kernel_module(k, TARGETS[TARGET])).count("\n") for k in found)
    assert len(found) <= kernels
    assert given <= lines, given


@pytest.mark.parametrize("rows", [17, 32, "b"])
def test_tiles_of_any_height_share_an_epilogue(rows, compiled):
    (count,) = jax.export.symbolic_shape("b") if rows == "b" else (rows,)
    found = compiled(lambda x, w: jnp.tanh(x @ w + 1), jax.ShapeDtypeStruct((count, 100), "float32"), W)
    (kernel,) = [k for k in found if any(isinstance(s, Tile) for s in walk(k.body))]
    tiles = {s.rows for s in walk(kernel.body) if isinstance(s, Tile)}
    assert len(tiles) > 1
    assert len([s for s in walk(kernel.body) if isinstance(s, Store)]) == 1


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 9, 13, 17, 26, 27, 40])
def test_a_rest_of_rows_is_what_whole_tiles_give(rows):
    """The tiles of 8, 4, 2 and 1 rows lie in one buffer one after the other; nothing behind the last row is read."""
    (count,) = jax.export.symbolic_shape("b")
    rng = np.random.default_rng(rows)
    x, w = (rng.normal(size=s).astype("float32") for s in ((rows, 100), W.shape))
    function = lambda x, w: jnp.tanh(x @ w + 1)
    ragged = aotc.load(aotc.compile(function, jax.ShapeDtypeStruct((count, 100), "float32"), w))
    (all_at_once,) = ragged.invoke("main", x, w)
    one_by_one = np.concatenate([ragged.invoke("main", x[n : n + 1], w)[0] for n in range(rows)])
    np.testing.assert_array_equal(all_at_once, one_by_one)
    np.testing.assert_allclose(all_at_once, np.tanh(x @ w + 1), rtol=1e-4, atol=1e-5)


def test_tiles_are_not_seen_by_llvms_passes(compiled, monkeypatch):
    """What comes out of them is the tiles as they were written, with the test of each loop at its bottom."""
    (kernel,) = compiled(lambda x, w: jnp.tanh(x @ w + 1), jax.ShapeDtypeStruct((17, 100), "float32"), W)
    seen = []
    plain = back_end.Library.optimize

    def optimize(library, **options):
        seen.append((str(library.module), options["level"]))
        plain(library, **options)

    monkeypatch.setattr(back_end.Library, "optimize", optimize)
    after = str(optimized_kernel_module(kernel, TARGETS[TARGET]))
    ((before, level),) = seen
    assert level == 1
    assert "declare void @tile_f32_" in before.replace('"', "")
    assert "define internal void @tile_f32_" not in before.replace('"', "")
    assert "memory(argmem: readwrite)" in before
    tile = after[after.index("define internal void @tile_f32_") :].partition("\n}")[0]
    assert re.search(r"br i1 %\S+, label %head\S*, label %end", tile)


@pytest.mark.parametrize(("elements", "copies"), [(16384, 1), (20000, 1), (10007, 2)])
def test_loops_over_equal_chunks_are_written_once(elements, copies, compiled):
    """Else LLVM writes one of whole vectors, one of short ones and one of single elements."""
    (kernel,) = compiled(jnp.sin, np.ones(elements, "float32"))
    text = str(optimized_kernel_module(kernel, TARGETS[TARGET]))
    assert len(re.findall(r"call .*@llvm\.rint\.", text)) == copies


def test_a_transform_is_not_seen_by_llvms_passes(compiled, monkeypatch):
    (kernel,) = compiled(jnp.fft.fft, np.ones(4096, "complex64"))
    seen = []
    plain = back_end.Library.simplify

    def simplify(library, unroll):
        seen.append(str(library.module))
        plain(library, unroll)

    monkeypatch.setattr(back_end.Library, "simplify", simplify)
    after = str(optimized_kernel_module(kernel, TARGETS[TARGET]))
    assert seen[0].count("\n") < 100
    assert len(re.findall(r"define internal void @dft_\w+\(", after)) == 1
    assert re.search(r"fadd contract <16 x float>", after)
