"""Scatters in which each update has rows of its own become comparisons, or are known to be apart; others stay."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aotc.frontend.importer import import_model
from aotc.ir.semantics.run import interpret
from aotc.ir.semantics.verify import verify
from aotc.ir.tensor.ir import TensorType, Value, walk
from aotc.ir.tensor.text import parse_module
from aotc.lowering.analysis.constant_values import iota_dim
from aotc.lowering.passes.canonicalize.canonicalize import canonicalize
from aotc.lowering.passes.inline import inline
from aotc.options import Options
from aotc.pipeline import checked_options, run_passes

pytestmark = pytest.mark.ir

RNG = np.random.default_rng(0)
Y = np.array([0, 3, -1, 6, 7, 2**31 - 1, -8, 1], "i4")  # some beyond the array
ROWS, U, WIDE = np.arange(8), RNG.normal(size=8).astype("f4"), RNG.normal(size=(8, 5)).astype("f4")


def cross_entropy(x, y):
    return jax.grad(lambda x: -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x), y[:, None], -1)))(x)


def zeros(*shape, dtype="f4"):
    return jnp.zeros(shape, dtype)


COMPARED = {
    "cross entropy": (cross_entropy, RNG.normal(size=(8, 7)).astype("f4"), Y),
    "set": (lambda y, u: zeros(8, 7).at[jnp.arange(8), y].set(u), Y, U),
    "add to ones": (lambda y, u: jnp.ones((8, 7)).at[jnp.arange(8), y].add(u), Y, U),
    "minus zero": (lambda y, u: jnp.full((8, 7), -0.0).at[jnp.arange(8), y].add(u), Y, -0.0 * U),
    "constant rows": (lambda y, u: zeros(8, 7).at[ROWS, y].max(u), Y, U),
    "by columns": (lambda y, u: zeros(7, 8).at[y, jnp.arange(8)].set(u), Y, U),
    "windows": (lambda y, u: zeros(8, 7, 5).at[jnp.arange(8), y].set(u), Y, WIDE),
    "windows between": (lambda y, u: zeros(8, 5, 7).at[jnp.arange(8), :, y].add(u), Y, WIDE),
    "two indices": (lambda y, z, u: zeros(8, 7, 9).at[jnp.arange(8), y, z].set(u), Y, Y[::-1].copy(), U),
    "diagonal": (lambda u: zeros(8, 8).at[jnp.arange(8), jnp.arange(8)].set(u), U),
    "two rows": (
        lambda y, u: zeros(8, 5, 7).at[jnp.arange(8)[:, None], jnp.arange(5), y].set(u),
        RNG.integers(-9, 9, (8, 5)).astype("i4"), WIDE,
    ),
    "bytes": (lambda y, u: zeros(8, 7, dtype="i4").at[jnp.arange(8), y].set(u, mode="drop"), Y.astype("i1"), Y),
    "complex": (lambda y, u: zeros(8, 7, dtype="c8").at[jnp.arange(8), y].multiply(u), Y, U.astype("c8")),
    "of one row": (lambda y, u: zeros(1, 7).at[jnp.arange(1), y].set(u), Y[:1], U[:1]),
}  # fmt: skip
APART = {
    "into values": (lambda x, y, u: x.at[jnp.arange(8), y].add(u), RNG.normal(size=(8, 7)).astype("f4"), Y, U),
    "fewer rows": (lambda y, u: zeros(9, 7).at[jnp.arange(8), y].add(u), Y, U),
    "a cache": (
        lambda x, y, u: x.at[jnp.arange(8), y].set(u), RNG.normal(size=(8, 7, 5)).astype("f4"), Y, WIDE,
    ),
}  # fmt: skip
NEITHER = {
    "an embedding": (lambda y, u: zeros(7, 5).at[y].add(u), Y, WIDE),
    "rows that meet": (lambda y, u: zeros(8, 7).at[jnp.arange(8) // 2, y].add(u), Y, U),
    "numbers that wrap": (
        lambda y, u: zeros(100, 7).at[jnp.arange(200).astype("i1"), y].add(u, mode="drop"),
        np.zeros(200, "i4"), np.ones(200, "f4"),
    ),
    "rows without a number": (
        lambda y, u: zeros(8, 7).at[jnp.arange(8)[:, None], y].add(u),
        RNG.integers(0, 7, (8, 5)).astype("i4"), WIDE,
    ),
}  # fmt: skip


def simplified(function, arrays):
    module = canonicalize(inline(import_model(jax.jit(function), *arrays), Options()), Options())
    assert not verify(module)
    return module


def scatters(module):
    return [op for f in module.functions.values() for op in walk(f.body) if op.name == "scatter"]


@pytest.mark.parametrize(("cases", "name"), [(c, n) for c in (COMPARED, APART, NEITHER) for n in c])
def test_disjoint_scatters_become_comparisons_or_unique(cases, name):
    function, *arrays = cases[name]
    module = simplified(function, arrays)
    found = scatters(module)
    assert bool(found) == (cases is not COMPARED)
    assert all(op.attrs["unique_indices"] == (cases is APART) for op in found)
    (got,) = interpret(module, *arrays)
    want = np.asarray(jax.jit(function)(*arrays))
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)
    if name != "cross entropy":
        assert np.asarray(got).tobytes() == want.tobytes()


def test_scatters_of_symbolic_row_counts_become_comparisons():
    (rows,) = jax.export.symbolic_shape("n")
    shapes = (jax.ShapeDtypeStruct((rows, 7), "f4"), jax.ShapeDtypeStruct((rows,), "i4"))
    module = canonicalize(inline(import_model(jax.jit(cross_entropy), *shapes), Options()), Options())
    assert not scatters(module)
    for n in (1, 8):
        x, y = COMPARED["cross entropy"][1][:n], Y[:n]
        (got,) = interpret(module, x, y)
        np.testing.assert_allclose(got, jax.jit(cross_entropy)(x, y), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("target", ["cpu:x86-64-v4", "cuda:sm_90a"])
def test_the_gradient_of_cross_entropy_is_three_kernels(target):
    function, *arrays = COMPARED["cross entropy"]
    options = checked_options(None, {"target": target})
    module = run_passes(import_model(jax.jit(function), *arrays), options)
    assert [op.name for op in module.functions["main"].body.ops if op.name != "constant"] == ["dispatch"] * 3


NUMBERED = """module @m {
func public @main(%x: i32[4, 6]) {
  %a = iota {dim = 0} : i32[4, 6]
  %b = convert %a : i8[4, 6]
  %c = iota {dim = 0} : i8[200]
  %d = iota {dim = 0} : u8[200]
  %e = reshape %d : u8[1, 200, 1]
  %f = broadcast %e {dims = (2, 0, 3)} : u8[200, 4, 7, 2]
  %g = constant {value = dense("i32", (2, 3), [0, 1, 2, 0, 1, 2])} : i32[2, 3]
  %h = constant {value = dense("i32", (3,), [0, 2, 1])} : i32[3]
  %i = reshape %a : i32[2, 2, 6]
  %j = iota {dim = 0} : i32[1]
  %k = convert %a : f32[4, 6]
  return %x
}
}
"""


def test_iota_dim_finds_values_that_count_along_a_dim():
    body = parse_module(NUMBERED).functions["main"].body
    definitions = {v: op for op in body.ops for v in op.results}
    found = {v.name: iota_dim(v, definitions) for v in definitions}
    expected = {"a": 0, "b": 0, "c": None, "d": 0, "e": 1, "f": 0, "g": 1, "h": None, "i": None, "j": None, "k": None}
    assert found == expected
    assert iota_dim(Value("other", TensorType("i32", (3,))), definitions) is None
