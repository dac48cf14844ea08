"""Copies that exchange two axes: which are turned in registers, and what they move."""

import jax
import numpy as np
import pytest
from support.scalar_kernels import run

import aotc
from aotc.ir.loop.parser import parse_kernel
from aotc.ir.loop.printer import print_kernel
from aotc.ir.loop.run import run_kernel
from aotc.kernels.cpu.compile import unoptimized_kernel_module
from aotc.kernels.emit.vector.transposes import TRANSPOSED_ELEMENTS, TURNED_LANES
from aotc.targets import TARGETS
from aotc.vmfb.dtypes import to_numpy
from aotc.vmfb.host.machine import cpu_features

pytestmark = pytest.mark.cpu

X86 = TARGETS["cpu:x86-64-v4"]
RUNNABLE = [t for n in "234" if cpu_features().issuperset((t := TARGETS[f"cpu:x86-64-v{n}"]).features)]
FEW = TURNED_LANES


def copy(n, m, dtype="f32", begin="0", swapped=False):
    """The text of a kernel whose two items turn ``m`` rows of ``n`` elements that lie within larger ones."""
    j, i = f"for j in range(0, {m})", f"for i in range({begin}, {begin} + {n}, extent=100)"
    outer, inner = (i, j) if swapped else (j, i)
    shape = f"{dtype}[2, {m + 1}, {n + 9}]", f"{dtype}[2, {n + 9}, {m + 2}, 1]"
    return f"""def kernel(a0: "{shape[0]}", /, o0: "{shape[1]}", *, grid: "2"):
    for p in parallel(0, 2):
        {outer}:
            {inner}:
                o0[p, i, j, 0] = a0[p, j, i]
"""


def is_transposed(text, target=X86):
    """Is there the call of a function that turns?"""
    return "call void @turn_" in str(unoptimized_kernel_module(parse_kernel(text), target))


def filled(kernel, dims=None):
    """An operand that differs everywhere, with bits that are no number, and a result."""
    shapes = [[d if isinstance(d, int) else dims[str(d)] for d in b.shape] for b in (*kernel.inputs, *kernel.outputs)]
    dtype = to_numpy(kernel.inputs[0].dtype)
    count = int(np.prod(shapes[0]))
    bits = np.arange(-(-count * dtype.itemsize // 4), dtype="u4") + 0x7F800000
    if dtype.itemsize < 4:
        bits = np.random.default_rng(0).integers(0, 256, count * dtype.itemsize, dtype="u1")
    return bits.view(dtype).reshape(shapes[0]), np.zeros(shapes[1], kernel_dtype(kernel))


def kernel_dtype(kernel):
    """The NumPy dtype of the result."""
    return to_numpy(kernel.outputs[0].dtype)


SIZES = [(4, 4), (4, 5), (7, 9), (8, 8), (15, 8), (16, 16), (17, 31), (33, 20), (64, 4)]


@pytest.mark.parametrize("target", RUNNABLE, ids=lambda t: t.name)
@pytest.mark.parametrize("dtype", ["f32", "i32", "f64", "c64"])
@pytest.mark.parametrize(("n", "m"), SIZES)
def test_every_element_is_moved_bit_for_bit_and_no_other(n, m, dtype, target):
    for swapped in (False, True):
        text = copy(n, m, dtype, "3*p", swapped)
        assert is_transposed(text, target)
        kernel = parse_kernel(text)
        x, expected = filled(kernel)
        run_kernel(kernel, [x, expected])
        found = np.zeros_like(expected)
        run(kernel, [x, found], 2, target=target)
        assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("target", RUNNABLE, ids=lambda t: t.name)
@pytest.mark.parametrize("dtype", ["i8", "bf16"])
@pytest.mark.parametrize(("n", "m"), [(16, 16), (17, 31), (33, 20), (64, 16), (16, 65), (64, 64), (100, 130)])
def test_short_elements_are_moved_as_bytes(n, m, dtype, target):
    test_every_element_is_moved_bit_for_bit_and_no_other(n, m, dtype, target)


SYMBOLIC = """def kernel(a0: "f32[16, k]", /, o0: "f32[k, r]", *, k: "dim(lo=8)", r: "dim(lo=16)", grid: "2"):
    for p in parallel(0, 2):
        for i in range(0, 8):
            for j in range(8*p, 8*p + 8, extent=16):
                o0[i, j] = a0[j, i]
"""


@pytest.mark.parametrize("target", RUNNABLE, ids=lambda t: t.name)
def test_distances_that_only_a_call_knows(target):
    assert is_transposed(SYMBOLIC, target)
    dims = {"k": 13, "r": 19}
    kernel = parse_kernel(SYMBOLIC)
    x, expected = filled(kernel, dims)
    run_kernel(kernel, [x, expected], dims)
    found = np.zeros_like(expected)
    run(kernel, [x, found], 2, [dims[name] for name in kernel.dims], target=target)
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (copy(FEW, FEW), True),
        (copy(FEW - 1, 64), False),
        (copy(64, FEW - 1), False),
        (copy(64, TRANSPOSED_ELEMENTS // 64), True),
        (copy(64, TRANSPOSED_ELEMENTS // 64 + 1), False),
        (copy(16, 16, "bf16"), True),
        (copy(8, 8, "bf16"), True),
        (copy(7, 8, "bf16"), False),
        (copy(16, 16, "i8"), True),
        (copy(16, 15, "i8"), False),
        (copy(16, 16, "c128"), False),
        (copy(16, 16).replace("a0[p, j, i]", "-a0[p, j, i]"), False),
        (copy(16, 16).replace("a0[p, j, i]", "a0[p, i, j]"), False),
        (copy(16, 16).replace("a0[p, j, i]", "a0[p, j, min(i, 9)]"), False),
        (copy(16, 16).replace("o0[p, i, j, 0]", "o0[p, i, (j // 2) + 8*(j % 2), 0]"), False),
        (copy(16, 16).replace("range(0, 16)", "range(0, 16*p)"), False),
    ],
)
def test_transposed_loops_are_recognised(text, expected):
    assert is_transposed(text) is expected


@pytest.mark.parametrize("dtype", ["float32", "int32", "complex64"])
@pytest.mark.parametrize(
    ("shape", "expected"), [((600, 15), True), ((512, 512), True), ((600, 48), True), ((509, 17), False)]
)
def test_a_matrix_that_is_turned(shape, expected, dtype, compiled):
    """Items are rows in equal parts; where there are none, the last one is shorter: only a call knows it."""
    x = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    (made,) = compiled(lambda x: x.T, x)
    assert is_transposed(print_kernel(made)) is expected
    np.testing.assert_array_equal(aotc.load(aotc.compile(lambda x: x.T, x)).main(x), x.T)


@pytest.mark.parametrize("n", [32, 40, 100])
def test_a_turned_operand_of_a_product(n):
    """Its panels have 32 columns, which lie apart in it."""
    x, y = (np.random.default_rng(k).standard_normal(s).astype("float32") for k, s in enumerate([(16, n), (n, n)]))
    module = aotc.load(aotc.compile(lambda x, y: x @ y.T, x, y))
    np.testing.assert_allclose(module.main(x, y), jax.jit(lambda x, y: x @ y.T)(x, y), rtol=1e-4, atol=1e-4)
