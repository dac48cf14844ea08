"""Kernels of whole models: valid loop IR, the same numbers from the loop IR's meaning, the same bytes every time."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.differential import close, integers, load, normal

import aotc
from aotc.frontend.importer import import_model
from aotc.ir.loop.ir import Let, Load, Tile, walk
from aotc.ir.loop.printer import print_kernel
from aotc.ir.loop.run import run_kernel
from aotc.ir.loop.verify import verify_kernel
from aotc.lowering.lower import lower
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.targets import resolve_targets

pytestmark = pytest.mark.cpu

lax = jax.lax


def attention(x, w):
    h = (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    q, k, v = (jnp.reshape(h @ w * s, (2, 3, 2, 4)).transpose(0, 2, 1, 3) for s in (1.0, 0.5, 2.0))
    return x + (jax.nn.softmax(q @ k.swapaxes(-1, -2)) @ v).transpose(0, 2, 1, 3).reshape(x.shape)


def convolution(x, w):
    y = lax.conv_general_dilated(x, w, (2, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return lax.reduce_window(jax.nn.gelu(y), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 1, 2, 1), "SAME").mean((1, 2))


def indexing(x, i):
    return x[i], x.at[i].add(1.5), lax.dynamic_update_slice(x, x[:1] * 2, (i[0], 1)), jnp.sort(x, 0), lax.top_k(x, 2)


def loops(x):
    return lax.fori_loop(0, 3, lambda n, s: (s[1] * 0.5 + x, s[0] - n), (x, x + 1))


def mixed(x, y):
    return jnp.pad(x, 1), jnp.concatenate([x, y * 2]).T, jnp.cumsum(x, 1), x.argmax(0), jnp.where(x > y, x, y).sum(0)


MODELS = {
    "attention": (attention, [normal(2, 3, 8), normal(8, 8, seed=1)]),
    "convolution": (convolution, [normal(1, 6, 5, 3), normal(3, 2, 3, 4, seed=1)]),
    "depthwise": (
        lambda x, w: lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=4
        ),
        [normal(1, 5, 4, 4), normal(3, 3, 1, 4, seed=1)],
    ),
    "indexing": (indexing, [normal(5, 6), integers(3, low=0, high=5)]),
    "rows that are set": (lambda x, i: x.at[i].set(jnp.cos(x[:3])), [normal(5, 6), integers(3, low=0, high=5)]),
    "loops": (loops, [normal(3, 4)]),
    "mixed": (mixed, [normal(4, 5), normal(4, 5, seed=1)]),
    "grad": (jax.grad(lambda x, w: (jnp.tanh(x @ w) ** 2).sum(), (0, 1)), [normal(5, 7), normal(7, 3, seed=1)]),
    "train": (jax.grad(lambda x, w: attention(x, w).sum(), (0, 1)), [normal(2, 3, 8), normal(8, 8, seed=1)]),
    "random": (lambda k: lax.rng_bit_generator(k, (9,)), [np.array([1, 2, 3, 4], "uint32")]),
    "pool-grad": (
        jax.grad(lambda x: (lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (1, 2), "SAME") ** 2).sum()),
        [normal(5, 6)],
    ),
}


def lowered(name, level):
    function, args = MODELS[name]
    (target,) = resolve_targets("cpu")
    options = Options(opt_level=level, target=target.name)
    return lower(run_passes(import_model(jax.jit(function), *args), options), target, options)


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_kernels_of_models_verify(name, level):
    found = {k.name: errors for k in lowered(name, level).kernels if (errors := verify_kernel(k))}
    assert found == {}


@pytest.mark.parametrize("level", [0, 2])
@pytest.mark.parametrize("name", MODELS)
def test_every_loaded_variable_is_used(name, level):
    for kernel in lowered(name, level).kernels:
        text = print_kernel(kernel)
        names = [s.var.name for s in walk(kernel.body) if isinstance(s, Let) and isinstance(s.value, Load)]
        assert [n for n in names if len(re.findall(rf"\b{n}\b", text)) < 2] == []


@pytest.mark.parametrize("level", [0, 2])
@pytest.mark.parametrize("name", MODELS)
def test_each_kernels_machine_code_matches_its_loop_ir(name, level):
    """Every kernel alone: its loop IR on NumPy beside its machine code, on random inputs."""
    for kernel in lowered(name, level).kernels:
        if kernel.dims or any(isinstance(s, Tile) for s in walk(kernel.body)):
            continue
        compare_kernel(kernel)


def compare_kernel(kernel):
    from kernels.jobs.compilers import build_library

    from aotc.targets import host_target
    from aotc.vmfb.dtypes import to_numpy

    r = np.random.default_rng(0)
    arrays = []
    for b in (*kernel.inputs, *kernel.outputs):
        kind = np.dtype(to_numpy(b.dtype))
        small = r.integers(0, 2, b.shape) if kind.kind in "iub" else r.standard_normal(b.shape)
        arrays.append(np.array(small).astype(kind, order="C"))
    wanted = [a.copy() for a in arrays]
    run_kernel(kernel, wanted)
    library = build_library([kernel], host_target(), Options())
    grid = kernel.grid
    got = [a.copy() for a in arrays]
    call_native(library, got, int(grid))
    count = len(kernel.inputs)
    close(got[count:], wanted[count:], 8)


def call_native(library, arrays, grid):
    import ctypes
    import tempfile

    from aotc.vmfb.abi import TABLE_SYMBOL

    with tempfile.NamedTemporaryFile(suffix=".so") as f:
        f.write(library.data)
        f.flush()
        loaded = ctypes.CDLL(f.name)
    (address,) = (ctypes.c_void_p * 1).in_dll(loaded, TABLE_SYMBOL)
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
    pointers = (ctypes.c_void_p * max(len(arrays), 1))(*[a.ctypes.data for a in arrays])
    scratch = np.zeros(library.kernels[0].scratch + 128, np.uint8)
    start = -(-scratch.ctypes.data // 64) * 64
    kind(address)(ctypes.addressof(pointers), None, 0, grid, start)


@pytest.mark.parametrize("name", MODELS)
def test_compiling_a_model_twice_gives_the_same_bytes(name):
    function, args = MODELS[name]
    assert aotc.compile(jax.jit(function), *args) == aotc.compile(jax.jit(function), *args)


def test_results_have_the_same_bits_at_any_thread_count():
    function = lambda x, w: (attention(x, w), (x * x).sum(), jnp.sin(x).mean((0, 1)), jax.nn.softmax(x @ w, 0))
    args = [normal(2, 3, 8), normal(8, 8, seed=1)]
    big = lambda x: (x.sum(), x.sum(0), (x @ x.T).max(), jax.nn.logsumexp(x, 1), jnp.cumsum(x, 0))
    for f, values in ((function, args), (big, [normal(301, 257)])):
        results = [load(f, values, 2, threads=n).invoke("main", *values) for n in (1, 2, 4)]
        for other in results[1:]:
            assert [a.tobytes() for a in other] == [a.tobytes() for a in results[0]]
