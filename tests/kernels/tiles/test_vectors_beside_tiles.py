"""Loops beside tiles: which are written as vectors, that LLVM's passes are left out, and what comes of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import emulated

import aotc
from aotc.ir.loop.ir import Tile, walk
from aotc.ir.loop.parser import parse_kernel
from aotc.ir.loop.run import run_kernel
from aotc.kernels import back_end
from aotc.kernels.cpu.compile import optimized_kernel_module, unoptimized_kernel_module
from aotc.kernels.emit.vector.vector_loops import PIECES, vector_loops
from aotc.targets import TARGETS
from aotc.vmfb.dtypes import to_numpy

pytestmark = pytest.mark.cpu

TARGET = "cpu:x86-64-v4"
X86 = TARGETS[TARGET]


def kernel(value="tile0[r, c] + a2[c]", cols=32, rows=14, iterations=None, extra="", more=""):
    """The text of a kernel that multiplies, and stores ``value`` for each element of a tile."""
    wide = -(-cols // 16) * 16
    return f"""def kernel(a0: "f32[28, 8]", a1: "f32[8, {wide}]", a2: "f32[{wide}]", a3: "i1[{wide}]", \
a4: "f32[28, {wide}]", /, o0: "f32[28, {wide}]", *, grid: "2"):
    for p in parallel(0, 2):
        tile0 = private("f32[{rows}, {wide}]")
        tile(tile0, a0, a1, rows={rows}, cols={wide}, out_base=0, out_row={wide}, a_base=112*p, a_row=8, b_base=0, \
levels=[(8, 1, {wide})])
        for r in range(0, {rows}):{extra}
            for c in range(0, {iterations or cols}):
                o0[r + 14*p, c] = {value}{more}
