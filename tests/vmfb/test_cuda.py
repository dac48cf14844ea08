"""The CUDA target: what it compiles to, what its kernels mean, and what it does on a GPU.

Without a GPU, kernels are compiled to cubins but run as the Python of their loop IR,
by the real CUDA device on a simulated GPU; with one, everything runs on it.
"""

import ctypes
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from support.growing import GROWING, check_growing
from support.scalar_kernels import one_kernel
from support.sizes.dynamic_exports import empty, text_of, without_jax
from support.small_models import MODELS, array, close
from vmfb.simulated_gpu import install

import aotc
from aotc.diagnostics import CompileError
from aotc.ir.opset import SCALARS
from aotc.kernels.cuda import compile as compile_cuda
from aotc.targets import TARGETS
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.devices.cuda import driver as cuda_driver
from aotc.vmfb.devices.cuda.libcuda import library as driver_library
from aotc.vmfb.dtypes import DTYPES, to_numpy
from aotc.vmfb.errors import BundleError, CallError
from aotc.vmfb.float_formats import SMALL_FLOATS

pytest.importorskip("numba_cuda")

sim = pytest.mark.cudasim
gpu = [pytest.mark.cuda, pytest.mark.skipif(bool(cuda_driver.missing()), reason="no GPU")]


def layernorm(x, scale):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5) * scale


def places(x, i):
    x = jax.lax.dynamic_update_slice(x, x[:2, :3] * 2, (i[0], i[1]))
    return x.at[i].add(1.0), x[i], jnp.take_along_axis(x, jnp.argmax(x, -1, keepdims=True), -1)


def steps(n, x):
    return jax.lax.fori_loop(0, n, lambda i, c: jnp.tanh(c @ x) + i, x)


def branches(i, x):
    return jax.lax.switch(i, [lambda x: x @ x, lambda x: x * 2, jnp.sin], x)


def numbers(x):
    return x // 7, x % 5, jnp.abs(x).astype(jnp.float16) * 3, x.astype(jnp.bfloat16), jax.lax.population_count(x)


SMALL = ("float8_e4m3fn", "float8_e5m2", "float8_e3m4", "float8_e4m3fnuz", "float8_e8m0fnu", "float4_e2m1fn")


