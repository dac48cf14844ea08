"""Rows that no cache holds, of a group norm and of a softmax: fused in parts, with the numbers of op by op."""

from pathlib import Path

import numpy as np
import pytest

import aotc
from aotc.frontend.mlir import fetch
from aotc.frontend.xla import run_xla

pytestmark = pytest.mark.cpu

INPUTS = Path(__file__).parents[1] / "inputs"
LEVELS = (0, 2, 3)
TOLERANCE = 1e-5


@pytest.fixture(scope="module", params=["groupnorm_silu", "softmax_mul"])
def model(request):
    """A model's file, arguments, and its results of op by op."""
    path = INPUTS / f"{request.param}.mlir"
    module = aotc.load(aotc.compile(path, opt_level=0), threads=2)
    rng = np.random.default_rng(0)
    (name,) = module.functions
    arguments = module.functions[name].signature.arguments
    arrays = [(3 * rng.standard_normal(a["dims"]) + 1).astype(np.float32) for a in arguments]
    return path, arrays, module.invoke(name, *arrays)


def near(found, want):
    for x, y in zip(found, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=TOLERANCE, atol=TOLERANCE * np.abs(y).max())


def test_long_rows_op_by_op_match_xla(model):
    path, arrays, alone = model
    near(alone, run_xla(fetch(path), arrays))


@pytest.mark.parametrize("flags", [{"opt_level": 2}, {"opt_level": 3}, {"opt_level": 3, "stack_limit": 4096}], ids=str)
def test_fused_long_rows_match_op_by_op(model, flags):
    path, arrays, alone = model
    module = aotc.load(aotc.compile(path, **flags), threads=2)
    near(module.invoke(next(iter(module.functions)), *arrays), alone)


@pytest.mark.cuda
@pytest.mark.parametrize("flags", [{"opt_level": n} for n in LEVELS] + [{"shared_memory_limit": 4096}], ids=str)
def test_fused_long_rows_on_a_gpu_match_op_by_op(model, flags):
    path, arrays, alone = model
    module = aotc.load(aotc.compile(path, target="cuda:sm_80,cuda:sm_90", **flags), devices="cuda")
    near(module.invoke(next(iter(module.functions)), *arrays), alone)
