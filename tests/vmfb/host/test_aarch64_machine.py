"""The whole runtime on AArch64: a Python for it under qemu takes a bundle's code for its processor, and is right.

``make aarch64-python`` makes that Python: the machine's own features, threads, LAPACK, custom calls and profiles.
"""

import json
import os
import pickle
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba")

import aotc
from aotc.targets import TARGETS
from aotc.vmfb import custom_calls

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / "build" / "aarch64" / "python"
pytestmark = [
    pytest.mark.cpu, pytest.mark.emulated,
    pytest.mark.skipif(not (PYTHON.parent / "ready").exists(), reason="needs make aarch64-python"),
]  # fmt: skip
TARGET = ",".join(name for name in TARGETS if name.startswith("cpu:aarch64"))
PROCESSORS = {  # qemu's, and which code they take
    "cortex-a57": "",
    "neoverse-n1": "-dotprod",
    "max,sve=off": "-bf16",
    "max,sve-max-vq=1": "-bf16",
    "max,sve-max-vq=2": "-sve256",
    "max,sve-max-vq=4,sve-default-vector-length=32": "-sve256",
    "a64fx": "-sve512",
    "max,sve-max-vq=8,sve-default-vector-length=128": "-bf16",
}


def values(*shape, dtype="f4", seed=0):
    rng = np.random.default_rng(seed)
    if dtype == "i1":
        return rng.integers(-128, 128, shape).astype(dtype)
    return rng.standard_normal(shape).astype(dtype)


def definite(n, dtype="f4"):
    a = values(n, n, dtype=dtype)
    return a @ a.T + n * np.eye(n, dtype=dtype)


def elementwise(x, y):
    return jnp.where(x > 0, jnp.exp(-x) * y, jnp.tanh(x) + jnp.sin(100 * y))


def reductions(x):
    return x.sum(0), x.max(1), jnp.prod(x * 0.01 + 1, 1), jnp.argmax(x, 1)


def convolution(x, w):
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def product(x, y):
    return jnp.matmul(x, y, preferred_element_type="int32" if x.dtype == "int8" else None)


def wide(x, y):
    return jnp.matmul(x, y, preferred_element_type="float32")


def sorts(x):
    return jnp.sort(x, 1), jnp.argsort(x, 1), jax.lax.top_k(x, 7)[0]


def called(x):
    return jax.ffi.ffi_call("doubled", jax.ShapeDtypeStruct(x.shape, x.dtype))(jnp.sin(x)) + 1


def doubled(x, out):
    for i in range(x.shape[0]):
        out[i] = x[i] + x[i]


BF16 = ml_dtypes.bfloat16
HEADS = tuple(values(2, 65, 4, 32, seed=n) for n in range(3))
MODELS = {  # the function, its arguments, how far from f64's results, of the largest
    "elementwise": (elementwise, (values(33, 1001), values(33, 1001, seed=1)), 2e-5),
    "reductions": (reductions, (values(123, 457),), 1e-4),
    "product": (product, (values(130, 257), values(257, 201, seed=1)), 1e-5),
    "product_f64": (product, (values(50, 60, dtype="f8"), values(60, 70, dtype="f8", seed=1)), 1e-13),
    "product_f16": (product, (values(40, 50, dtype="f2"), values(50, 60, dtype="f2", seed=1)), 2e-3),
    "softmax": (jax.nn.softmax, (values(64, 999),), 1e-5),
    "attention": (jax.nn.dot_product_attention, HEADS, 1e-5),
    "attention_bf16": (jax.nn.dot_product_attention, tuple(x.astype(BF16) for x in HEADS), 2e-2),
    "convolution": (convolution, (values(2, 17, 17, 24), values(3, 3, 24, 40, seed=1)), 1e-5),
    "bf16": (wide, (values(70, 130).astype(BF16), values(130, 90, seed=1).astype(BF16)), 1e-5),
    "bf16_row": (wide, (values(1, 130).astype(BF16), values(130, 900, seed=1).astype(BF16)), 1e-5),
    "i8": (product, (values(70, 130, dtype="i1"), values(130, 90, dtype="i1", seed=1)), 0),
    "i8_row": (product, (values(1, 130, dtype="i1"), values(130, 900, dtype="i1", seed=1)), 0),
    "sorts": (sorts, (values(11, 1000),), 0),
    "fft": (lambda x: jnp.abs(jnp.fft.fft(x)), (values(8, 256),), 1e-5),
    "cholesky": (jnp.linalg.cholesky, (definite(20),), 1e-5),
    "solve": (jnp.linalg.solve, (definite(20), values(20, 3, seed=1)), 1e-5),
    "eigh": (jnp.linalg.eigvalsh, (definite(20, "f8"),), 1e-12),
    "svd": (lambda a: jnp.linalg.svd(a, compute_uv=False), (values(20, 30),), 1e-5),
    "eig": (lambda a: jnp.sort(jnp.abs(jnp.linalg.eigvals(a))), (values(15, 15, dtype="f8"),), 1e-10),
}


def widened(x):
    return x.astype("i4" if x.dtype == "i1" else "f8")


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    """A folder with a bundle for all AArch64 targets of each model, and the results by name."""
    folder, wanted, patch = tmp_path_factory.mktemp("aarch64"), {}, pytest.MonkeyPatch()
    patch.setattr(custom_calls, "_REGISTRY", {})

    def add(name, function, arguments, results):
        data = aotc.compile(jax.jit(function), *arguments, target=TARGET)
        (folder / f"{name}.vmfb").write_bytes(data)
        (folder / f"{name}.pickle").write_bytes(pickle.dumps(list(arguments)))
        wanted[name] = [np.asarray(x) for x in jax.tree.leaves(results)]

    with jax.enable_x64(True):
        for name, (function, arguments, _) in MODELS.items():
            add(name, function, arguments, function(*map(widened, arguments)))
        x = values(37)
        for name, native in (("compiled", True), ("python", False)):
            aotc.register_custom_call("doubled", doubled, native=native)
            add(name, called, (x,), 2 * np.sin(x.astype("f8")) + 1)
    patch.undo()
    return folder, wanted


@pytest.mark.parametrize("processor", PROCESSORS)
def test_a_processor_takes_its_code_and_is_right(processor, bundles):
    folder, wanted = bundles
    command = [PYTHON, processor, ROOT / "tests" / "support" / "aarch64" / "bundle_calls.py", folder]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    target = TARGETS[f"cpu:aarch64{PROCESSORS[processor]}"]
    assert said["targets"] == dict.fromkeys(wanted, target.name)
    assert set(target.features) <= set(said["features"])
    assert said["dispatches"] >= len(MODELS)
    assert said["peak"]
    for name, results in wanted.items():
        tolerance = MODELS[name][2] if name in MODELS else 1e-6
        for got, want in zip(pickle.loads((folder / f"{name}.results").read_bytes()), results, strict=True):
            exact = got.astype("f8")
            np.testing.assert_allclose(exact, want, rtol=0, atol=tolerance * np.abs(want).max(), err_msg=name)
