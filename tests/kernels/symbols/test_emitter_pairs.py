"""Loops that become one kernel, whose body has the code of several emitters: their symbols are merged."""

from dataclasses import replace
from itertools import cycle

import numpy as np
import pytest

import aotc
from aotc.lowering.program import memories
from aotc.lowering.program.while_kernels import small_loops
from aotc.vmfb.bundle import open_bundle

pytestmark = pytest.mark.cpu
jax = pytest.importorskip("jax")
from support.programs.emitters import EMITTERS, in_a_loop  # noqa: E402

LENGTHS = (12, 31, 16, 30, 61, 64, 8, 50, 5, 63)
"""Powers of two, composites and primes, odd and even; what an iteration makes of 64 x 64 is the largest value."""
OTHER_TARGETS = [
    *("cpu:x86-64-v2", "cpu:x86-64-v3", "cpu:x86-64-v4", "cpu:x86-64-amx"),
    *("cpu:aarch64", "cpu:aarch64-bf16", "cpu:aarch64-sve256"),
]


@pytest.fixture(autouse=True)
def _any_loop_is_one_kernel(monkeypatch):
    """Let a loop become one kernel however much it computes and reads."""
    monkeypatch.setattr(memories, "LOOP_FLOPS", replace(memories.LOOP_FLOPS, default=1 << 40))
    monkeypatch.setattr(small_loops, "LOOP_BUFFERS", replace(small_loops.LOOP_BUFFERS, default=1 << 40))
    with jax.enable_x64(True):
        yield


def check(names: list[str], length: int) -> None:
    """Compile a loop over emitters to one kernel, and compare each result with XLA's."""
    function = in_a_loop([EMITTERS[name] for name in names])
    x = np.sin(np.arange(length) * 1.7 + 1).astype("f4")
    data = aotc.compile(function, x, cache=False)
    assert kernels_of_loops(data) == 1
    for name, found, wanted in zip(names, aotc.load(data)(x), jax.jit(function)(x), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5, err_msg=f"{name} of {length} in {names}")


def kernels_of_loops(data: bytes) -> int:
    """Return how many loops of a bundle are one kernel, if no iteration launches another one."""
    (variant,) = open_bundle(data).manifest["variants"]
    loops = [k["name"] for k in variant["kernels"] if "_loop_" in k["name"]]
    iterated = [k["name"] for k in variant["kernels"] if "_dft" in k["name"]]
    assert not iterated, iterated
    return len(loops)


@pytest.mark.parametrize(
    ("names", "length"),
    [
        (list(EMITTERS), 12),
        pytest.param(list(reversed(EMITTERS)), 12, marks=pytest.mark.slow),
        pytest.param(list(EMITTERS), 31, marks=pytest.mark.slow),
        pytest.param(list(reversed(EMITTERS)), 32, marks=pytest.mark.slow),
    ],
    ids=["forward 12", "backward 12", "forward 31", "backward 32"],
)
def test_all_emitters_write_one_kernel(names, length):
    check(names, length)


@pytest.mark.parametrize("length", [12, 30, 97, pytest.param(100, marks=pytest.mark.slow), 143])
def test_spectral_steps_of_a_solver_are_one_kernel(length):
    check(["real spectrum", "complex spectrum", "real spectrum"], length)


@pytest.mark.slow
@pytest.mark.parametrize("first", EMITTERS)
def test_pairs_of_emitters_write_one_kernel(first):
    start = list(EMITTERS).index(first)
    lengths = cycle(LENGTHS[start % len(LENGTHS) :] + LENGTHS[: start % len(LENGTHS)])
    for second, length in zip(EMITTERS, lengths):
        check([first, second], length)


@pytest.mark.slow
@pytest.mark.parametrize("target", OTHER_TARGETS)
@pytest.mark.parametrize("length", [12, 32])
def test_all_emitters_write_one_kernel_of_every_target(target, length):
    for names in (list(EMITTERS), list(reversed(EMITTERS))):
        function = in_a_loop([EMITTERS[name] for name in names])
        data = aotc.compile(function, np.zeros(length, "f4"), target=target, cache=False)
        assert kernels_of_loops(data) == 1


@pytest.mark.slow
@pytest.mark.cudasim
@pytest.mark.parametrize("first", EMITTERS)
def test_pairs_of_emitters_compile_for_a_gpu(first):
    function = in_a_loop([EMITTERS[name] for name in (first, "special functions", "rare arguments", "halves", first)])
    assert aotc.compile(function, np.zeros(12, "f4"), target="cuda:sm_80", cache=False)
