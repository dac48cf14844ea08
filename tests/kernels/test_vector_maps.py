"""Kernels that map elements to others: which are emitted as vectors without LLVM's vectorizer, and their results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aotc
from aotc.ir.loop.parser import parse_kernel
from aotc.ir.loop.run import run_kernel
from aotc.kernels import back_end
from aotc.kernels.cpu.compile import optimized_kernel_module
from aotc.kernels.emit.vector.scalar_emitter import needs_no_llvm_passes
from aotc.kernels.emit.vector.vector_loops import vector_loops
from aotc.targets import TARGETS

pytestmark = pytest.mark.cpu

TARGET = TARGETS["cpu:x86-64-v4"]


def kernel(value, n=1000, dtype="f32", before="", aliases=""):
    """The text of a kernel that stores ``value`` for each of ``n`` elements."""
    buffers = ", ".join(f'a{number}: "{dtype}[{n}]"' for number in range(2))
    head = f'def k({buffers}, a2: "i1[{n}]", /, o0: "{dtype}[{n}]", *, grid: "1"{aliases}):'
    return f"{head}\n    for i in range(0, {n}):\n{before}        o0[i] = {value}\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (kernel("a0[i] + a1[i]"), True),
        (kernel("a0[i] + a1[i]", n=1001), True),
        (kernel("a0[i] + a1[i]", dtype="i32"), True),
        (kernel("a0[i] * a1[i] - a0[i]", dtype="u8"), True),
        (kernel("a0[i] ^ a1[i]", dtype="u64"), True),
        (kernel("select(a0[i] > a1[i], a0[i], a1[i])", dtype="i16"), True),
        (kernel("select(a2[i], a0[i], a1[i])"), True),
        (kernel("select(a2[0], a0[i], a1[i])"), False),  # LLVM makes two loops, each with one of the loads
        (kernel("a0[i] + o0[i]"), False),  # LLVM keeps elements in registers between loops
        (kernel("exp(a0[i])"), False),
        (kernel("a0[i] + a1[i]", dtype="bf16"), False),
        (kernel("div(a0[i], a1[i])", dtype="i32"), False),
        (kernel("a0[-i + 999] + a1[i]"), False),
    ],
)
def test_vector_loops_are_those_of_plain_maps(text, expected):
    assert (vector_loops(parse_kernel(text), TARGET) is not None) is expected


@pytest.mark.parametrize(
    ("value", "expected"), [("a0[0] * a1[0]", True), ("select(a2[0], a0[1], a1[2])", True), ("exp(a0[0])", False)]
)
def test_kernels_without_loops_need_no_passes(value, expected):
    text = kernel(value).replace("    for i in range(0, 1000):\n", "").replace("        o0[i]", "    o0[0]")
    assert needs_no_llvm_passes(parse_kernel(text)) is expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_conversions_of_one_element_match_xla(dtype):
    """A wider float keeps the register of a loaded one, but not its bits."""

    def function(x):
        wide = x.astype("float32")
        return wide, jax.lax.bitcast_convert_type(wide, "uint32"), x, (x > 0) & (wide < 3)

    x = jnp.asarray(-1.25, dtype)
    module = aotc.load(aotc.compile(function, x))
    for found, expected in zip(module(x), jax.jit(function)(x), strict=True):
        np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


SCALARS = (
    "bool", "int4", "uint4", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bfloat16",
    "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128",
)  # fmt: skip


@pytest.mark.parametrize("dtype", SCALARS)
def test_single_elements_of_every_dtype_match_jax(dtype):
    """Conversions to every dtype, comparisons, selections and sums, as kernels without loops."""
    is_complex = dtype.startswith("complex")

    def function(x, y):
        others = [to for to in SCALARS if to.startswith("complex") or not is_complex]
        results = [*(x.astype(to) for to in others), jnp.where(x == y, x, y), x != y]
        return results if dtype == "bool" else [*results, x + y, x * y, x - y]

    with jax.enable_x64(True):
        for value in (0, 3) if dtype == "bool" or dtype.startswith("uint") else (-2, 0, 3):
            x, y = jnp.asarray(value).astype(dtype), jnp.asarray(1).astype(dtype)
            module = aotc.load(aotc.compile(function, x, y))
            for found, expected in zip(module(x, y), function(x, y), strict=True):
                assert found.dtype == expected.dtype
                np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


def test_no_pass_vectorizes_a_map(monkeypatch):
    """Four vectors an iteration, and what is left in shorter ones; loads come before stores."""
    monkeypatch.setattr(back_end.Library, "optimize", None)
    text = str(optimized_kernel_module(parse_kernel(kernel("a0[i] + a1[i]", n=1001)), TARGET))
    assert text.count("fadd contract <16 x float>") == 4 + 2  # 64 x 15, 2 x 16, 8 and 1
    assert text.count("fadd contract <8 x float>") == text.count("fadd contract <1 x float>") == 1
    loop = text[text.index("<16 x float>") :]
    assert loop.index("store <16 x float>") > loop.rindex("load <16 x float>", 0, loop.index("br i1"))


def test_a_result_may_overwrite_an_operand():
    text = kernel("a0[i] - a1[i]", n=1001, aliases=', aliases: "[(0, 0)]"')
    assert vector_loops(parse_kernel(text), TARGET) is not None

    def function(x, y):
        return x - y

    x, y = (np.random.default_rng(n).standard_normal(1001).astype("float32") for n in range(2))
    module = aotc.load(aotc.compile(jax.jit(function, donate_argnums=0), x, y))
    (found,) = module.invoke("main", x.copy(), y, donate=True)
    np.testing.assert_array_equal(found, x - y)


def values(dtype, *shape):
    """Random values with the extremes of integers, and NaN, -0.0 and infinity."""
    random, dtype = np.random.default_rng(0), np.dtype(dtype)
    if dtype.kind in "iu":
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        return random.integers(low, high, shape, dtype, endpoint=True)
    x = random.standard_normal(shape).astype(dtype)
    x.flat[::7], x.flat[3::11], x.flat[5::13] = np.nan, -0.0, np.inf
    return x


MAPS = (
    lambda x, y, b: x + y,
    lambda x, y, b: x - b,
    lambda x, y, b: jnp.where(x > y, x, b),
    lambda x, y, b: jnp.concatenate([x, y], 0),
    lambda x, y, b: jnp.where((x < y) & (y <= b), x, y),
    lambda x, y, b: jnp.where(x == y, jnp.ones((), x.dtype), y),
    lambda x, y, b: x != b,
    lambda x, y, b: x * y,
    lambda x, y, b: x ^ y if x.dtype.kind in "iu" else -x,
)


@pytest.mark.parametrize("target", ["cpu:x86-64-v2", "cpu:x86-64-v3", "cpu"])
@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
)
def test_maps_match_xla_bit_for_bit(dtype, target):
    """Rows that are shorter than a vector, fill vectors, and leave a remainder."""
    with jax.enable_x64(True):
        for shape in ((7,), (33,), (1000,), (5, 129), (3, 4, 257)):
            x, y, b = values(dtype, *shape), values(dtype, *shape)[..., ::-1].copy(), values(dtype, shape[-1])

            def function(x, y, b):
                return tuple(f(x, y, b) for f in MAPS)

            module = aotc.load(aotc.compile(function, x, y, b, target=target, opt_level=2 if len(shape) > 1 else 3))
            for found, expected in zip(module(x, y, b), jax.jit(function)(x, y, b), strict=True):
                np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("n", [5, 1001, 4096])
def test_a_masked_map_matches_the_interpreter_and_writes_no_other_memory(n):
    """The interpreter of the loop IR is the oracle; memory behind the arrays stays untouched."""
    text = kernel("select(a2[i] & (a0[i] < a1[i]), a0[i] * a1[i], a1[i])", n=n)
    made = parse_kernel(text)
    a, b = values("float32", n), values("float32", n)[::-1].copy()
    mask = a > 0
    expected = np.zeros(n, "float32")
    run_kernel(made, [a, b, mask, expected])

    def function(a, b, mask):
        return jnp.where(mask & (a < b), a * b, b)

    out = np.full(n + 64, 7, "float32")
    module = aotc.load(aotc.compile(function, a, b, mask))
    module.invoke("main", a, b, mask, out=[out[:n]])
    np.testing.assert_array_equal(out[:n], expected)
    assert (out[n:] == 7).all()
