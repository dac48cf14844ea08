"""Programs in the manner of whole producers, on the CPU and for GPUs: against XLA where it takes them, else NumPy."""

from __future__ import annotations

import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from support.gpu_program import gpu_program, run_gpu_program

import aotc
from aotc.frontend.mlir import fetch
from aotc.frontend.xla import run_xla

pytestmark = pytest.mark.ir

FOLDER = Path(__file__).parents[1] / "inputs" / "producers"
RNG = np.random.default_rng(6)
TF32 = 5e-3  # of products of f32 on GPUs, whose factors are rounded to 10 bits
GPUS = ("cuda:sm_80", "cuda:sm_90")


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def torch_xla(x, n, w, up, down, bias):
    """Return an attention block of the first ``n`` rows, without a library."""
    x, w, up, down, bias = (v.astype(np.float64) for v in (x[:n], w, up, down, bias))
    normed = x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-5)
    q, k, v = (normed @ part for part in w)
    scores = np.exp(q @ k.T - (q @ k.T).max(1, keepdims=True))
    x = x + scores / scores.sum(1, keepdims=True) @ v
    h = x @ up
    h = h / 2 * (1 + np.vectorize(math.erf)(h / math.sqrt(2)))
    return x + h @ down + bias, n


def torch_mlir(a, b, c):
    y = np.maximum((a.astype(np.float64) @ b + c) / np.sqrt(b.shape[1]), 0)
    y = -y if len(a) > 3 else y
    return y, y.reshape(y.shape[::-1]), y.size


def iree(x):
    sums = np.log2(np.abs(x.astype(np.float64).reshape(len(x), 4, 3).sum(2)) + 1e-3)
    return (sums * np.arange(4),)


BLOCK = (normal(3, 8, 8) / 3, normal(8, 32) / 3, normal(32, 8) / 5, normal(8))
BF16 = ml_dtypes.bfloat16
MODELS = {
    "torch_xla": (torch_xla, [(normal(16, 8), np.int32(n), *BLOCK) for n in (1, 7, 16)], 2e-5),
    "torch_mlir": (torch_mlir, [(normal(m, k), normal(k, n), normal(n)) for m, k, n in ((2, 3, 4), (5, 1, 2))], 1e-5),
    "iree_input": (iree, [(normal(m, 12),) for m in (1, 5)], 1e-5),
    "reactant": (None, [(normal(4, 3).astype(np.float64), np.int64(n)) for n in (0, 3)], 1e-14),
    "tt_mlir": (None, [tuple(normal(*s).astype(BF16) for s in ((32, 32), (32, 32), (32,)))], 2e-2),
}


def expected(name, arrays):
    function = MODELS[name][0]
    if function is not None:
        return function(*arrays)
    raw = fetch(FOLDER / f"{name}.mlir")
    if name == "tt_mlir":  # XLA has no such marker; the composite is a call for it
        raw = fetch(raw.data.decode().replace("@tt.mark_argument", "@Sharding"))
    return run_xla(raw, arrays)


def check(name, got, arrays, least=0.0):
    tolerance = max(MODELS[name][2], least)
    for g, w in zip(got, expected(name, arrays), strict=True):
        np.testing.assert_allclose(np.asarray(g, np.float64), np.asarray(w, np.float64), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", MODELS)
def test_programs_of_each_producer_match_numpy_on_cpus(name):
    module = aotc.load(aotc.compile(FOLDER / f"{name}.mlir", opt_level=1))
    for arrays in MODELS[name][1]:
        result = module(*(a.copy() for a in arrays))
        check(name, result if isinstance(result, tuple) else (result,), arrays)


@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("name", MODELS)
def test_programs_of_each_producer_compile_for_gpus(name, target):
    function, variant = gpu_program(FOLDER / f"{name}.mlir", target=target)
    arrays = MODELS[name][1][-1]
    check(name, run_gpu_program(function, variant, arrays), arrays, TF32)


@pytest.mark.parametrize("name", MODELS)
def test_programs_of_each_producer_become_gpu_machine_code(name):
    assert aotc.compile(FOLDER / f"{name}.mlir", target=",".join(GPUS), opt_level=1)


def test_the_bounded_block_refuses_more_rows_than_its_bound():
    module = aotc.load(aotc.compile(FOLDER / "torch_xla.mlir", opt_level=1))
    x = normal(16, 8)
    for n in (-1, 17):
        with pytest.raises(aotc.CallError):
            module(x, np.int32(n), *BLOCK)


def test_broadcasting_of_torch_mlir_takes_a_bias_of_one():
    module = aotc.load(aotc.compile(FOLDER / "torch_mlir.mlir", opt_level=1))
    arrays = normal(2, 3), normal(3, 4), normal(1)
    check("torch_mlir", module(*arrays), arrays)
    with pytest.raises(aotc.CallError, match="mismatching contracting dimension"):
        module(normal(2, 3), normal(4, 4), normal(4))
