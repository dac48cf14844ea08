"""Every scalar function of the op table behind every template of kernels, for each GPU target."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.scalar_programs import TEMPLATES, programs

pytest.importorskip("numba_cuda")

from vmfb.test_cuda import gpu

import aotc
from aotc.frontend.importer import import_raw
from aotc.frontend.mlir import fetch
from aotc.ir.opset import SCALARS
from aotc.ir.opset.elementwise import ELEMENTWISE, scalar_work
from aotc.kernels.cuda.compile import image_of_modules, kernel_texts
from aotc.lowering.lower import lower
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.targets import TARGETS
from aotc.vmfb.dtypes import DTYPES

pytestmark = pytest.mark.cudasim
slow = pytest.mark.slow

GPUS = [name for name, target in TARGETS.items() if target.kind == "cuda"]
QUICK = ("cuda:sm_80", "cuda:sm_90a")
QUICK_TEMPLATES = (
    "matmul bf16", "matmul f32", "matmul f64", "matmul i8", "few rows bf16", "convolution f16", "rows f16",
    "score bf16",
)  # fmt: skip
CAST = ("matmul bf16", "matmul f32", "convolution f16", "few rows bf16", "rows f16", "score bf16")


def kernels(functions, target):
    options = Options(target=target)
    text = "module {\n" + "\n".join(functions) + "\n}"
    module = run_passes(import_raw(fetch(text, (), {}), options=options), options)
    return lower(module, TARGETS[target], options).kernels


def failures(functions, target, machine_code=False):
    """Return the errors by function; all are lowered at once, and one by one if that fails."""

    def attempt(texts):
        for kernel in kernels(texts, target):
            if machine_code:
                image_of_modules(kernel_texts(kernel, TARGETS[target]), kernel.name, TARGETS[target])

    try:
        attempt(functions.values())
        return {}
    except Exception:
        found = {}
        for name, text in functions.items():
            try:
                attempt([text])
            except Exception as error:
                found[name] = f"{type(error).__name__}: {str(error)[:300]}"
        return found or {"all": "they are lowered one by one, but not together"}


def marked(template, target):
    quick = template in QUICK_TEMPLATES and target in QUICK
    return pytest.param(template, target, marks=() if quick else slow)


@pytest.mark.parametrize(("template", "target"), [marked(t, g) for t in TEMPLATES for g in GPUS])
def test_every_function_lowers_behind_a_template(template, target):
    functions = programs(template)
    assert len(functions) > 25
    assert failures(functions, target) == {}


@slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("template", CAST)
def test_every_function_of_every_dtype_lowers_behind_a_template(template, dtype):
    for target in QUICK:
        assert failures(programs(template, dtype), target) == {}


@slow
@pytest.mark.parametrize("target", ["cuda:compute_80", "cuda:sm_90a"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_every_function_compiles_behind_a_template(template, target):
    assert failures(programs(template), target, machine_code=True) == {}


def test_the_templates_are_reached():
    """A matmul, a convolution and attention keep their tensor-core kernel."""
    for template, name in (("matmul bf16", "bits_i16"), ("convolution f16", "reduce_precision"), ("score bf16", "abs")):
        assert any(k.tiling is not None for k in kernels([programs(template)[name]], "cuda:sm_90a")), template


@pytest.mark.ir
def test_every_function_of_the_loop_ir_has_its_work():
    assert all(scalar_work(name) >= 1 for name in {*SCALARS, *ELEMENTWISE})


X, W = (np.random.default_rng(n).standard_normal(s).astype("f4") for n, s in enumerate([(160, 64), (64, 72)]))
ROWS = np.sort(np.random.default_rng(2).integers(0, 9, 160)).astype("i4")
FUNCTIONS = {
    "segment_max": lambda x, w: jax.ops.segment_max(x @ w, ROWS, 9),
    "signbit": lambda x, w: jnp.signbit(x @ w),
    "nextafter": lambda x, w: jnp.nextafter(x @ w, 1.0),
    "bits": lambda x, w: lax.bitcast_convert_type(x @ w, jnp.int32),
    "reduce_precision": lambda x, w: lax.reduce_precision(x @ w, 5, 7),
}


@pytest.mark.parametrize("target", [*QUICK, *(pytest.param(t, marks=slow) for t in GPUS if t not in QUICK)])
def test_functions_of_bits_compile_behind_a_matmul(target):
    def all_of_them(x, w):
        return [f(x, w) for f in FUNCTIONS.values()]

    assert aotc.compile(jax.jit(all_of_them), X, W, target=target)


class TestOnAGpu:
    """Whole numbers, whose products TF32 has exactly: the bits are XLA's on the CPU."""

    pytestmark = gpu

    @pytest.mark.parametrize("target", ["cuda:compute_80", "cuda:sm_90a"])
    @pytest.mark.parametrize("name", FUNCTIONS)
    def test_functions_of_bits_behind_a_matmul(self, name, target):
        x, w = np.round(4 * X), np.round(4 * W)
        module = aotc.load(aotc.compile(jax.jit(FUNCTIONS[name]), x, w, target=target), devices="cuda")
        (found,) = module.invoke("main", x, w)
        with jax.default_device(jax.devices("cpu")[0]):
            want = jax.jit(FUNCTIONS[name])(x, w)
        np.testing.assert_array_equal(found, want)
