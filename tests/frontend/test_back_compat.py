"""Artifacts that jax exported in the past, for CPUs, GPUs and TPUs, with the results they had there.

They come with every jax (``jax._src.internal_test_util.export_back_compat_test_data``), and hold the custom calls
and the VHLO of their day.
"""

import importlib
import pkgutil

import numpy as np
import pytest

pytest.importorskip("numba")
from support.sharded_models import run_on_threads

import aotc
from aotc.diagnostics import CompileError
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.ranks.layout import mesh_of

PACKAGE = "jax._src.internal_test_util.export_back_compat_test_data"

pytestmark = [pytest.mark.cpu]

REFUSED = {
    "tpu_Sharding.data_2025_06_30.gspmd": "needs several devices",  # the module does not state their number
    "rocm_eigh_hipsolver_syev": "has no registered function",  # options in a struct of a library that is gone
}

OPEN = {
    # the initial value is no neutral one, and a window may take it in any number of times
    "tpu_stablehlo_dynamic_reduce_window.data_variadic_2023_06_17",
}


def found_in(value, path):
    """Yield the name and the record of each artifact below ``value``."""
    if isinstance(value, dict) and "mlir_module_serialized" in value:
        yield path, value
    elif isinstance(value, (dict, list, tuple)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from found_in(inner, f"{path}.{key}")


def artifacts():
    package = pytest.importorskip(PACKAGE)
    for entry in sorted(pkgutil.iter_modules(package.__path__), key=lambda e: e.name):
        if entry.ispkg:
            continue
        module = importlib.import_module(f"{PACKAGE}.{entry.name}")
        for name in sorted(n for n in vars(module) if n.startswith("data")):
            yield from found_in(getattr(module, name), f"{entry.name}.{name}")


def adjoint(x):
    return np.conj(np.swapaxes(x, -1, -2))


def eigh(v, w):
    return [w, (v * w[..., None, :]) @ adjoint(v)]


def eig(w, left, right):
    a = np.arange(16.0).reshape(4, 4)
    return [np.sort(w.real), a @ right - w * right, a.T @ left - np.conj(w) * left]


def schur(t, v):
    return [v @ t @ adjoint(v)]


def svd(u, s, vh):
    return [s, (u * s[..., None, :]) @ vh]


INVARIANT = {"eigh": eigh, "Eigh": eigh, "eig": eig, "schur": schur, "svd": svd}
"""What does not change when vectors are turned by a phase, by the second word of a file's name."""


@pytest.mark.parametrize(("name", "data"), [pytest.param(n, d, id=n) for n, d in artifacts()])
def test_old_artifacts_of_jax_run_or_are_refused(name, data):
    refused = REFUSED.get(name) or REFUSED.get(name.split(".")[0])
    blob = bytes(data["mlir_module_serialized"])
    if refused is not None:
        with pytest.raises(CompileError, match=refused):
            aotc.compile(blob)
        return
    bundle, inputs = aotc.compile(blob), list(map(np.asarray, data["inputs"]))
    if (mesh := open_bundle(bundle).manifest.get("mesh")) is not None:
        got, *_ = run_on_threads(bundle, inputs, mesh_of(mesh).size)
    else:
        got = bundle.load().invoke("main", *inputs)
    want = [np.asarray(x) for x in data["expected_outputs"]]
    assert [(a.shape, a.dtype) for a in got] == [(a.shape, a.dtype) for a in want]
    if name in OPEN:
        return
    invariant = INVARIANT.get(name.split(".")[0].split("_")[1], lambda *arrays: arrays)
    for a, b in zip(invariant(*got), invariant(*want), strict=True):
        scale = max(1.0, float(np.abs(b).max(initial=0))) if b.dtype.kind in "fc" else 0
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-4 * scale)
