"""Fusion repeats little: the scalar operations of a fused program are at most a quarter more than those of its ops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.differential import LEVELS, check, normal
from support.gpu_program import gpu_program
from support.programs.shared_reads import FusedProgram, random_program

from aotc.ir.loop.printer import print_kernel
from aotc.lowering.plans import long_rows
from aotc.lowering.plans import thresholds as cost
from aotc.lowering.plans.long_rows import FEWEST_ROW_PARTS, LEAST_PART, ROW_PART

MOST = 1.25


def sorting_network(x):
    """A bitonic sort: at each of its stages an element is compared with another one, and both are read twice."""
    n = x.shape[0]
    for k in (2**i for i in range(1, n.bit_length())):
        for j in (k >> i for i in range(1, k.bit_length())):
            y = x.reshape(n // (2 * j), 2, j)
            low, high = jnp.minimum(y[:, 0], y[:, 1]), jnp.maximum(y[:, 0], y[:, 1])
            up = ((np.arange(n) & k) == 0).reshape(y.shape)[:, 0]
            x = jnp.stack([jnp.where(up, low, high), jnp.where(up, high, low)], axis=1).reshape(n)
    return x


def controlled_nots(x):
    """One qubit after the other turns its neighbour around where it is 1."""
    bits = x.shape[0].bit_length() - 1
    for c in range(bits - 1):
        state = x.reshape((2,) * bits)
        zero, one = jnp.take(state, 0, axis=c), jnp.flip(jnp.take(state, 1, axis=c), axis=c)
        x = jnp.stack([zero, one], axis=c).reshape(-1)
    return x


def mirrored(stages):
    """Each stage reads the one before it forwards and backwards."""

    def function(x):
        for _ in range(stages):
            x = x * 0.5 + lax.rev(x, (0,))
        return x

    return function


def rotations(angles):
    """The energy of a state that one qubit after the other was turned in, as quantum circuits are differentiated."""
    bits = angles.shape[0]
    x = jnp.zeros(2**bits, "complex64").at[0].set(1)
    for q in range(bits):
        c, s = jnp.cos(angles[q]), jnp.sin(angles[q])
        y = x.reshape(2**q, 2, -1)
        x = controlled_nots(jnp.stack([c * y[:, 0] - s * y[:, 1], s * y[:, 0] + c * y[:, 1]], axis=1).reshape(-1))
    return jnp.sum(jnp.abs(x) ** 2 * (np.arange(2**bits) % 3).astype("float32"))


def summed(x, axis):
    return x, x.sum(axis)


EXAMPLES = {
    "sorting-network": (sorting_network, [normal(32)]),
    "controlled-nots": (controlled_nots, [normal(64)]),
    "mirrored": (mirrored(12), [normal(24)]),
    "moved-and-read": (lambda x: (jnp.tanh(x), jnp.tanh(x).reshape(8, 6).T), [normal(6, 8)]),
    "rows": (lambda x: jax.nn.softmax(x * x + 1) - x.mean(1, keepdims=True), [normal(5, 70)]),
    "stored-and-summed-by-column": (lambda x: summed(jnp.tanh(x), 0), [normal(6, 40)]),
    "stored-and-summed-by-row": (lambda x: summed(jnp.tanh(x), 1), [normal(6, 40)]),
    "stored-and-read-again": (lambda x: (lax.exp(y := jnp.tanh(x)), y), [normal(6, 40)]),
    "test-behind-a-test": (lambda x: jnp.pad(jnp.roll(x * x, 2, 1)[:, 2:], ((0, 0), (0, 2))), [normal(6, 40)]),
}


SEEDS = [*range(8), *(pytest.param(n, marks=pytest.mark.slow) for n in range(8, 400))]


@pytest.mark.ir
@pytest.mark.parametrize("seed", SEEDS)
def test_fusion_of_random_programs_adds_at_most_a_quarter_of_work(seed):
    bounded(*random_program(seed, 14))


@pytest.mark.ir
@pytest.mark.parametrize("name", EXAMPLES)
def test_fusion_of_examples_adds_at_most_a_quarter_of_work(name):
    bounded(*EXAMPLES[name])


def bounded(function, arguments):
    wanted = [np.asarray(x) for x in jax.tree.leaves(jax.jit(function)(*arguments))]
    _, most = FusedProgram(function, arguments, 0).run(arguments)
    for level in (1, 2, 3):
        results, work = FusedProgram(function, arguments, level).run(arguments)
        for got, want in zip(results, wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
        assert work <= MOST * most, f"-O{level}: {work} scalar operations, {most} at -O0"


@pytest.mark.ir
@pytest.mark.parametrize("level", [2, 3])
def test_split_rows_compute_exp_twice(level, monkeypatch):
    """The one form that does more: rows that are read in parts, where memory is dearer than exp; once more, no more."""
    rows, n, part = 2, 512, 128
    parts = (FEWEST_ROW_PARTS, n // part), (ROW_PART, part), (LEAST_PART, 16)
    for row, value in (cost.REDUCED_ELEMENTS, n - 1), *parts:
        monkeypatch.setattr(row.__class__, "__setattr__", object.__setattr__)
        monkeypatch.setattr(row, "default", value)
    monkeypatch.setattr(long_rows, "_exp_recompute_nanoseconds", lambda row, target: 0)
    arguments = [normal(rows, n)]
    apart, fused = FusedProgram(jax.nn.softmax, arguments, 0), FusedProgram(jax.nn.softmax, arguments, level)
    for program in apart, fused:
        (got,), _ = program.run(arguments)
        np.testing.assert_allclose(got, jax.nn.softmax(arguments[0]), rtol=1e-5, atol=1e-6)
    assert apart.executed.pop("exp") == rows * n
    assert fused.executed.pop("exp") == 2 * rows * n + rows * n // part
    assert fused.executed.total() <= MOST * apart.executed.total()


@pytest.mark.ir
@pytest.mark.parametrize("level", [2, 3])
def test_code_size_is_linear_in_the_number_of_ops(level):
    """Twice the stages are at most twice the text, and some."""
    sizes = []
    for stages in (10, 20, 40):
        program = FusedProgram(mirrored(stages), [normal(24)], level)
        sizes.append(sum(len(print_kernel(k)) for k in program.kernels.values()))
    assert sizes[1] <= 2.2 * sizes[0]
    assert sizes[2] <= 2.2 * sizes[1]


@pytest.mark.cpu
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_fused_examples_match_xla(name, level):
    check(*EXAMPLES[name], level, factor=4)


@pytest.mark.cpu
def test_a_gradient_of_rotations_matches_xla():
    check(jax.value_and_grad(rotations), [normal(5)], 2, factor=40)


def test_gpu_gathers_compute_their_indices_in_the_same_kernel():
    """What that repeats takes less than a kernel that stores the places, or the tests on them."""
    x, i = jnp.ones((512, 512)), jnp.zeros((512, 512), "int32")
    _, variant = gpu_program(lambda x, i: jnp.take_along_axis(x, i, 1), [x, i])
    assert [kernel.name for kernel in variant.kernels] == ["k0_gather"]