def small_floats(x):
    short = [x.astype(t) for t in SMALL]
    back = [v.astype(jnp.float32) for v in (*short, *(v * v for v in short))]
    first = jnp.abs(short[0])
    dot = jax.lax.dot_general(first, short[1], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return *back, dot, jnp.sort(short[0], 1).astype(jnp.float32), first.max(0).astype(jnp.float32)


ROUNDED = {"attention": 5e-4}  # what XLA on a CPU computes in f32, tensor cores do in TF32
CASES = {
    "layernorm_long_rows": (layernorm, (array(3, 300), array(300, seed=1)), 1e-6),
    "softmax_long_rows": (jax.nn.softmax, (array(2, 130),), 1e-6),
    "sum_of_all": (jnp.sum, (array(13, 41),), 1e-6),
    "sum_of_columns": (lambda x: x.sum(0), (array(40, 30),), 1e-6),
    "argmax_long_rows": (lambda x: jnp.argmax(x, -1), (array(3, 200),), 0),
    "scans": (lambda x: (jnp.cumsum(x, 0), jax.lax.cummax(x, 1, reverse=True)), (array(30, 40),), 1e-6),
    "places": (places, (array(8, 9), np.array([3, 7, 7, 1], "i4")), 1e-6),
    "steps": (steps, (np.int32(3), array(12, 12, scale=0.3)), 1e-5),
    "branches": (branches, (np.int32(5), array(8, 8)), 1e-5),
    "transposed_product": (
        lambda x, y: jax.nn.relu(jnp.einsum("bhqd,bhkd->bhqk", x, y)),
        (array(1, 2, 7, 5), array(1, 2, 9, 5, seed=1)),
        1e-6,
    ),
    "tiled_product": (
        lambda x, y, b: jnp.tanh(jnp.dot(x, y, precision="highest") + b),
        (array(27, 70), array(70, 29), array(29)),
        1e-5,
    ),
    "tiled_skinny_product": (lambda x, y: x @ y, (array(3, 130), array(130, 25)), 1e-5),
    "tiled_bf16_product": (
        lambda x, y: jnp.einsum("bmk,bnk->bmn", x, y),
        (array(1, 25, 32).astype(jnp.bfloat16), array(1, 24, 32, seed=1).astype(jnp.bfloat16)),
        1e-2,
    ),
    "tiled_convolution": (
        lambda x, w: jax.nn.relu(
            jax.lax.conv_general_dilated(x, w, (2, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        ),
        (array(1, 9, 6, 4), array(3, 3, 4, 27, seed=1, scale=0.2)),
        1e-5,
    ),
    "wide_product": (lambda x, y, b: jnp.tanh(x @ y + b), (array(19, 33), array(33, 21), array(21)), 1e-5),
    "bf16_product": (lambda x, y: x @ y, (array(9, 60).astype(jnp.bfloat16), array(60, 8).astype(jnp.bfloat16)), 1e-2),
    "small_floats": (small_floats, (np.abs(array(7, 40)) + np.float32(0.01),), 1e-6),
    "numbers": (numbers, (np.arange(-40, 40, dtype="i4"),), 1e-6),
    **{name: (f, (w, x), ROUNDED.get(name, tolerance)) for name, (f, w, x, tolerance) in MODELS.items()},
}


def check(name, **options):
    """Compile a case, run it, and compare it with JAX."""
    function, args, tolerance = CASES[name]
    module = aotc.load(aotc.compile(jax.jit(function), *args, target="cuda:sm_90a", **options), devices="cuda")
    with jax.default_device(jax.devices("cpu")[0]):  # on a GPU, JAX multiplies in TF32
        want = jax.jit(function)(*args)
    for _ in range(2):
        close(module.invoke("main", *jax.tree.leaves(args)), want, tolerance)


@sim
@pytest.mark.parametrize("name", CASES)
def test_meaning_on_a_simulated_gpu(name, monkeypatch):
    function, args, tolerance = CASES[name]
    data = aotc.compile(jax.jit(function), *args, target="cuda:sm_90a")
    install(monkeypatch, data)
    close(aotc.load(data).invoke("main", *jax.tree.leaves(args)), jax.jit(function)(*args), tolerance)


SLOW_FLOATS = [n for n in SMALL_FLOATS if n not in ("f8E5M2", "f6E3M2FN", "f8E8M0FNU")]


@sim
@pytest.mark.parametrize(
    "dtype", ["f8E5M2", "f6E3M2FN", "f8E8M0FNU", *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW_FLOATS)]
)
def test_every_small_float_is_on_the_gpu_what_it_is_on_the_cpu(dtype, monkeypatch):
    t = f"tensor<32x{dtype}>"
    text = f"""module {{ func.func public @main(%a: {t}, %b: {t}, %f: tensor<32xf64>) -> ({t}, tensor<32xf64>, {t},
        tensor<32xi1>) {{
      %0 = stablehlo.divide %a, %b : {t}
      %1 = stablehlo.convert %a : ({t}) -> tensor<32xf64>
      %2 = stablehlo.convert %f : (tensor<32xf64>) -> {t}
      %3 = stablehlo.compare LT, %a, %b, TOTALORDER : ({t}, {t}) -> tensor<32xi1>
      return %0, %1, %2, %3 : {t}, tensor<32xf64>, {t}, tensor<32xi1> }} }}""".encode()
    rng = np.random.default_rng(0)
    a, b = (rng.integers(0, 1 << DTYPES[dtype].bits, 32).astype(np.uint8).view(to_numpy(dtype)) for _ in range(2))
    wide = rng.standard_normal(32) * np.exp2(rng.integers(-9, 9, 32))
    data = aotc.compile(text, target="cuda:sm_90a")
    install(monkeypatch, data)
    got = aotc.load(data).invoke("main", a, b, wide)
    want = aotc.load(aotc.compile(text)).invoke("main", a, b, wide)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x.astype("f8"), y.astype("f8"))


@sim
def test_memory_comes_back(monkeypatch):
    function, w, x, tolerance = MODELS["mlp"]
    data = aotc.compile(jax.jit(lambda x: function(w, x)), x, target="cuda:sm_90a")
    install(monkeypatch, data)
    module = aotc.load(data)
    for _ in range(2):
        close(module.invoke("main", x), jax.jit(function)(w, x), tolerance)
        used = module.stats()["device_bytes"]
        assert module.trim() == used - module.stats()["constants_bytes"] > 0


@sim
def test_graphs_are_recorded_once(monkeypatch):
    function, w, x, _ = MODELS["mlp"]
    data = aotc.compile(jax.jit(lambda x: function(w, x)), x, target="cuda:sm_90a")
    install(monkeypatch, data)
    module = aotc.load(data)
    log = module._executable.gpu.log
    module.invoke("main", x)
    launches = log.count("launch")
    module.invoke("main", x)
    assert (log.count("launch"), log.count("graph")) == (launches, 2)


@sim
def test_dynamic_shapes(monkeypatch):
    shape = jax.export.symbolic_shape("b, 130")
    exported = jax.export.export(jax.jit(jax.nn.softmax))(jax.ShapeDtypeStruct(shape, "float32"))
    data = aotc.compile(exported, target="cuda:sm_90a")
    install(monkeypatch, data)
    module = aotc.load(data)
    for size in (1, 4, 3):
        x = array(size, 130)
        np.testing.assert_allclose(module.invoke("main", x)[0], jax.nn.softmax(x), rtol=0, atol=1e-6)


@sim
@pytest.mark.parametrize("name", ["cholesky", "triangular_solve", "fft", "csr_dot"])
def test_sizes_of_zero(name, monkeypatch):
    text = text_of(name)
    data = aotc.compile(text.encode(), target="cuda:sm_90a")
    install(monkeypatch, data)
    module = aotc.load(data)
    outcomes = [without_jax(module, text, args) for args in empty(name)]
    assert "fits" in outcomes
    assert {*outcomes} <= {"fits", "refused"}


@sim
def test_a_tridiagonal_system_of_unknown_size():
    with pytest.raises(CompileError, match=r"rows and .* right-hand sides is not supported on target cuda:sm_90a"):
        aotc.compile(text_of("tridiagonal_solve_perturbed").encode(), target="cuda:sm_90a", host_fallback=False)


@sim
def test_sizes_that_kernels_compute(monkeypatch):
    data = aotc.compile(GROWING.replace("64", "8").encode(), target="cuda:sm_90a")
    install(monkeypatch, data)
    check_growing(aotc.load(data), 8)


@sim
def test_assertions_on_what_is_computed(monkeypatch):
    def roots(x):
        checkify.check(jnp.all(x >= 0), "negative: {low:.2f}", low=x.min())
        return jnp.sqrt(x)

    x = np.arange(4, dtype=np.float32)
    data = aotc.compile(roots, x, target="cuda:sm_90a")
    install(monkeypatch, data)
    module = aotc.load(data)
    for _ in range(2):
        np.testing.assert_allclose(module(x), np.sqrt(x), rtol=1e-6)
        with pytest.raises(CallError, match=r"negative: -1\.00"):
            module(x - 1)


@sim
@pytest.mark.parametrize("op", ["shl", "shr_logic"])
def test_a_shift_looks_at_all_bits_of_its_distance(op):
    """PTX takes 32 of them, and LLVM forgets the rest if it can."""
    kernel = one_kernel(op, "u64", [(SCALARS[op], "u64")], 8)
    assert re.search(r"setp\.\w+\.[su]64 .*, 6[34];", compile_cuda.kernel_ptx(kernel, TARGETS["cuda:sm_90a"]))


@sim
def test_one_bundle_for_both_kinds(monkeypatch):
    function, args, tolerance = CASES["mlp"]
    data = aotc.compile(jax.jit(function), *args, target="cpu,cuda:sm_90a")
    want = jax.jit(function)(*args)
    close(aotc.load(data, devices="cpu").invoke("main", *jax.tree.leaves(args)), want, tolerance)
    install(monkeypatch, data)
    close(aotc.load(data, devices="cuda:0").invoke("main", *jax.tree.leaves(args)), want, tolerance)
    with pytest.raises(BundleError, match="no GPU 3"):
        aotc.load(data, devices="cuda:3")
    module = aotc.load(data)  # nobody says which: the GPU, as there is one
    assert module.stats()["target"] == "cuda:sm_90a"
    close(module.invoke("main", *jax.tree.leaves(args)), want, tolerance)


@sim
def test_one_bundle_for_both_kinds_without_a_gpu_it_runs_on():
    data = aotc.compile(jax.jit(jnp.sin), array(3), target="cpu,cuda:sm_90a")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_driver, "missing", lambda: "no NVIDIA driver (libcuda.so.1)")
        assert aotc.load(data).stats()["target"].startswith("cpu")
    with pytest.MonkeyPatch.context() as patch:
        install(patch, data, capability=(7, 0))
        np.testing.assert_allclose(aotc.load(data)(array(3)), np.sin(array(3)), rtol=1e-6)


