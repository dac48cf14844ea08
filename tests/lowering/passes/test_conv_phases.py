"""Convolutions of spread out pixels, in phases and at once: beside XLA, integers bit for bit."""

import jax
import numpy as np
import pytest
from support.differential import integers, normal

import aotc

lax = jax.lax
LAYOUTS = {1: ("NWC", "WIO", "NWC"), 2: ("NHWC", "HWIO", "NHWC"), 3: ("NDHWC", "DHWIO", "NDHWC")}


def same(function, *arrays, limit=0.0):
    (got,) = aotc.load(aotc.compile(jax.jit(function), *arrays, source=False)).invoke("main", *arrays)
    want = np.asarray(jax.jit(function)(*arrays))
    np.testing.assert_allclose(got, want, rtol=0, atol=limit * np.abs(want).max(initial=0))


@pytest.mark.parametrize("taps", range(1, 6))
@pytest.mark.parametrize("gap", range(1, 5))
@pytest.mark.parametrize("padding", [(0, 0), (1, 2), (4, 0), (-1, 3), (-2, -1), (0, 9)])
def test_every_padding_of_a_dilated_input_matches_xla(taps, gap, padding):
    x, w = integers(2, 5, 3, low=-9, high=9), integers(taps, 3, 4, low=-9, high=9, seed=1)
    if (5 - 1) * gap + 1 + sum(padding) < taps:
        return
    form = {"lhs_dilation": (gap,), "dimension_numbers": LAYOUTS[1]}
    same(lambda x, w: lax.conv_general_dilated(x, w, (1,), [padding], **form), x, w)


@pytest.mark.parametrize(("kernel", "gaps", "groups"), [
    ((3, 3), (2, 2), 1), ((4, 4), (2, 2), 1), ((2, 2), (2, 2), 1), ((5, 2), (3, 1), 1), ((1, 1), (2, 3), 1),
    ((8, 8), (8, 8), 1), ((3, 3), (2, 2), 4), ((2, 2), (2, 2), 4), ((3, 3), (2, 2), 8), ((2, 3, 2), (2, 1, 3), 1),
])  # fmt: skip
def test_dilated_inputs_of_any_rank_groups_and_kernel_match_xla(kernel, gaps, groups):
    x = integers(2, *(5, 4, 3)[: len(gaps)], 8, low=-9, high=9)
    w = integers(*kernel, 8 // groups, 16, low=-9, high=9, seed=1)
    padding = [(k // 2, k - 1) for k in kernel]
    form = {"lhs_dilation": gaps, "dimension_numbers": LAYOUTS[len(gaps)], "feature_group_count": groups}
    same(lambda x, w: lax.conv_general_dilated(x, w, (1,) * len(gaps), padding, **form), x, w)


@pytest.mark.parametrize("more", [
    {"window_strides": (2, 1)}, {"rhs_dilation": (2, 1)}, {"batch_group_count": 2}, {"window_strides": (3, 2)},
])  # fmt: skip
def test_convolutions_without_phases_match_xla(more):
    x, w = integers(2, 6, 5, 4, low=-9, high=9), integers(3, 2, 4, 6, low=-9, high=9, seed=1)
    form = {"window_strides": (1, 1), "padding": [(1, 2), (1, 1)], "lhs_dilation": (2, 3), **more}
    same(lambda x, w: lax.conv_general_dilated(x, w, dimension_numbers=LAYOUTS[2], **form), x, w)


@pytest.mark.parametrize(("size", "kernel", "step"), [
    (16, 3, 2), (15, 3, 2), (17, 4, 3), (16, 4, 4), (14, 7, 2), (9, 1, 2),
])  # fmt: skip
def test_gradients_of_strided_convolutions_match_xla(size, kernel, step):
    def loss(x, w):
        form = {"dimension_numbers": ("NCHW", "OIHW", "NCHW")}
        return (lax.conv_general_dilated(x, w, (step, step), "SAME", **form) ** 2).sum()

    same(jax.grad(loss), normal(2, 3, size, size), normal(5, 3, kernel, kernel, seed=1), limit=1e-5)


def test_dilated_convolutions_of_a_symbolic_batch_match_xla():
    w = normal(3, 3, 4, 5)
    (b,) = jax.export.symbolic_shape("b")
    form = jax.ShapeDtypeStruct((b, 6, 7, 4), "float32")
    run = jax.jit(lambda x: lax.conv_transpose(x, w, (2, 2), "SAME"))
    module = aotc.load(aotc.compile(jax.export.export(run)(form).mlir_module_serialized, source=False))
    for n in (1, 3):
        x = normal(n, 6, 7, 4)
        np.testing.assert_allclose(module.invoke("main", x)[0], run(x), rtol=0, atol=1e-4)
