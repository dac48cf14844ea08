"""A program has the same bits with any of its dims symbolic, but for sums whose order follows from a symbolic size.

Each program is compiled for every subset of its dims and compared with the build whose sizes are all known. ``DIFFER``
lists the subsets with other bits, and docs/inputs.md has the classes that they belong to.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import export, lax

import aotc

pytestmark = pytest.mark.cpu
TARGET = "cpu:x86-64-v3"
"""One target everywhere: the order of a sum follows from the lanes of its vectors."""
DTYPES = {"f32": np.float32, "f64": np.float64, "bf16": ml_dtypes.bfloat16}
CLOSE = {"f32": 2e-5, "f64": 1e-13, "bf16": 5e-2}
"""How far two orders of a sum lead apart, of the largest element."""


class Program(NamedTuple):
    """A function of arrays; a shape names dims or has numbers, ``r`` is one of indices below ``limit``."""

    function: Callable[..., Any]
    shapes: tuple[str, ...]
    sizes: dict[str, int]
    limit: int = 0


def matmul(m: int, k: int, n: int) -> Program:
    return Program(lambda x, y: x @ y, ("m,k", "k,n"), {"m": m, "k": k, "n": n})


def by_columns(m: int, k: int, n: int) -> Program:
    return Program(lambda x, y: x @ y.T, ("m,k", "n,k"), {"m": m, "k": k, "n": n})


def of_transpose(m: int, k: int, n: int) -> Program:
    return Program(lambda x, y: x.T @ y, ("k,m", "k,n"), {"m": m, "k": k, "n": n})


def convolve(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def grouped(x: jax.Array, w: jax.Array) -> jax.Array:
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=2)


def complex_product(x: jax.Array, y: jax.Array) -> jax.Array:
    return (x + 1j * x) @ (y - 2j * y)


def normalize(x: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-5) * scale + shift


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = jnp.einsum("htd,hsd->hts", q, k) / np.sqrt(32).astype(q.dtype)
    return jnp.einsum("hts,hsd->htd", jax.nn.softmax(scores, -1), v)


WEIGHTS = np.random.default_rng(5).standard_normal((33, 48)) * 0.1
PROGRAMS = {
    "matmul": matmul(40, 129, 50),
    "matmul, whole vectors": matmul(37, 96, 64),
    "matmul, tiny": matmul(7, 17, 9),
    "matmul, tiny, more terms": matmul(5, 100, 12),
    "matmul, one term": matmul(5, 1, 12),
    "matmul, few rows": matmul(3, 200, 48),
    "matmul, one row": matmul(1, 300, 65),
    "matmul by columns": by_columns(40, 129, 50),
    "matmul of a transpose": of_transpose(40, 129, 50),
    "matmul of a transpose, tiny": of_transpose(5, 100, 12),
    "matmul of a transpose and a vector": Program(lambda x, y: x.T @ y, ("k,m", "k"), {"m": 130, "k": 300}),
    "matmul of a batch": Program(lambda x, y: x @ y, ("b,m,k", "b,k,n"), {"b": 3, "m": 5, "k": 17, "n": 9}),
    "matmul and a matrix": Program(lambda x, y: x @ y, ("b,m,k", "k,n"), {"b": 3, "m": 20, "k": 70, "n": 32}),
    "matmul and constants": Program(lambda x: jnp.tanh(x @ WEIGHTS.astype(x.dtype)), ("b,33",), {"b": 1}),
    "gradient of a layer": Program(
        jax.grad(lambda w, x: jnp.tanh(x @ w).sum()), ("k,n", "m,k"), {"m": 20, "k": 70, "n": 32}
    ),
    "conv": Program(convolve, ("2,9,w,c", "3,3,c,o"), {"w": 11, "c": 8, "o": 24}),
    "conv of one channel": Program(convolve, ("b,9,w,1", "3,3,1,o"), {"b": 2, "w": 11, "o": 16}),
    "conv of groups": Program(grouped, ("b,h,w,16", "3,3,8,24"), {"b": 2, "h": 9, "w": 11}),
    "complex matmul": Program(complex_product, ("m,k", "k,n"), {"m": 20, "k": 30, "n": 12}),
    "scatter": Program(lambda x, i, u: x.at[i].add(u), ("m,k", "r", "r,k"), {"m": 16, "r": 9, "k": 33}, 16),
    "dot of a scatter": Program(
        lambda x, i, u, y: x.at[i].add(u) @ y, ("m,k", "r", "r,k", "k,n"), {"m": 16, "r": 9, "k": 33, "n": 12}, 16
    ),
    "sums of columns": Program(lambda x: x.sum(0), ("m,n",), {"m": 70, "n": 300}),
    "softmax of columns": Program(lambda x: jax.nn.softmax(x, 0), ("m,n",), {"m": 90, "n": 30}),
    "matmul by columns, few rows": by_columns(3, 200, 48),
    "matmul and a vector": Program(lambda x, y: x @ y, ("m,k", "k"), {"m": 70, "k": 300}),
    "complex matmul, tiny": Program(complex_product, ("m,k", "k,n"), {"m": 4, "k": 30, "n": 12}),
    "conv of few channels": Program(convolve, ("1,40,w,c", "3,3,c,o"), {"w": 64, "c": 4, "o": 2}),
    "matmul, few columns": matmul(64, 200, 3),
    "sums of rows": Program(lambda x: x.sum(1), ("m,n",), {"m": 9, "n": 13}),
    "sum of all": Program(lambda x: x.sum(), ("m,n",), {"m": 9, "n": 13}),
    "sum of many": Program(lambda x: x.sum(), ("m,n",), {"m": 600, "n": 700}),
    "sums of long columns": Program(lambda x: x.sum(0), ("m,n",), {"m": 2000, "n": 300}),
    "softmax": Program(lambda x: jax.nn.softmax(x, -1), ("m,n",), {"m": 9, "n": 301}),
    "layer norm": Program(normalize, ("m,n", "n", "n"), {"m": 20, "n": 301}),
    "sums so far": Program(lambda x: jnp.cumsum(x, 1), ("m,n",), {"m": 16, "n": 200}),
    "attention": Program(attend, ("h,t,d", "h,s,d", "h,s,d"), {"h": 4, "t": 40, "s": 65, "d": 32}),
    "attention of one query": Program(attend, ("h,t,d", "h,s,d", "h,s,d"), {"h": 4, "t": 1, "s": 300, "d": 32}),
}
ATTENTION = "d hd td sd htd hsd tsd htsd"
DIFFER = {
    "f32": {
        "matmul by columns, few rows": "m mk mn mkn",
        "matmul and a vector": "k mk",
        "complex matmul, tiny": "m k n mk mn kn mkn",
        "conv of few channels": "w c o wc wo co wco",
        "matmul, few columns": "n mn kn mkn",
        "sums of rows": "n mn",
        "sum of many": "m n mn",
        "sums of long columns": "m n mn",
        "softmax": "n mn",
        "layer norm": "n mn",
        "sums so far": "n mn",
        "attention": ATTENTION,
        "attention of one query": f"s hs ts hts {ATTENTION}",
    },
    "f64": {
        "complex matmul, tiny": "m k n mk mn kn mkn",
        "matmul by columns, few rows": "m mk mn mkn",
        "matmul, few columns": "n mn kn mkn",
        "sums of rows": "n mn",
        "sum of many": "m n mn",
        "sums of long columns": "m n mn",
        "sums so far": "n mn",
        "attention": ATTENTION,
        "attention of one query": f"s hs ts hts {ATTENTION}",
    },
    "bf16": {
        "complex matmul, tiny": "m k n mk mn kn mkn",
        "layer norm": "n mn",
        "sums so far": "n mn",
        "attention": ATTENTION,
        "attention of one query": ATTENTION,
    },
}
"""By dtype and program, the sets of symbolic dims with which a build has other bits than the static one."""


def subsets(program: Program) -> list[str]:
    names = list(program.sizes)
    return ["".join(c) for r in range(1, len(names) + 1) for c in itertools.combinations(names, r)]


def arguments(program: Program, dtype: str) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    made = []
    for shape in program.shapes:
        sizes = [program.sizes.get(d) or int(d) for d in shape.split(",")]
        index = shape == "r" and program.limit
        made.append(rng.integers(0, program.limit, sizes, "int32") if index else rng.standard_normal(sizes))
    return [a if a.dtype == np.int32 else a.astype(DTYPES[dtype]) for a in made]


def result(program: Program, symbolic: str, given: Sequence[np.ndarray]) -> np.ndarray:
    """Return what the program computes, compiled with these of its dims symbolic."""
    scope, types = export.SymbolicScope(), []
    for shape, a in zip(program.shapes, given, strict=True):
        dims = [d if d in symbolic and d.isalpha() else str(n) for d, n in zip(shape.split(","), a.shape, strict=True)]
        known = all(map(str.isdigit, dims))
        sizes = a.shape if known else export.symbolic_shape(",".join(dims), scope=scope)
        types.append(jax.ShapeDtypeStruct(sizes, a.dtype))
    exported = export.export(jax.jit(program.function))(*types)
    found = aotc.load(aotc.compile(exported, target=TARGET), threads=1)(*given)
    return np.asarray(found)


def check(name: str, dtype: str, among: Sequence[str]) -> None:
    """Compare builds with these dims symbolic with the static one: bits, and the size of differences."""
    program = PROGRAMS[name]
    with jax.enable_x64(dtype == "f64"):
        given = arguments(program, dtype)
        static = result(program, "", given)
        found = {symbolic: result(program, symbolic, given) for symbolic in among}
    expected = DIFFER[dtype].get(name, "").split()
    assert [d for d in among if found[d].tobytes() != static.tobytes()] == [d for d in among if d in expected]
    wide = static.astype(np.float64)
    for each in found.values():
        assert np.abs(each.astype(np.float64) - wide).max() <= CLOSE[dtype] * np.abs(wide).max()


@pytest.mark.parametrize("name", PROGRAMS)
def test_symbolic_sizes_give_the_bits_of_static_sizes(name):
    check(name, "f32", [d for d in subsets(PROGRAMS[name]) if len(d) in (1, len(PROGRAMS[name].sizes))])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_subset_of_symbolic_sizes_gives_the_same_bits(name, dtype):
    check(name, dtype, subsets(PROGRAMS[name]))


def test_listed_exceptions_are_subsets_of_the_dims():
    for row in DIFFER.values():
        for name, listed in row.items():
            assert set(listed.split()) <= set(subsets(PROGRAMS[name]))


def test_zero_times_a_negative_number_sums_to_a_positive_zero():
    """A sum of a symbolic number of terms starts with 0.0. One term that is known to be alone is a multiplication, for
    which XLA has -0.0 too."""
    program = PROGRAMS["matmul, one term"]
    given = [np.zeros((5, 1), np.float32), -np.ones((1, 12), np.float32)]
    for symbolic in (names for names in subsets(program) if "k" in names):
        assert not np.signbit(result(program, symbolic, given)).any()
