"""``--shared-memory-limit`` holds for every kernel of a GPU: what does not fit has smaller tiles, or another form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.differential import close, integers, normal
from support.gpu_program import gpu_program, run_gpu_program

from aotc.frontend.importer import import_raw
from aotc.frontend.mlir import fetch
from aotc.ir.loop.scratch import shared_bytes
from aotc.lowering.lower import lower
from aotc.lowering.plans.gpu_scatters import CROWDED_UPDATES
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.targets import resolve_targets

STATIC, OPT_IN = 48 << 10, 227 << 10
TARGETS = ("cuda:sm_80", "cuda:sm_86", "cuda:sm_90", "cuda:sm_90a")
DTYPES = ("bfloat16", "float16", "float32", "int8")


def kernels(function, arguments, **flags):
    options = Options(**flags)
    module = run_passes(import_raw(fetch(jax.jit(function), tuple(arguments), {}), options=options), options)
    return lower(module, resolve_targets(options.target)[0], options).kernels


def shared(kernel):
    """The bytes of shared memory of a block: those of the template, or of the kernel's arrays."""
    if kernel.tiling is not None:
        return kernel.tiling.shared
    return shared_bytes(kernel.body)


def blank(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def gemm(x, w):
    exact = jnp.int32 if x.dtype == jnp.int8 else None
    return jax.lax.dot(x, w, preferred_element_type=exact)


def conv(x, w):
    return jax.nn.relu(jax.lax.conv_general_dilated(x, w, (1, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))


def heads(x, w):
    return jnp.einsum("bqhd,bkhd->bhqk", x, w)


def attention(q, k, v):
    return jax.nn.dot_product_attention(q, k, v)


PRODUCTS = {
    **{f"gemm of {d}": (gemm, [blank(512, 256, dtype=d), blank(256, 384, dtype=d)]) for d in DTYPES},
    **{f"odd sizes of {d}": (gemm, [blank(501, 253, dtype=d), blank(253, 387, dtype=d)]) for d in DTYPES},
    **{f"conv of {d}": (conv, [blank(4, 28, 28, 64, dtype=d), blank(3, 3, 64, 96, dtype=d)]) for d in DTYPES[:3]},
    "heads": (heads, [blank(2, 128, 4, 64, dtype="bfloat16")] * 2),
    "long sums": (gemm, [blank(64, 65536, dtype="bfloat16"), blank(65536, 64, dtype="bfloat16")]),
}


def crowded(x, where):
    return jax.ops.segment_sum(x, where, 1000)


OTHERS = {
    "attention": (attention, [blank(2, 300, 4, 64, dtype="bfloat16")] * 3),
    "wide attention": (attention, [blank(2, 1024, 4, 128, dtype="bfloat16")] * 3),
    "one row": (gemm, [blank(1, 4096, dtype="bfloat16"), blank(4096, 512, dtype="bfloat16")]),
    "gemm of highest": (lambda x, w: jnp.dot(x, w, precision="highest"), [blank(512, 256), blank(256, 384)]),
    "transpose": (lambda x: x.T + 1, [blank(512, 512)]),
    "sum of columns": (lambda x: x.sum(0), [blank(4096, 512)]),
    "softmax": (jax.nn.softmax, [blank(512, 16384)]),
    "sort": (jnp.sort, [blank(100_000)]),
    "top_k": (lambda x: jax.lax.top_k(x, 16), [blank(64, 8192)]),
    "cumsum": (lambda x: jnp.cumsum(x, 1), [blank(64, 8192)]),
    "crowded": (crowded, [blank(100_000), blank(100_000, dtype="int32")]),
    "fft": (jnp.fft.fft, [blank(64, 4096, dtype="complex64")]),
    "cholesky": (jnp.linalg.cholesky, [blank(8, 128, 128)]),
    "triangular solve": (
        lambda a, b: jax.lax.linalg.triangular_solve(a, b, left_side=True), [blank(8, 128, 128), blank(8, 128, 20)]
    ),
}


@pytest.mark.ir
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", [*PRODUCTS, *OTHERS])
def test_no_kernel_exceeds_the_shared_memory_limit(name, target):
    for limit in (0, OPT_IN, STATIC, 4096, 300, 33, 1):
        most = min(limit or OPT_IN, resolve_targets(target)[0].shared_memory)
        for kernel in kernels(*{**PRODUCTS, **OTHERS}[name], target=target, shared_memory_limit=limit):
            assert shared(kernel) <= most, limit


SMALL = {
    "cumsum": (lambda x: jnp.cumsum(x, -1), [blank(64, 3000)]),
    "cumsum of bf16": (lambda x: jnp.cumsum(x, -1), [blank(64, 3000, dtype="bfloat16")]),
    "cummax from the end": (lambda x: jax.lax.cummax(x, 1, reverse=True), [blank(64, 3000)]),
    "cumprod of c64": (lambda x: jnp.cumprod(x, 1), [blank(64, 3000, dtype="complex64")]),
    "windows as long as a row": (
        lambda x: jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 3000), (1, 1), ((0, 0), (2999, 0))), [blank(64, 3000)],
    ),
    "segment_max": (lambda x, i: jax.ops.segment_max(x, i, 10), [blank(100_000), blank(100_000, dtype="int32")]),
    "softmax": (jax.nn.softmax, [blank(64, 512)]),
    "sum": (lambda x: x.sum(-1), [blank(64, 3000)]),
    "triangular solve": (
        lambda a, b: jax.lax.linalg.triangular_solve(a, b, left_side=True), [blank(8, 24, 24), blank(8, 24, 5)],
    ),
}  # fmt: skip


