"""``cuda:sm_75``: compiled without the instructions of Ampere, never run on a GPU; older architectures are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.golden import FOLDER, sections
from support.small_models import close
from vmfb.simulated_gpu import install

pytest.importorskip("numba_cuda")

from vmfb.test_cuda import CASES

import aotc
from aotc.diagnostics import CompileError
from aotc.frontend.importer import import_raw
from aotc.frontend.mlir import fetch
from aotc.ir.tensor.text import parse_module
from aotc.kernels.cuda.compile import compile_kernel, kernel_ptx
from aotc.lowering.lower import lower
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.targets import TARGETS, resolve_targets
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.devices.cuda import device as cuda

pytestmark = pytest.mark.cudasim
slow = pytest.mark.slow

NAME = "cuda:sm_75"
TARGET = TARGETS[NAME]
GOLDEN = [c for c in sorted((FOLDER / "program").glob("*.txt")) if "packed_" not in c.read_text()]  # those are CPUs'
QUICK = ("bf16_product", "attention")


def kernels(module):
    return lower(module, TARGET, Options(target=NAME)).kernels


def kernels_of(function, *arguments):
    options = Options(target=NAME)
    return kernels(run_passes(import_raw(fetch(jax.jit(function), arguments, {}), options=options), options))


@pytest.mark.parametrize("case", [c if n % 6 == 0 else pytest.param(c, marks=slow) for n, c in enumerate(GOLDEN)])
def test_golden_programs_compile(case):
    for kernel in kernels(parse_module(sections(case)[1])):
        assert compile_kernel(kernel, TARGET).data[:4] == b"\x7fELF"


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=slow) for n in CASES])
def test_programs_compile_and_run_on_the_simulated_gpu(name, monkeypatch):
    function, args, tolerance = CASES[name]
    data = aotc.compile(jax.jit(function), *args, target=NAME)
    variant = open_bundle(data).manifest["variants"][0]
    assert all("cluster" not in k.get("launch", {}) or k["launch"]["cluster"] == [1, 1, 1] for k in variant["kernels"])
    assert not any(k.get("launch", {}).get("maps") for k in variant["kernels"])
    install(monkeypatch, data, capability=(7, 5))
    close(aotc.load(data).invoke("main", *jax.tree.leaves(args)), jax.jit(function)(*args), tolerance)


def test_products_and_attention_have_no_template():
    for dtype in ("bfloat16", "float32"):
        x, q = jax.ShapeDtypeStruct((256, 256), dtype), jax.ShapeDtypeStruct((2, 256, 4, 64), dtype)
        made = [*kernels_of(lambda a, b: a @ b, x, x), *kernels_of(jax.nn.dot_product_attention, q, q, q)]
        assert made
        assert all(kernel.tiling is None for kernel in made)


def test_a_maximum_of_f32_keeps_nan_without_the_instruction():
    """``max.NaN`` came with sm_80: a comparison selects the sum, which is NaN."""
    x = jax.ShapeDtypeStruct((64,), "float32")
    (kernel,) = kernels_of(jnp.maximum, x, x)
    for name, has in ((NAME, False), ("cuda:sm_80", True)):
        text = kernel_ptx(kernel, TARGETS[name])
        assert ("max.NaN.f32" in text) is has
        assert ("max.f32" in text and "add" in text) is not has


@pytest.mark.ir
def test_which_gpus_run_it():
    have = [(7, 0), (7, 2), (7, 5), (8, 0), (9, 0)]
    assert [h for h in have if cuda._can_run_variant({"target": NAME}, h)] == [(7, 5)]
    assert TARGET.untried
    assert resolve_targets(NAME) == (TARGET,)


@pytest.mark.ir
@pytest.mark.parametrize("name", ["cuda:sm_70", "cuda:sm_72", "cuda:sm_61", "cuda:compute_70"])
def test_older_gpus_are_refused_with_the_reason(name):
    with pytest.raises(CompileError, match=rf"{name}.*CUDA 13.*dropped GPUs before compute capability 7\.5") as caught:
        aotc.compile(jax.jit(jnp.sin), np.zeros(3, "f4"), target=name)
    assert "cuda:sm_75 is the oldest" in str(caught.value)
