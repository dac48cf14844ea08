"""Two elements of bf16 in one register: what is put there, and, on a GPU, that results have the bits of one by one."""

import ctypes

import ml_dtypes
import numpy as np
import pytest
from llvmlite import ir

pytest.importorskip("numba_cuda")

from vmfb.test_cuda import gpu

import aotc
from aotc.kernels.cuda.short_pairs import pack_bf16_pair, unpack_bf16_pair
from aotc.kernels.llvm_types import F32, I32
from benchmarks.engines import load_module

BF16 = ml_dtypes.bfloat16
# Zeros, the smallest, subnormal and largest, neighbours of 1, halves of places, infinities, NaN: each with each.
EDGES = np.array(
    [0, 0x8000, 1, 0x8001, 0x7F, 0x80, 0x3F7F, 0x3F80, 0x3F81, 0xBF80, 0x3F00, 0x4300, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80,
     0x7FC0], np.uint16,
).view(BF16)  # fmt: skip


def test_bf16_pairs_unpack_to_the_packed_values():
    """Compiled for this machine's CPU, for it has no instruction of a GPU."""
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(I32, [F32, F32, F32.as_pointer()]), "both")
    b = ir.IRBuilder(function.append_basic_block())
    low, high, found = function.args
    pair = pack_bf16_pair(b, low, high)
    for n, value in enumerate(unpack_bf16_pair(b, pair)):
        b.store(value, b.gep(found, [ir.Constant(I32, n)]))
    b.ret(pair)
    engine = load_module(str(module))
    kinds = [ctypes.c_uint32, ctypes.c_float, ctypes.c_float, ctypes.POINTER(ctypes.c_float)]
    both = ctypes.CFUNCTYPE(*kinds)(engine.get_function_address("both"))
    for x in EDGES[:-1]:
        for y in EDGES[:-1]:
            parts = (ctypes.c_float * 2)()
            pair = both(float(x), float(y), parts)
            assert pair == int(x.view(np.uint16)) | int(y.view(np.uint16)) << 16
            assert np.array(parts, np.float32).tobytes() == np.array([x, y]).astype(np.float32).tobytes()


class TestBitsOfPairs:
    """On a GPU they are those of one by one."""

    pytestmark = gpu

    def test_bits_of_bf16_arithmetic_agree_with_numpy(self):
        """Sums, differences, products and roundings to bf16 of edges, beside NumPy's, which are rounded from f32."""
        import jax
        import jax.numpy as jnp

        def function(a, b, f):
            return a + b, a - b, a * b, f.astype(jnp.bfloat16), f.astype(jnp.bfloat16) * a

        a, b = (x.ravel() for x in np.meshgrid(EDGES, EDGES))
        a, b = np.resize(a, 4096), np.resize(b, 4096)
        f = np.random.default_rng(0).standard_normal(4096).astype("f4")
        f[:8] = [np.inf, -np.inf, 3.4e38, 1e-45, -0.0, 1.00390625, 1.01171875, -1.00390625]
        short = f.astype(BF16)
        with np.errstate(all="ignore"):
            wide = [x.astype("f4") for x in (a, b, short)]
            wanted = [wide[0] + wide[1], wide[0] - wide[1], wide[0] * wide[1], f, wide[2] * wide[0]]
            wanted = [x.astype(BF16) for x in wanted]
        module = aotc.load(aotc.compile(jax.jit(function), a, b, f, target="cuda:sm_90a"), devices="cuda")
        for found, want in zip(module.invoke("main", a, b, f), wanted, strict=True):
            nan = np.isnan(want)
            assert np.array_equal(np.isnan(found), nan)
            assert np.array_equal(found.view(np.uint16)[~nan], want.view(np.uint16)[~nan])
