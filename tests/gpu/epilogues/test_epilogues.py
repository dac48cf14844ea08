"""What a product's epilogue reads and stores on a GPU: pieces of rows and columns, operands of all forms, odd sizes."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba_cuda")

from vmfb.test_cuda import gpu

import aotc

pytestmark = pytest.mark.cudasim
TARGET = "cuda:sm_90a"
DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}


def wide(x):
    return x.astype(jnp.float32)


# Of the product, an operand as large as the result, one for each column, one for each row.
EPILOGUES = {
    "residual": lambda p, r, c, d: jax.nn.relu(p + c + r),
    "rows and columns": lambda p, r, c, d: (p * d[:, None] + c) * jax.nn.sigmoid(r),
    "gelu": lambda p, r, c, d: jax.nn.gelu(p + c),
    "wider": lambda p, r, c, d: wide(p) + wide(r) * 0.5,
    "narrower": lambda p, r, c, d: jnp.clip(jnp.round(wide(p) + wide(r)), -100, 100).astype(jnp.int8),
    "a test": lambda p, r, c, d: wide(p) > wide(r),
    "three": lambda p, r, c, d: p + r + r[::-1] * c + jnp.tile(r[:1], (r.shape[0], 1)),
    "turned": lambda p, r, c, d: (p + c).T,
    "turned residual": lambda p, r, c, d: (p + r + c).T,
    "split": lambda p, r, c, d: (p + r).reshape(2, -1, p.shape[1]),
    "two": lambda p, r, c, d: (p + r, jnp.maximum(p + r, 0)),
}
SIZES = [(200, 264, 136), (130, 70, 72), (1000, 776, 64)]


def operands(kind, sizes):
    m, n, k = sizes
    random = np.random.default_rng(sum(sizes))
    shapes = [(m, k), (k, n), (m, n), (n,), (m,)]
    scale = [1, k**-0.5, 1, 1, 1]
    return [(random.standard_normal(s) * x).astype(DTYPES[kind]) for s, x in zip(shapes, scale)]


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("name", EPILOGUES)
class TestEpilogues:
    """Beside jax.jit on the CPU, which rounds as the tensor cores do but for TF32."""

    pytestmark = gpu

    def test_epilogues(self, name, kind):
        def function(a, b, r, c, d):
            return EPILOGUES[name](a @ b, r, c, d)

        for sizes in SIZES:
            given = operands(kind, sizes)
            module = aotc.load(aotc.compile(jax.jit(function), *given, target=TARGET), devices="cuda")
            found = jax.tree.leaves(module.invoke("main", *given))
            with jax.default_device(jax.devices("cpu")[0]):
                exact = jax.tree.leaves(function(*(jnp.asarray(x, jnp.float32) for x in given)))
            for got, want in zip(found, exact, strict=True):
                got, want = np.asarray(got).astype("f8"), np.asarray(want).astype("f8")
                assert got.shape == want.shape
                if name in ("a test", "narrower"):  # what lies on the edge may go either way
                    assert np.mean(np.abs(got - want) > 0) < 0.03, sizes
                    assert np.abs(got - want).max() <= 1
                else:
                    bound = {"bf16": 2e-2, "f16": 3e-3, "f32": 3e-3}[kind]
                    assert np.linalg.norm(got - want) <= bound * np.linalg.norm(want), sizes