"""


def are_vectors(text, target=X86):
    """Are all loops beside tiles written as vectors?"""
    return vector_loops(parse_kernel(text), target) is not None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (kernel(), True),
        (kernel(cols=10), True),
        (kernel(cols=PIECES * 16), True),
        (kernel(cols=PIECES * 16 + 16), True),  # in a loop over vectors
        (kernel(cols=PIECES * 16 + 8), True),  # in a loop over vectors, and a remainder
        (kernel(cols=48, iterations="min(-16*p + 32, 32)"), True),
        (kernel(cols=48, iterations="min(-16*p + 16, 32)"), False),  # none in the second item
        (kernel(cols=48, iterations="min(-8*p + 32, 32)"), False),
        (kernel("max(f32(0.0), -tile0[r, c])"), True),
        (kernel("select(tile0[r, c] > a2[c], a2[c], tile0[0, c])"), True),
        (kernel("tile0[r, c] * a2[r]"), True),
        (kernel("select(index(r) < index(3), tile0[r, c], a2[c])"), True),
        (kernel("exp(tile0[r, c])"), False),
        (kernel("select(a3[c], tile0[r, c], a2[c])"), True),
        (kernel("select(a3[c] & (tile0[r, c] > a2[c]), tile0[r, c], a2[c])"), True),
        (kernel("select(a3[c] ^ (tile0[r, c] > a2[c]), tile0[r, c], a2[c])"), True),
        (kernel("div(tile0[r, c], a2[c])"), True),
        (kernel("tile0[r, c] * exp(a2[r])"), False),
        (kernel().replace("o0[r + 14*p, c]", "o0[c, r + 14*p]").replace(" + a2[c]", ""), True),  # turned
        (kernel("select(index(c) < index(3), tile0[r, c], a2[c])"), False),
        (kernel("tile0[r, 0] + a4[c, r]", cols=16), False),
        (kernel("o0[r + 14*p, 0] + tile0[r, c]"), False),
        (kernel("o0[r + 14*p, c] + tile0[r, c]"), True),
        (kernel(extra="\n            o0[r + 14*p, 0] = f32(1.0)"), False),
    ],
)
def test_which_loops_are_vectors(text, expected):
    assert are_vectors(text) is expected


def test_tiles_of_few_bits_have_all_passes():
    text = kernel().replace(')])\n', ')], form=TileForm("f32", "i8", "f32"))\n').replace('a1: "f32', 'a1: "i8')
    assert not are_vectors(text)


def test_few_passes_are_run(monkeypatch):
    monkeypatch.setattr(back_end.Library, "optimize", None)
    text = str(optimized_kernel_module(parse_kernel(kernel()), X86))
    assert "fadd contract <16 x float>" in text


def test_column_operands_are_loaded_before_the_loop_over_rows():
    """The operand of columns, and not that of rows; nothing where rows might be none, or vectors too many."""

    def before(text):
        body = str(unoptimized_kernel_module(parse_kernel(text), X86)).split("@aotc_body(", 1)[1]
        return body.split("\nr:", 1)[0].count("load <16 x float>")

    assert before(kernel()) == 2
    assert before(kernel("tile0[r, c] + a4[r, c]")) == 0
    assert before(kernel().replace("range(0, 14)", "range(0, 2*p)")) == 0
    many = " + ".join(["tile0[r, c]", *(f"a4[{n}, c]" for n in range(9))])
    assert before(kernel(many)) == 0


EPILOGUES = {
    "bias and relu": lambda x, w, b, g: jax.nn.relu(x @ w + b),
    "norm": lambda x, w, b, g: jnp.clip(((x @ w - b) * g) / (1 + b * b), -1.0, 1.0),
    "choice": lambda x, w, b, g: jnp.where(x @ w > b, g, -(x @ w)),
    "mask": lambda x, w, b, g: ((y := x @ w) > b, jnp.where((y > 0) & (b > 0), y, 0)),
    "turned": lambda x, w, b, g: (x @ w).T,
    "two results": lambda x, w, b, g: (jnp.abs(x @ w) * g, jnp.sqrt(b * b) + x @ w),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("target", ["cpu:x86-64-v2", "cpu:x86-64-v3", "cpu"])
@pytest.mark.parametrize("n", [3, 16, 50, 64, 80, 160])
@pytest.mark.parametrize("name", EPILOGUES)
def test_epilogues_of_products(name, n, target, dtype):
    with jax.enable_x64(True):
        r = np.random.default_rng(n)
        x, w, b, g = (r.standard_normal(s).astype(dtype) for s in [(40, 24), (24, n), (n,), (n,)])
        module = aotc.load(aotc.compile(EPILOGUES[name], x, w, b, g, target=target))
        expected = jax.jit(EPILOGUES[name])(x, w, b, g)
        for found, wanted in zip(jax.tree.leaves(module.main(x, w, b, g)), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_numbers_that_are_none_pass_an_epilogue_as_xla_has_them(compiled):
    x = np.resize(np.float32([np.nan, 1.0, np.inf, -0.0, 3.0, -2.0, -np.inf, 0.0, 5.0]), (48, 16))
    w = np.eye(16, 32, dtype="float32")

    def function(x, w):
        return jnp.maximum(x @ w, -0.0), jnp.minimum(x @ w, 0.0)

    kernels = [k for k in compiled(function, x, w) if any(isinstance(s, Tile) for s in walk(k.body))]
    assert any(vector_loops(k, X86) for k in kernels)
    module = aotc.load(aotc.compile(function, x, w))
    for found, wanted in zip(module.main(x, w), jax.jit(function)(x, w), strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.emulated
@pytest.mark.parametrize("name", ["cpu:aarch64", "cpu:aarch64-sve256", "cpu:aarch64-sve512"])
def test_under_qemu(name):
    if emulated.missing(name):
        pytest.skip(f"needs qemu: {emulated.missing(name)}")
    transposed = kernel().replace("o0[r + 14*p, c]", "o0[c, r + 14*p]").replace('o0: "f32[28, 32]', 'o0: "f32[32, 28]')
    masked = kernel("select(a3[c], max(tile0[r, c], a2[c]), -tile0[r, c])", cols=26)
    for text in (transposed.replace(" + a2[c]", ""), masked):
        assert are_vectors(text, TARGETS[name])
        made = parse_kernel(text)
        inputs = [np.resize(np.arange(-7, 8), b.shape).astype(to_numpy(b.dtype)) for b in made.inputs]
        wanted, found = (np.zeros(made.outputs[0].shape, "float32") for _ in range(2))
        run_kernel(made, [*inputs, wanted])
        emulated.run_kernel(made, [*inputs, found], 2, TARGETS[name])
        np.testing.assert_array_equal(found, wanted)
