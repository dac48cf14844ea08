"""Weight gradients of convolutions with symbolic images: the image is the window, and terms are added in tiles."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax import export, lax

import aotc
from aotc.frontend.importer import import_model
from aotc.ir.tensor.ir import walk
from aotc.options import Options
from aotc.pipeline import run_passes

pytestmark = pytest.mark.cpu


def convolve(x: Any, w: Any) -> Any:
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def sizes_of(shape: str, sizes: dict[str, int]) -> tuple[int, ...]:
    return tuple(sizes.get(d) or int(d) for d in shape.split(","))


def gradient(w: Any, x: Any) -> Any:
    return jax.grad(lambda w: (convolve(x, w) ** 2).sum())(w)


@pytest.mark.parametrize("shape", ["b,9,7,16", "2,n,n,16", "b,n,m,16"])
def test_weight_gradients_of_symbolic_images_are_planned_as_tiles(shape):
    scope = export.SymbolicScope()
    w = jax.ShapeDtypeStruct((3, 3, 16, 24), np.float32)
    x = jax.ShapeDtypeStruct(export.symbolic_shape(shape, scope=scope), np.float32)
    model = export.export(jax.jit(gradient))(w, x)
    module = run_passes(import_model(model), Options(target="cpu:x86-64-v3"))
    assert not [op for f in module.functions.values() for op in walk(f.body) if op.name == "conv"]
    call = aotc.load(aotc.compile(model, target="cpu:x86-64-v3"), threads=1)
    rng = np.random.default_rng(3)
    for b, n, m in ((1, 1, 1), (2, 3, 4), (3, 8, 5), (1, 17, 20)):
        given = [rng.standard_normal(s) for s in ((3, 3, 16, 24), sizes_of(shape, {"b": b, "n": n, "m": m}))]
        with jax.enable_x64(True):
            expected = np.asarray(gradient(*given))
        (found,) = call.invoke("main", *(a.astype(np.float32) for a in given))
        np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())
