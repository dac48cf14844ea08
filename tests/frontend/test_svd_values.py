"""Decompositions whose factors nobody asked for: the model may state any shape for what LAPACK leaves alone."""

import numpy as np
import pytest

import aotc

pytestmark = pytest.mark.cpu

MODEL = """module @values {{
  func.func public @main(%arg0: tensor<{m}x{n}x{t}>) -> (tensor<{k}x{r}>, tensor<i32>) {{
    %0:5 = stablehlo.custom_call @lapack_{routine}_ffi(%arg0) {{
      mhlo.backend_config = {{mode = 78 : ui8}},
      operand_layouts = [dense<[0, 1]> : tensor<2xindex>],
      result_layouts = [dense<[0, 1]> : tensor<2xindex>, dense<0> : tensor<1xindex>,
        dense<{ul}> : tensor<{ur}xindex>, dense<{vl}> : tensor<{vr}xindex>, dense<> : tensor<0xindex>]}}
      : (tensor<{m}x{n}x{t}>) -> (tensor<{m}x{n}x{t}>, tensor<{k}x{r}>, tensor<{u}{t}>, tensor<{v}{t}>, tensor<i32>)
    return %0#1, %0#4 : tensor<{k}x{r}>, tensor<i32>
  }}
}}
"""
FACTORS = {"thin": ("{m}x{k}x", "{k}x{n}x"), "full": ("{m}x{m}x", "{n}x{n}x"), "none": ("", "")}
LAYOUTS = {2: "[0, 1]", 0: ""}


@pytest.mark.parametrize("routine", ["dgesdd", "zgesdd", "sgesvd", "cgesvd"])
@pytest.mark.parametrize("size", [(2, 7), (7, 2), (3, 3)])
@pytest.mark.parametrize("stated", FACTORS)
def test_svd_without_vectors_equals_numpy(routine, size, stated):
    dtype = {"s": "f32", "d": "f64", "c": "complex<f32>", "z": "complex<f64>"}[routine[0]]
    m, n = size
    sizes = {"m": m, "n": n, "k": min(size)}
    factors = [text.format(**sizes) for text in FACTORS[stated]]
    ranks = [text.count("x") for text in factors]
    text = MODEL.format(
        **sizes, t=dtype, r=dtype.removeprefix("complex<").rstrip(">"), routine=routine, u=factors[0], v=factors[1],
        ul=LAYOUTS[ranks[0]], vl=LAYOUTS[ranks[1]], ur=ranks[0], vr=ranks[1],
    )  # fmt: skip
    x = np.random.default_rng(m).normal(size=size)
    whole = x + 1j * x[::-1] if routine[0] in "cz" else x
    x = whole.astype({"s": "f4", "d": "f8", "c": "c8", "z": "c16"}[routine[0]])
    values, status = aotc.load(aotc.compile(text)).invoke("main", x)
    assert status == 0
    wanted = np.linalg.svd(x.astype("c16"), compute_uv=False)
    np.testing.assert_allclose(values, wanted, atol=(1e-5 if routine[0] in "sc" else 1e-12) * wanted[0])
