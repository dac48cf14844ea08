"""Programs whose sizes grow from call to call."""

from __future__ import annotations

import numpy as np

GROWING = """
func.func @main(%x: tensor<?x64xf32>, %w: tensor<64x64xf32>) -> tensor<?x64xf32> {
  %p = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0], precision = [HIGHEST, HIGHEST]
    : (tensor<?x64xf32>, tensor<64x64xf32>) -> tensor<?x64xf32>
  %z = stablehlo.constant dense<0.0> : tensor<f32>
  %s = stablehlo.reduce(%p init: %z) applies stablehlo.maximum across dimensions = [0, 1]
    : (tensor<?x64xf32>, tensor<f32>) -> tensor<f32>
  %i = stablehlo.convert %s : (tensor<f32>) -> tensor<i32>
  %n = stablehlo.reshape %i : (tensor<i32>) -> tensor<1xi32>
  %c = stablehlo.constant dense<64> : tensor<1xi32>
  %d = stablehlo.concatenate %n, %c, dim = 0 : (tensor<1xi32>, tensor<1xi32>) -> tensor<2xi32>
  %r = stablehlo.reduce(%p init: %z) applies stablehlo.add across dimensions = [0]
    : (tensor<?x64xf32>, tensor<f32>) -> tensor<64xf32>
  %b = stablehlo.dynamic_broadcast_in_dim %r, %d, dims = [1] : (tensor<64xf32>, tensor<2xi32>) -> tensor<?x64xf32>
  %q = stablehlo.dot_general %b, %w, contracting_dims = [1] x [0], precision = [HIGHEST, HIGHEST]
    : (tensor<?x64xf32>, tensor<64x64xf32>) -> tensor<?x64xf32>
  %k = stablehlo.dot_general %q, %w, contracting_dims = [1] x [0], precision = [HIGHEST, HIGHEST]
    : (tensor<?x64xf32>, tensor<64x64xf32>) -> tensor<?x64xf32>
  return %k : tensor<?x64xf32>
}"""


def check_growing(module, width=64):
    """Assert that results agree with NumPy for four growing sizes."""
    rng = np.random.default_rng(0)
    w = rng.normal(size=(width, width)).astype("float32")
    for rows in (3, 3 * width, 1, width):
        x = rng.normal(size=(rows, width)).astype("float32") * 4
        first = (x.astype("f8") @ w).astype("f4")
        row = first.sum(0, dtype="f8") @ w.astype("f8") @ w
        (found,) = module.invoke("main", x, w)
        assert len(found) == int(max(0, first.max())) > 0
        np.testing.assert_allclose(found, np.broadcast_to(row, found.shape), atol=1e-4 * abs(row).max())