@pytest.mark.ir
@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90"])
@pytest.mark.parametrize("name", SMALL)
def test_small_shared_memory_limits_are_respected(name, target):
    """From 80 bytes on a block of one thread had room for a scan, whose first thread has no total before it."""
    for limit in range(1, 201, 7):
        for kernel in kernels(*SMALL[name], target=target, shared_memory_limit=limit):
            assert shared(kernel) <= limit


ODD = {
    "fft": (jnp.fft.fft, [blank(64, 99, dtype="complex64")]),
    "fft of real numbers": (jnp.fft.rfft, [blank(64, 90)]),
    "segment_max": (lambda x, i: jax.ops.segment_max(x, i, 13), [blank(100_000), blank(100_000, dtype="int32")]),
    "cumsum": (lambda x: jnp.cumsum(x, 1), [blank(64, 999)]),
    "sort": (jnp.sort, [blank(64, 301)]),
    "cholesky": (jnp.linalg.cholesky, [blank(8, 33, 33)]),
    "softmax": (jax.nn.softmax, [blank(7, 16387)]),
}


@pytest.mark.ir
@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90"])
@pytest.mark.parametrize("name", ODD)
def test_a_limit_one_byte_below_the_use_is_respected(name, target):
    """Arrays are padded to whole vectors: a plan that counts their elements alone exceeds such a limit."""
    used = limit = resolve_targets(target)[0].shared_memory
    while used > 1:
        used = max(shared(kernel) for kernel in kernels(*ODD[name], target=target, shared_memory_limit=limit))
        assert used <= limit
        limit = used - 1


@pytest.mark.ir
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", PRODUCTS)
def test_matmuls_use_tensor_cores_if_smaller_tiles_fit(name, target):
    """In 48 KiB there is room for tiles of two slices; in 4 KiB for none, but for a block that adds in registers."""

    def multiplied(limit):
        found = kernels(*PRODUCTS[name], target=target, shared_memory_limit=limit)
        return [k.tiling for k in found if k.tiling is not None], max(map(shared, found))

    whole, _ = multiplied(OPT_IN)
    small, _ = multiplied(STATIC)
    none, taken = multiplied(4096)
    assert [t.is_wgmma for t in small] == [t.is_wgmma for t in whole]
    assert len(whole) == 1
    assert none == []
    assert 0 < taken <= 4096


ROUND = {
    "gemm": (gemm, [normal(33, 72), normal(72, 27)], 4096),
    "conv": (conv, [normal(1, 8, 9, 8), normal(3, 3, 8, 24)], 4096),
    "sort": (jnp.sort, [normal(150)], 300),
    "sort in no memory": (jnp.argsort, [integers(90, low=0, high=9)], 1),
    "top_k in no memory": (lambda x: jax.lax.top_k(x, 3), [integers(2, 70).astype("float32")], 1),
    "cumsum": (lambda x: jnp.cumsum(x, 1), [integers(2, 150).astype("float32")], 300),
    "cumsum of few threads": (lambda x: jnp.cumsum(x, 1), [integers(2, 150).astype("float32")], 170),
    "cumsum in no memory": (lambda x: jnp.cumsum(x, 1), [integers(2, 150).astype("float32")], 1),
    "crowded in no memory": (
        lambda x, i: jax.ops.segment_sum(x, i, 7),
        [integers(600).astype("float32"), integers(600, low=0, high=7)], 1,
    ),
}  # fmt: skip


@pytest.mark.ir
@pytest.mark.parametrize("name", ROUND)
def test_shared_memory_limits_do_not_change_results(name, monkeypatch):
    monkeypatch.setattr(CROWDED_UPDATES.__class__, "__setattr__", object.__setattr__)
    monkeypatch.setattr(CROWDED_UPDATES, "default", 500)
    function, arguments, limit = ROUND[name]
    program = gpu_program(function, arguments, shared_memory_limit=limit)
    taken = max(map(shared, program[1].kernels))
    assert taken == 0 if limit == 1 else 0 < taken <= limit
    got = run_gpu_program(*program, [np.asarray(x) for x in arguments])
    close(got, jax.tree.leaves(jax.jit(function)(*arguments)), factor=4)
