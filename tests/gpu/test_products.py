"""Products of whole programs on a CUDA target: which kernels they become, and what those compute."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support.halves import half_of_pairs
from support.small_models import array
from vmfb.simulated_gpu import install
from vmfb.test_cuda import gpu, sim

import aotc
from aotc.ir.loop.forms.tiling import Wgmma
from aotc.ir.loop.parser import parse_kernel
from aotc.vmfb.bundle import open_bundle

pytest.importorskip("numba_cuda")

BF16, E4M3, E5M2 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2


def short(*shape, seed=0, dtype=BF16):
    return array(*shape, seed=seed).astype(dtype)


def wide(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def heads(x, w):
    """Attention's scores: the heads of both operands are turned."""
    b, s, d = x.shape
    q = (x @ w).reshape(b, s, 4, d // 4).transpose(0, 2, 1, 3)
    return jnp.einsum("bhqd,bhkd->bhqk", q, x.reshape(b, s, 4, d // 4).transpose(0, 2, 1, 3))


def dense(x, w, b):
    return x + jax.nn.gelu(x @ w + b)


def widened(x, w):
    return x.astype(jnp.float32) @ w.astype(jnp.float32)


def integers(x, w):
    return jax.lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32)


def two_results(x, w):
    y = x @ w
    return y, jnp.maximum(y, 0).T


def nt(x, w):
    return x @ w.T


def wide_result(x, w):
    return jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def scaled(x, w):
    """What a quantised layer says: operands are widened, products scaled."""
    return (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)) * jnp.bfloat16(0.5)


def decode(p, v):
    """One query's sum of the values that each head weighs."""
    return jnp.einsum("bhs,bshd->bhd", p, v)


def weigh(p, v):
    """The values of each head lie by rows, and results stand between those of others."""
    return jnp.einsum("bhqk,bkhd->bqhd", p, v)


def exact(x, w):
    return jnp.dot(x, w, precision="highest")


def convolution(x, w):
    y = jax.lax.conv_general_dilated(x, w, (1, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jax.nn.relu(y)


def int8(*shape, seed=0):
    return np.random.default_rng(seed).integers(-128, 128, shape).astype(np.int8)


# Function, operands, how many kernels have a tiling, and the bound of the error relative to the largest element.
CASES = {
    "bf16": (jnp.matmul, (short(40, 64), short(64, 48, seed=1)), 1, 8e-3),
    "f16": (jnp.matmul, (short(40, 64, dtype="f2"), short(64, 48, seed=1, dtype="f2")), 1, 1e-3),
    "tf32": (jnp.matmul, (array(40, 64), array(64, 48, seed=1)), 1, 1e-3),
    "odd tf32": (jnp.matmul, (array(37, 71), array(71, 45, seed=1)), 1, 1e-3),
    "odd bf16": (jnp.matmul, (short(37, 71), short(71, 45, seed=1)), 1, 8e-3),
    "i8": (integers, (int8(40, 64), int8(64, 48, seed=1)), 1, 0),
    "f64": (jnp.matmul, (wide(40, 64), wide(64, 48, seed=1)), 1, 1e-14),
    "odd f64": (exact, (wide(37, 71), wide(71, 45, seed=1)), 1, 1e-14),
    "gradient of f64": (lambda x, y: x.T @ y, (wide(72, 64), wide(72, 48, seed=1)), 1, 1e-14),
    "convolution of f64": (convolution, (wide(2, 9, 9, 8), wide(3, 3, 8, 32, seed=1)), 1, 1e-14),
    "f8": (wide_result, (short(40, 64, dtype=E4M3), short(48, 64, seed=1, dtype=E4M3)), 1, 1e-3),
    "f8 of two dtypes": (wide_result, (short(40, 64, dtype=E5M2), short(48, 64, seed=1, dtype=E4M3)), 1, 1e-3),
    "odd f8": (wide_result, (short(37, 71, dtype=E4M3), short(45, 71, seed=1, dtype=E5M2)), 1, 1e-3),
    "scaled f8": (scaled, (short(40, 64, dtype=E4M3), short(64, 48, seed=1, dtype=E4M3)), 1, 8e-3),
    "turned": (lambda x, w: (x.T @ w.T).T, (short(64, 40), short(48, 64, seed=1)), 1, 8e-3),
    "widened": (widened, (short(40, 64), short(64, 48, seed=1)), 1, 1e-5),
    "dense": (dense, (short(48, 64), short(64, 64, seed=1, dtype=BF16), short(64, seed=2)), 1, 2e-2),
    "heads": (heads, (short(2, 40, 64), short(64, 64, seed=1)), 2, 2e-2),
    "two results": (two_results, (short(40, 64), short(64, 48, seed=1)), 1, 8e-3),
    "parts of a sum": (jnp.matmul, (short(8, 4096), short(4096, 16, seed=1)), 1, 8e-3),
    "convolution": (convolution, (short(2, 9, 9, 16), short(3, 3, 16, 32, seed=1)), 1, 8e-3),
    "convolution of f32": (convolution, (array(2, 9, 9, 8), array(3, 3, 8, 32, seed=1)), 1, 1e-3),
    "convolution of colours": (convolution, (array(2, 11, 11, 3), array(5, 5, 3, 32, seed=1)), 1, 1e-3),
    "pointwise": (convolution, (short(2, 7, 9, 16), short(1, 1, 16, 32, seed=1)), 1, 8e-3),
    "highest": (exact, (array(40, 64), array(64, 48, seed=1)), 0, 1e-6),
    "row": (jnp.matmul, (array(1, 72), array(72, 500, seed=1)), 0, 1e-6),
    "row of a stored transpose": (nt, (short(1, 72), short(500, 72, seed=1)), 0, 8e-3),
    "column": (jnp.matmul, (array(500, 72), array(72, 1, seed=1)), 0, 1e-6),
    "row for each head": (decode, (array(1, 3, 40), array(1, 40, 3, 280, seed=1)), 0, 1e-6),
    "few rows of f32": (jnp.matmul, (array(5, 64), array(64, 136, seed=1)), 1, 1e-3),
    "both by rows": (lambda x, y: x.T @ y, (array(72, 64), array(72, 48, seed=1)), 1, 1e-3),
    "weighed values": (weigh, (array(2, 3, 24, 40), array(2, 40, 3, 16, seed=1)), 1, 1e-3),
    "tiny": (jnp.matmul, (short(8, 8), short(8, 8, seed=1)), 0, 8e-3),
}
SIMULATED = {  # smaller ones of the same forms: loops run in Python
    **CASES,
    "parts of a sum": (jnp.matmul, (short(8, 4096), short(4096, 8, seed=1)), 1, 8e-3),
    "convolution": (convolution, (short(2, 5, 7, 16), short(3, 3, 16, 24, seed=1)), 1, 8e-3),
    "convolution of f32": (convolution, (array(2, 5, 7, 8), array(3, 3, 8, 24, seed=1)), 1, 1e-3),
    "convolution of f64": (convolution, (wide(2, 5, 7, 8), wide(3, 3, 8, 24, seed=1)), 1, 1e-14),
    "convolution of colours": (convolution, (array(2, 7, 7, 3), array(5, 5, 3, 16, seed=1)), 1, 1e-3),
}
TARGETS = ("cuda:sm_90a", "cuda:compute_80")


def wanted(function, arguments):
    """Return what JAX makes of the operands in f64, in which sums and functions are exact enough."""
    wide = [a.astype("f8") if a.dtype != np.int8 else a for a in arguments]
    with jax.enable_x64(True):
        found = jax.tree.leaves(function(*map(jnp.asarray, wide)))
    return [np.asarray(x, "f8") for x in found]


def compiled(function, arguments, target):
    with jax.enable_x64(any(a.dtype == np.float64 for a in arguments)):
        return aotc.compile(jax.jit(function), *arguments, target=target)


def agree(found, want, bound):
    assert len(found) == len(want)
    for a, b in zip(found, want):
        np.testing.assert_array_less(np.abs(np.asarray(a).astype("f8") - b) / max(np.abs(b).max(), 1), bound + 1e-12)


def kernels_of(data):
    manifest = open_bundle(data).manifest
    return [parse_kernel(k["text"]) for k in manifest["debug"]["kernels"].values()]


@sim
@pytest.mark.parametrize(("name", "target"), half_of_pairs(SIMULATED, TARGETS))
def test_products_on_a_simulated_gpu(name, target, monkeypatch):
    function, arguments, count, bound = SIMULATED[name]
    if name == "parts of a sum" and target != TARGETS[0]:
        pytest.skip("its loops run for long in Python")
    data = compiled(function, arguments, target)
    assert sum(k.tiling is not None for k in kernels_of(data)) == count
    install(monkeypatch, data)
    agree(jax.tree.leaves(aotc.load(data).invoke("main", *arguments)), wanted(function, arguments), bound)


@sim
def test_transposes_and_conversions_are_fused_into_matmuls():
    """Heads are read where they lie, and results stored where they are wanted."""
    function, arguments, _, _ = CASES["heads"]
    assert len(kernels_of(aotc.compile(jax.jit(function), *arguments, target="cuda:sm_90a"))) == 2
    function, arguments, _, _ = CASES["widened"]
    assert len(kernels_of(aotc.compile(jax.jit(function), *arguments, target="cuda:sm_90a"))) == 1


@sim
def test_weights_of_f32_are_read_as_they_lie():
    """Of the two operands of a gradient, which both lie by rows, one is turned."""
    x, w = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((512, 768), (768, 1024)))
    (kernel,) = kernels_of(aotc.compile(jax.jit(jnp.matmul), x, w, target="cuda:sm_90a"))
    assert kernel.tiling.is_transposed
    y = jax.ShapeDtypeStruct((512, 1024), jnp.float32)
    transposed, kernel = kernels_of(aotc.compile(jax.jit(lambda x, y: x.T @ y), x, y, target="cuda:sm_90a"))
    assert [b.shape for b in transposed.inputs] == [(512, 768)]
    assert kernel.tiling.is_transposed


@sim
def test_a_long_sum_is_cut_in_parts():
    function, arguments, _, _ = CASES["parts of a sum"]
    kernels = kernels_of(aotc.compile(jax.jit(function), *arguments, target="cuda:sm_90a"))
    assert len(kernels) == 2
    (product,) = (k for k in kernels if k.tiling)
    parts, *rest = product.outputs[0].shape
    assert parts > 1
    assert rest == [8, 16]


@sim
def test_floats_of_8_bits_are_multiplied_as_16_where_gpus_have_no_unit(monkeypatch):
    function, arguments, _, bound = CASES["f8"]
    data = compiled(function, arguments, "cuda:compute_80")
    (kernel,) = (k for k in kernels_of(data) if k.tiling)
    assert {b.dtype for b in kernel.inputs} == {"f16", "f8E4M3FN"}  # the weights are widened in the tiles
    install(monkeypatch, data)
    agree(jax.tree.leaves(aotc.load(data).invoke("main", *arguments)), wanted(function, arguments), bound)


def sized(text, rows, *arrays):
    """Return a product of ``rows`` rows, a number that only a call knows."""
    (n,) = jax.export.symbolic_shape(rows)
    return jax.export.export(jax.jit(text))(*(jax.ShapeDtypeStruct((n, a.shape[1]), a.dtype) for a in arrays[:1]),
                                            *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays[1:]))  # fmt: skip


@sim
@pytest.mark.parametrize("target", TARGETS)
def test_symbolic_row_counts(target, monkeypatch):
    w, b = short(64, 64, seed=1), short(64, seed=2)
    data = aotc.compile(sized(dense, "n", short(1, 64), w, b), target=target)
    assert [k.tiling is not None for k in kernels_of(data)] == [True]
    install(monkeypatch, data)
    module = aotc.load(data)
    for rows in (1, 33):
        arguments = (short(rows, 64, seed=3), w, b)
        agree(jax.tree.leaves(module.invoke("main", *arguments)), wanted(dense, arguments), 2e-2)


def both(x):
    """Return the products of all pairs of rows, and of columns, of one array."""
    return x @ x.T, x.T @ x


@sim
@pytest.mark.parametrize("shape", ["m, n", "16, n", "m, m"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_one_array_on_both_sides_of_sizes_that_only_a_call_knows(dtype, shape, monkeypatch):
    made = jax.export.export(jax.jit(both))(jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape), dtype))
    data = aotc.compile(made, target="cuda:sm_90a", cache=False)
    assert len([k for k in kernels_of(data) if k.tiling]) == 2
    install(monkeypatch, data)
    x = np.random.default_rng(0).standard_normal((16, 16)).astype(dtype)
    agree(jax.tree.leaves(aotc.load(data).invoke("main", x)), wanted(both, (x,)), 2e-2)


@sim
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_rows_that_begin_anywhere_are_copied_first(dtype):
    shapes = [jax.ShapeDtypeStruct(s, dtype) for s in ((257, 259), (259, 261))]
    (kernel,) = (k for k in kernels_of(aotc.compile(jax.jit(jnp.matmul), *shapes, target="cuda:sm_90a")) if k.tiling)
    assert kernel.tiling.template == Wgmma(transposed=dtype != jnp.bfloat16)
    assert kernel.outputs[0].shape == (257, 261)


class TestProductsOnAGpu:
    pytestmark = gpu

    @pytest.mark.parametrize("transposed", [False, True])
    def test_rows_that_begin_anywhere(self, transposed):
        x, w = short(257, 259), short(259, 261, seed=1)
        function = (lambda a, b: a.T @ b.T) if transposed else jnp.matmul
        given = (x.T.copy(), w.T.copy()) if transposed else (x, w)
        module = aotc.load(aotc.compile(jax.jit(function), *given, target="cuda:sm_90a"), devices="cuda")
        with jax.default_device(jax.devices("cpu")[0]):
            want = wanted(jnp.matmul, (x, w))
        agree(jax.tree.leaves(module.invoke("main", *given)), want, 8e-3)

    @pytest.mark.parametrize("target", TARGETS)
    @pytest.mark.parametrize("name", CASES)
    def test_products(self, name, target):
        function, arguments, _, bound = CASES[name]
        module = aotc.load(compiled(function, arguments, target), devices="cuda")
        with jax.default_device(jax.devices("cpu")[0]):
            want = wanted(function, arguments)
        for _ in range(2):
            agree(jax.tree.leaves(module.invoke("main", *arguments)), want, bound)

    @pytest.mark.parametrize("target", TARGETS)
    def test_symbolic_row_counts(self, target):
        w, b = short(64, 64, seed=1), short(64, seed=2)
        module = aotc.load(aotc.compile(sized(dense, "n", short(1, 64), w, b), target=target), devices="cuda")
        for rows in (1, 33, 300, 7):
            arguments = (short(rows, 64, seed=3), w, b)
            with jax.default_device(jax.devices("cpu")[0]):
                want = wanted(dense, arguments)
            agree(jax.tree.leaves(module.invoke("main", *arguments)), want, 2e-2)
