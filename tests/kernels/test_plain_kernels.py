"""Sorts and selections: LLVM runs few passes over them, and emission does what these would do for their loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aotc
from aotc.ir.loop.parser import parse_kernel
from aotc.kernels import back_end
from aotc.kernels.cpu.compile import optimized_kernel_module, unoptimized_kernel_module
from aotc.kernels.emit.vector import scalar_emitter as plain
from aotc.kernels.emit.vector.scalar_emitter import has_loop_to_unroll, needs_no_llvm_passes
from aotc.targets import TARGETS

pytestmark = pytest.mark.cpu

TARGET = "cpu:x86-64-v4"
X = np.random.default_rng(0).standard_normal((3, 1000)).astype("float32")


PLAIN = {
    "sort": lambda x: jnp.sort(x, 1),
    "columns": lambda x: jnp.sort(x.reshape(1000, 3), 0),
    "argsort": lambda x: jnp.argsort(x, 1),
    "a few": lambda x: jax.lax.top_k(x, 8),
    "many": lambda x: jax.lax.top_k(x, 100),
    "many halves": lambda x: jax.lax.top_k(x.astype("bfloat16"), 100),
}
OTHERS = {
    "softmax": lambda x: jax.nn.softmax(x),
    "flags": lambda x: jax.lax.top_k(x > 0, 8),
    "a dear function": lambda x: jnp.sort(jnp.exp(x), 1),
}


@pytest.mark.parametrize("name", PLAIN)
def test_few_passes_are_run_for_a_kernel_without_loops_for_vectors(name, compiled, monkeypatch):
    kernel = compiled(PLAIN[name], X)[-1]
    assert needs_no_llvm_passes(kernel)
    monkeypatch.setattr(back_end.Library, "optimize", None)
    assert "define void" in str(optimized_kernel_module(kernel, TARGETS[TARGET]))


@pytest.mark.parametrize("name", OTHERS)
def test_all_passes_are_run_for_others(name, compiled):
    assert not all(map(needs_no_llvm_passes, compiled(OTHERS[name], X)))


def test_moves_are_written_four_times_and_counts_twice(compiled):
    (kernel,) = compiled(PLAIN["sort"], X)
    text = str(optimized_kernel_module(kernel, TARGETS[TARGET]))
    assert has_loop_to_unroll(kernel)
    assert text.count("fcmp uno") == 2 + 1 + 4  # of the loop that counts, the first element, and the loop of rare rows


def test_loops_whose_turns_a_call_knows_are_written_once(compiled):
    (kernel,) = compiled(PLAIN["many"], X)
    assert not has_loop_to_unroll(kernel)


def test_zeros_are_stored_at_once_and_blocks_looked_at_as_vectors(compiled):
    (kernel,) = compiled(PLAIN["many"], X)
    text = str(unoptimized_kernel_module(kernel, TARGETS[TARGET]))
    assert text.count("call void @llvm.memset") == 1
    assert "load <32 x i32>" in text or "load <32 x float>" in text
    assert "@llvm.vector.reduce.or.v32i1" in text


def test_halves_are_moved_as_their_bits(compiled):
    (kernel,) = compiled(PLAIN["many"], X.astype("float16"))
    text = str(optimized_kernel_module(kernel, TARGETS[TARGET]))
    assert "fptrunc" not in text
    assert "fpext" not in text


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int8", "uint16", "int32", "bool"])
@pytest.mark.parametrize("n", [33, 40, 64, 100, 1000])
def test_blocks_of_every_length(n, dtype):
    """A block in the middle, at the end, or not whole has the largest; equal ones stand in several blocks."""
    x = np.zeros((4, n), "float32")
    x[0, n - 1] = x[1, n // 2] = x[2, 0] = 1
    x[3] = np.arange(n) % 7 - 3
    x = x.astype(jnp.dtype(dtype))
    for k in (1, 3, 24, 30):
        values, places = aotc.load(aotc.compile(lambda x, k=k: jax.lax.top_k(x, k), x)).invoke("main", x)
        want = np.argsort(-x.astype("float32"), axis=1, kind="stable")[:, :k]
        np.testing.assert_array_equal(places, want)
        np.testing.assert_array_equal(values.astype("float32"), np.take_along_axis(x.astype("float32"), want, 1))


def test_a_look_within_a_loop_that_becomes_one_kernel():
    """There the loop over lanes stands beside loops that become vectors."""

    def step(x):
        values, places = jax.lax.top_k(x, 4)
        return jnp.tanh(x).at[places[0]].add(values.sum())

    program = lambda x: jax.lax.fori_loop(0, 3, lambda _, x: step(x), x)
    x = X[0, :64]
    (got,) = aotc.load(aotc.compile(program, x)).invoke("main", x)
    np.testing.assert_allclose(got, jax.jit(program)(x), rtol=1e-5)


def test_few_passes_are_run_for_a_kernel_that_only_calls(compiled, monkeypatch):
    (kernel,) = compiled(jnp.fft.rfft, X)
    assert needs_no_llvm_passes(kernel)
    monkeypatch.setattr(back_end.Library, "optimize", None)
    assert "call void @dft_" in str(optimized_kernel_module(kernel, TARGETS[TARGET]))


@pytest.mark.parametrize(("end", "want"), [("8", True), ("n", True), ("n - 4", False)])
def test_zeros_are_stored_at_once_where_their_number_is_none_below_zero(end, want):
    head = 'def k(a: "f32[8]", /, out: "i64[8]", *, n: "dim(lo=0, extent=9)", grid: "1"):'
    (loop,) = parse_kernel(f"{head}\n    for z in range(0, {end}):\n        out[z] = i64(0)\n").body
    assert plain._is_zero_fill_loop(loop) == want
