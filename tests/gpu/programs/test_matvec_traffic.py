"""Products of few rows on GPUs read each weight once, as it is stored, and write little more than their results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.gpu_program import gpu_program, run_gpu_program
from support.gpu_traffic import traffic, written

pytestmark = pytest.mark.ir

HOPPER = "cuda:sm_90a"
TOLERANCE = {"bfloat16": 2e-2, "float16": 4e-3, "float32": 4e-3, "int8": 4e-3}
"""Of the largest result: rounding of results and, of f32 on tensor cores, of operands to TF32."""


def wide(x, w):
    return jnp.matmul(x, w, preferred_element_type=jnp.float32)


def converted(x, w):
    return x.astype(jnp.float32) @ w.astype(jnp.float32)


def transposed(x, w):
    return x @ w.T


def swiglu(x, gate, up):
    return jax.nn.silu(x @ gate) * (x @ up)


def swiglu_wide(x, gate, up):
    return (jax.nn.silu(wide(x, gate)) * wide(x, up)).astype(x.dtype)


def swiglu_converted(x, gate, up):
    return jax.nn.silu(converted(x, gate)) * converted(x, up)


def swiglu_merged(x, both):
    gate, up = jnp.split(x @ both, 2, -1)
    return jax.nn.silu(gate) * up


def swiglu_turned(x, gate, up):
    return jax.nn.silu(x @ gate.T) * (x @ up.T)


def projections(x, q, k, v):
    return x @ q, x @ k, x @ v


# of each: the function, the shapes of its weights for k terms and n columns
PROGRAMS = {
    "linear": (jnp.matmul, lambda k, n: [(k, n)]),
    "wide": (wide, lambda k, n: [(k, n)]),
    "converted": (converted, lambda k, n: [(k, n)]),
    "turned": (transposed, lambda k, n: [(n, k)]),
    "swiglu": (swiglu, lambda k, n: [(k, n)] * 2),
    "swiglu wide": (swiglu_wide, lambda k, n: [(k, n)] * 2),
    "swiglu converted": (swiglu_converted, lambda k, n: [(k, n)] * 2),
    "swiglu merged": (swiglu_merged, lambda k, n: [(k, 2 * n)]),
    "swiglu turned": (swiglu_turned, lambda k, n: [(n, k)] * 2),
    "projections": (projections, lambda k, n: [(k, n)] * 3),
}
MIXED = {name for name in PROGRAMS if "converted" in name}
CASES = [
    (name, dtype) for name in PROGRAMS for dtype in TOLERANCE
    if dtype != "int8" or name in MIXED
]  # fmt: skip


def arguments(name, dtype, rows, terms, columns):
    """Return random rows and weights; integers are multiplied with rows of f32."""
    random = np.random.default_rng(rows)
    x = random.standard_normal((rows, terms)).astype("f4")
    weights = [random.standard_normal(shape) for shape in PROGRAMS[name][1](terms, columns)]
    if dtype == "int8":
        return [x, *(np.round(w * 30).clip(-127, 127).astype(np.int8) for w in weights)]
    first = x if name in MIXED else x.astype(jnp.dtype(dtype))
    return [first, *((w * terms**-0.5).astype(jnp.dtype(dtype)) for w in weights)]


@pytest.mark.parametrize(("name", "dtype"), CASES)
@pytest.mark.parametrize("rows", [1, 2, 4, 8])
@pytest.mark.parametrize(("terms", "columns"), [(1024, 3584), (1025, 2051)])
def test_weights_are_read_once_and_little_is_written(name, dtype, rows, terms, columns):
    """Sums of one row are cut in up to 32 parts of f32, those of more rows in up to 4 and their sum."""
    args = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arguments(name, dtype, rows, terms, columns)]
    function, _ = gpu_program(PROGRAMS[name][0], args, target=HOPPER)
    weights = sorted(np.prod(a.shape) * a.dtype.itemsize for a in args[1:])
    large = sorted(size for t in traffic(function) for size in t.reads if size >= weights[0] // 2)
    assert large == weights
    results = 4 * rows * sum(np.prod(a.shape) // terms for a in args[1:])  # of all products, in f32
    assert written(function) <= (max(4 * results, sum(weights) // 25) if rows == 1 else 5.5 * results)


@pytest.mark.parametrize(("name", "dtype", "rows"), [(*case, 1 + n % 8) for n, case in enumerate(CASES)])
def test_values(name, dtype, rows):
    """Odd sizes too, beside XLA in f32 on the same numbers."""
    args = arguments(name, dtype, rows, *((67, 163) if rows % 2 else (64, 136)))
    program = gpu_program(PROGRAMS[name][0], args, target=HOPPER)
    got = run_gpu_program(*program, args)
    want = jax.tree.leaves(jax.jit(PROGRAMS[name][0])(*(a.astype(jnp.float32) for a in args)))
    for a, b in zip(got, want, strict=True):
        assert np.abs(a.astype("f8") - np.asarray(b, "f8")).max() <= TOLERANCE[dtype] * np.abs(b).max()