@sim
def test_machines_that_cannot_run_it(monkeypatch):
    data = aotc.compile(jax.jit(jnp.sin), array(3), target="cuda:sm_90a")
    with monkeypatch.context() as patch:
        patch.setattr(cuda_driver, "missing", lambda: "no NVIDIA driver (libcuda.so.1)")
        with pytest.raises(BundleError, match="no NVIDIA driver"):
            aotc.load(data)
    install(monkeypatch, data, capability=(8, 0))
    with pytest.raises(BundleError, match=r"another GPU \(a simulated GPU is sm_80\)"):
        aotc.load(data)


@sim
@pytest.mark.parametrize(
    ("target", "capability", "runs"),
    [("sm_80", (8, 6), True), ("sm_86", (8, 6), True), ("sm_86", (8, 9), True), ("sm_86", (8, 0), False),
     ("sm_80", (9, 0), False), ("sm_80,cuda:sm_86", (8, 0), True)],
)  # fmt: skip
def test_code_runs_on_later_gpus_of_its_generation(target, capability, runs, monkeypatch):
    data = aotc.compile(jax.jit(lambda x: jnp.sin(x) @ x), array(8, 8), target=f"cuda:{target}")
    install(monkeypatch, data, capability=capability)
    if runs:
        close(aotc.load(data).invoke("main", array(8, 8)), np.sin(array(8, 8)) @ array(8, 8), 1e-5)
    else:
        with pytest.raises(BundleError, match="its code is for another GPU"):
            aotc.load(data)


