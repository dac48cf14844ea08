"""``aotc explain memory`` of sharded models: communicators of NCCL as an estimate, buffers of the exchange on CPUs."""

import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import aotc
from aotc.vmfb.ranks import collectives
from aotc.vmfb.ranks.collectives import Collective, buffer_bytes, run_collective

pytestmark = pytest.mark.cpu

X = np.ones((8, 64), "f4")
MIB = 1 << 20


def two_axes(x):
    """Sums over each axis."""
    return x - x.mean(0, keepdims=True) - x.mean(1, keepdims=True)


def compiled(**options):
    mesh = {"data": 2, "model": 4}
    return aotc.compile(two_axes, X, mesh=mesh, in_shardings=P("data", "model"), **options)


class Alone:
    """A link whose other ranks send zeros."""

    rank = 0

    def __init__(self, size):
        self.size = size

    def exchange(self, sends, receives, what):
        for array in receives.values():
            array[...] = 0


@pytest.mark.parametrize("members", [1, 2, 3, 8])
@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "collective_broadcast"])
def test_explained_buffers_equal_the_allocated_ones(op, members, monkeypatch):
    monkeypatch.setattr(collectives, "GATHER_BYTES", MIB)
    monkeypatch.setattr(collectives, "PIECE_BYTES", 2 * MIB)
    for size in (24 * 1024, MIB * 3 // 4, 6 * MIB):
        x = np.ones(size // 4, "f4")
        count = {"all_gather": x.size * members, "reduce_scatter": x.size // members}.get(op, x.size)
        result = np.empty(count, "f4")
        tracemalloc.start()
        run_collective(Collective(op, 0, reduction="add"), Alone(members), [x], [result])
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert abs(peak - buffer_bytes(op, x.nbytes, members)) < 16 * 1024


def test_a_gpu_has_a_communicator_for_each_list_of_groups():
    report = aotc.explain("memory", compiled(target="cuda:sm_90a"))
    found = {row.axes: (row.group, row.bytes // MIB, row.is_estimate) for row in report.communicators}
    first, *others = [row.bytes // MIB for row in report.communicators]
    assert {axes: row[0] for axes, row in found.items()} == {"data": 2, "model": 4}
    assert (first, others) == (860, [486])
    assert all(row[2] for row in found.values())
    text = " ".join(str(report).split())
    assert "2 communicators of each rank: about 1.4 GB of its GPU, an estimate from NCCL 2.28.9" in text
    assert "~901.8 MB" in text


def test_a_cpu_has_the_buffers_of_one_collective_at_a_time():
    report = aotc.explain("memory", compiled())
    found = {row.axes: row.bytes for row in report.communicators}
    # Each rank gathers what all ranks of its group sum: f32[1, 16] of 2, and f32[4, 1] of 4.
    assert found == {"data": 2 * 16 * 4, "model": 4 * 4 * 4}
    assert not any(row.is_estimate for row in report.communicators)
    text = " ".join(str(report).split())
    assert "buffers of the exchange on each rank: 128 B, for one collective at a time" in text
    assert "GPU" not in text


def test_a_permutation_uses_the_communicator_of_all_ranks():
    mesh = jax.sharding.AbstractMesh((4,), ("a",))
    turn = jax.shard_map(
        lambda x: jax.lax.ppermute(x, "a", [(0, 1), (1, 2), (2, 3), (3, 0)]), mesh=mesh, in_specs=P("a"),
        out_specs=P("a"),
    )  # fmt: skip
    x = jax.ShapeDtypeStruct((8,), "f4", sharding=jax.sharding.NamedSharding(mesh, P("a")))
    (row,) = aotc.explain("memory", aotc.compile(jax.jit(turn), x)).communicators
    assert (row.axes, row.group, row.collectives, row.bytes) == ("a", 4, 1, 0)


def test_models_of_one_device_and_bundles_without_sizes_have_no_communicators():
    report = aotc.explain("memory", aotc.compile(jnp.tanh, X))
    assert report.communicators == ()
    assert "exchange" not in str(report)
    assert aotc.explain("memory", compiled(debug_info=False)).communicators == ()
