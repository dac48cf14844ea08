"""What kernels compute on a GPU within ``--shared-memory-limit``: smaller tiles, and other forms, of one program."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowering.test_shared_limits import OPT_IN, STATIC, attention, conv, crowded, gemm
from support.differential import integers, normal
from vmfb.test_cuda import gpu

import aotc
from aotc.tools.explain.fusion import explain_fusion
from aotc.vmfb.bundle import open_bundle

pytest.importorskip("numba_cuda")

LIMITS = (4096, STATIC, OPT_IN)
SHORT = jnp.bfloat16
BOUND = {"int32": 0.0, "int8": 0.0, "bfloat16": 1e-2, "float16": 1e-3, "float32": 2e-3, "complex64": 1e-5}
"""Of the whole result; f32 is multiplied as TF32 where the program does not say otherwise."""


def short(*shape, seed=0, scale=1.0):
    return normal(*shape, seed=seed, scale=scale).astype(SHORT)


def softmax_mul(x, b):
    return jnp.tanh(jax.nn.softmax(x) * b)


def groupnorm_silu(x):
    mean = x.mean((2, 3), keepdims=True)
    y = (x - mean) * jax.lax.rsqrt(((x - mean) ** 2).mean((2, 3), keepdims=True) + 1e-5)
    return y * jax.nn.sigmoid(y)


def solve(a, b):
    return jax.lax.linalg.triangular_solve(a, b, left_side=True, lower=True)


TEMPLATES = {
    "gemm of bf16": (gemm, lambda: [short(512, 256), short(256, 384, seed=1)]),
    "gemm of f16": (gemm, lambda: [normal(512, 256).astype("f2"), normal(256, 384, seed=1).astype("f2")]),
    "gemm of f32": (gemm, lambda: [normal(501, 253), normal(253, 387, seed=1)]),
    "gemm of i8": (gemm, lambda: [integers(512, 256, dtype="int8"), integers(256, 384, dtype="int8", seed=1)]),
    "conv": (conv, lambda: [short(4, 28, 28, 64), short(3, 3, 64, 96, seed=1)]),
    "attention": (attention, lambda: [short(2, 300, 4, 64, seed=n) for n in range(3)]),
}
OTHERS = {
    "gemm of highest": (
        lambda x, w: jnp.dot(x, w, precision="highest"), lambda: [normal(512, 256), normal(256, 384, seed=1)],
    ),
    "softmax_mul": (softmax_mul, lambda: [normal(32, 262144), normal(32, 262144, seed=1, scale=1e4)]),
    "groupnorm_silu": (groupnorm_silu, lambda: [normal(1, 32, 16, 16384)]),
    "transpose": (lambda x: x.T + 1, lambda: [normal(512, 512)]),
    "sum of columns": (lambda x: x.sum(0), lambda: [normal(4096, 512)]),
    "sort": (jnp.sort, lambda: [normal(100_000)]),
    "top_k": (lambda x: jax.lax.top_k(x, 16), lambda: [normal(64, 8192)]),
    "cumsum": (lambda x: jnp.cumsum(x, 1), lambda: [normal(64, 8192)]),
    "crowded": (crowded, lambda: [normal(100_000), integers(100_000, low=0, high=1000)]),
    "fft": (jnp.fft.fft, lambda: [normal(64, 4096).astype("complex64")]),
    "triangular solve": (
        solve, lambda: [normal(8, 128, 128, scale=0.01) + 2 * np.eye(128, dtype="f4"), normal(8, 128, 20)],
    ),
}
CASES = {**TEMPLATES, **OTHERS}


@cache
def wanted(name):
    """The arguments of a case, and what XLA makes of them on the CPU."""
    function, make = CASES[name]
    arrays = make()
    with jax.default_matmul_precision("highest"):
        return arrays, [np.asarray(x) for x in jax.tree.leaves(jax.jit(function)(*arrays))]


def check(name, target, limit, **flags):
    """Compile a case within ``limit`` and compare it; return its bundle and the results."""
    arrays, want = wanted(name)
    data = aotc.compile(jax.jit(CASES[name][0]), *arrays, target=target, shared_memory_limit=limit, **flags)
    got = [np.asarray(x) for x in aotc.load(data).invoke("main", *arrays)]
    for x, y in zip(got, want, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        wide = "c16" if y.dtype.kind == "c" else "f8"
        a, b = x.astype(wide), y.astype(wide)
        exact = name.startswith(("sort", "top_k", "transpose"))
        bound = 0.0 if exact else BOUND[y.dtype.name] if name in TEMPLATES else min(BOUND[y.dtype.name], 1e-5)
        assert np.linalg.norm(a - b) <= bound * np.linalg.norm(b)
    return data, got


ROWS = {  # of few partial results each: they take less than a tile of anything
    "softmax": (jax.nn.softmax, (64, 512)),
    "variance": (lambda x: x.var(-1), (64, 1000)),
    "argmax": (lambda x: jnp.argmax(x, -1), (64, 2048)),
    "norm of few rows": (lambda x: (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True), (4, 4096)),
    "sum of halves": (lambda x: x.astype(jnp.float16).sum(-1), (64, 3000)),
    "groupnorm_silu": (groupnorm_silu, (1, 8, 16, 64)),
}
SMALL = (8, 16, 31, 32, 33, 48, 64, 79, 80, 128, 300)


QUICK = [("softmax", "cuda:sm_80"), ("groupnorm_silu", "cuda:sm_90a")]


def marked(row):
    return pytest.param(*row, marks=() if row in QUICK else pytest.mark.slow)


@pytest.mark.cudasim
@pytest.mark.parametrize(("name", "target"), [marked((n, t)) for n in ROWS for t in ("cuda:sm_80", "cuda:sm_90a")])
def test_the_linker_counts_what_explain_does(name, target):
    """Each limit from less than one array of partial results to several: obeyed, and both give the same bytes."""
    function, shape = ROWS[name]
    used = set()
    for limit in (*SMALL, 0):
        flags = {"target": target, "shared_memory_limit": limit}
        x = np.zeros(shape, "f4")
        variant = open_bundle(aotc.compile(jax.jit(function), x, **flags)).manifest["variants"][0]
        linked = [kernel["resources"]["shared"] for kernel in variant["kernels"]]
        regions = explain_fusion(jax.jit(function), x, **flags).regions
        said = [region.memory.get("shared memory", (0, limit))[0] for region in regions]
        assert sorted(linked) == sorted(said), limit
        assert max(linked) <= (limit or STATIC)
        used.add(max(linked))
    assert len(used) > 1


class TestSharedLimitsOnAGpu:
    """On the hardware; what the linker counts keeps to the limit."""

    pytestmark = gpu

    @pytest.mark.parametrize("limit", LIMITS)
    @pytest.mark.parametrize("name", CASES)
    def test_within_the_limit(self, name, limit):
        data, _ = check(name, "cuda:sm_90a", limit)
        kernels = open_bundle(data).manifest["variants"][0]["kernels"]
        assert kernels
        for kernel in kernels:
            assert kernel["resources"]["shared"] <= limit, kernel["name"]

    @pytest.mark.parametrize("limit", LIMITS)
    @pytest.mark.parametrize("name", TEMPLATES)
    def test_as_text_for_the_driver(self, name, limit):
        check(name, "cuda:compute_80", limit)

    @pytest.mark.parametrize("limit", LIMITS[:2])
    @pytest.mark.parametrize("name", ["softmax_mul", "groupnorm_silu"])
    def test_fused_and_not(self, name, limit):
        """Long rows do not fit: what is fused to the utmost computes what single ops do."""
        (whole, (fused,)), (alone, (single,)) = (check(name, "cuda:sm_90", limit, opt_level=n) for n in (3, 0))
        np.testing.assert_allclose(fused, single, rtol=1e-5, atol=1e-5)
        count = [len(open_bundle(data).manifest["variants"][0]["kernels"]) for data in (whole, alone)]
        assert count[0] <= count[1]