def test_a_generation_that_is_not_compiled_for():
    said = r"(?s)target 'cuda:sm_70' cannot be compiled for.*cuda:sm_75 is the oldest"
    with pytest.raises(aotc.CompileError, match=said):
        aotc.compile(jnp.sin, array(3), target="cuda:sm_70")


@sim
def test_a_driver_that_is_missing_is_a_reason(monkeypatch):
    monkeypatch.setattr(driver_library, "DRIVER", driver_library.Driver())
    monkeypatch.setattr(ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError(f"{name}: not found")))
    assert driver_library.missing() == "no NVIDIA driver (libcuda.so.1: not found)"


@sim
def test_incomplete_entries_are_refused(monkeypatch):
    data = aotc.compile(jax.jit(jnp.sin), array(3), target="cuda:sm_90a")
    install(monkeypatch, data)
    bundle = open_bundle(data)
    (variant,) = bundle.manifest["variants"]
    from aotc.vmfb.devices.cuda import device as cuda_device

    broken = {**variant, "kernels": [{**variant["kernels"][0], "image": [0, 1 << 40]}]}
    with pytest.raises(BundleError, match="not what the manifest describes"):
        cuda_device.open_executable(bundle, broken, None, 0, {})
    broken = {**variant, "kernels": [{"name": "k", "scratch": 0}]}
    with pytest.raises(BundleError, match="incomplete"):
        cuda_device.open_executable(bundle, broken, None, 0, {})


class TestOnAGpu:
    """End to end on the hardware."""

    pytestmark = gpu

    @pytest.mark.parametrize("level", [0, 2])
    @pytest.mark.parametrize("name", CASES)
    def test_meaning(self, name, level):
        check(name, opt_level=level)

    def test_sizes_that_kernels_compute(self):
        check_growing(aotc.load(aotc.compile(GROWING.encode(), target="cuda:sm_90a"), devices="cuda"))

    def test_out_of_memory_is_an_error(self):
        module = aotc.load(aotc.compile(jax.jit(jnp.sin), array(3), target="cuda:sm_90a"))
        with pytest.raises(CallError, match=r"GPU 0 has no 1,125,899,906,842,624 bytes more\n.* bytes free of"):
            module._executable.gpu.allocate(1 << 50)
