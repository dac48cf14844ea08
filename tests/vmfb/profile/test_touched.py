"""Bytes that kernels touch: whole arrays only where all of them is read or written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aotc
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.profile.touched_bytes import touched_bytes

pytestmark = pytest.mark.cpu

CACHE, ROW, AT = np.zeros((1000, 256), np.float32), np.ones((1, 256), np.float32), np.int32(3)
ALL, ONE, WORD = CACHE.nbytes, ROW.nbytes, 4


def row_written(cache, row, at):
    return jax.lax.dynamic_update_slice(cache, row, (at, 0))


def touched(function, *arguments, target="cpu", **flags):
    """Bytes of each array of the last kernel."""
    bundle = open_bundle(aotc.compile(function, *arguments, target=target, **flags))
    return touched_bytes(list(bundle.manifest["debug"]["kernels"].values())[-1]["text"], ())


@pytest.mark.parametrize("target", ["cpu", "cuda:sm_90a"])
def test_a_row_in_place(target):
    if target != "cpu":
        pytest.importorskip("numba_cuda")
    written = jax.jit(row_written, donate_argnums=0)
    assert sorted(touched(written, CACHE, ROW, AT, target=target)) == [WORD, ONE, ONE]
    added = jax.jit(lambda cache, row, at: cache.at[jnp.stack([at, at + 1])].add(row), donate_argnums=0)
    assert max(touched(added, CACHE, ROW, AT, target=target)) <= 4 * ONE


def test_rows_that_are_read():
    assert sorted(touched(lambda cache, row, at: jnp.tanh(cache[at]) + row, CACHE, ROW, AT)) == [WORD, ONE, ONE, ONE]
    assert max(touched(lambda x: x[:, ::4] * 2, CACHE)) <= 1.05 * ALL / 4  # the last item's turns count as all others'


@pytest.mark.parametrize(
    "function", [jnp.tanh, lambda x: jnp.sort(x, 1), lambda x: jax.nn.softmax(x, 1), lambda x: x.T + 1]
)
def test_whole_arrays(function):
    assert touched(function, CACHE)[-1] == touched(function, CACHE)[0] == ALL


TEXT = '''def k(a0: "f32[n, 8]", a1: "f32[n, n]", /, o0: "f32[n]", *, n: "dim", grid: "n"):
    for p in parallel(0, n):
        for i in range(p, p + 2):
            o0[p] = a0[p, i]
        for j in range(0, p, 2):
            o0[p] = a1[p, j]
'''


def test_sizes_of_a_call():
    assert touched_bytes(TEXT, (100,)) == (800, 4 * 100 * 50, 400)
    assert touched_bytes(TEXT, (0,)) == (0, 0, 0)
    with pytest.raises(KeyError):
        touched_bytes(TEXT, ())


def test_data_dependent_accesses_and_passed_arrays_count_whole():
    head = 'def k(a0: "f32[8, 8]", a1: "f32[8]", /, o0: "f32[8]", *, grid: "1"):\n'
    assert touched_bytes(head + "    while a1[0]:\n        o0[0] = a0[0, 0]\n", ()) == (256, 32, 32)
    iterations = "    n1 = let(a1[0])\n    for i in range(0, n1):\n        o0[0] = a0[0, i]\n"
    assert touched_bytes(head + iterations, ())[0] == 256
    assert touched_bytes(head + "    call(a0, 3)\n    o0[a1[2]] = f32(1)\n", ()) == (256, 4, 4)


def test_a_step_of_a_decoder_is_not_above_the_roof():
    """Where a cache of megabytes gets a row."""
    module = aotc.load(aotc.compile(jax.jit(row_written, donate_argnums=0), CACHE, ROW, AT), threads=1)
    with module.profile() as recording:
        for _ in range(5):
            module.invoke("main", CACHE.copy(), ROW, AT, donate=True)
    found = [d for d in recording.dispatches if "update" in d.kernel]
    assert {d.bytes for d in found} == {2 * ONE + WORD}
    record = module.profile("main", CACHE, ROW, AT)
    assert {row["bytes"] for row in record["kernels"]} == {2 * ONE + WORD}
