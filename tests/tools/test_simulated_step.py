"""Simulated calls of sharded models: times of collectives next to measured ones, schedules worked out by hand."""

import json
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import aotc
from aotc.tools.flow import FlowStep
from aotc.tools.simulate.cluster import cluster_of
from aotc.tools.simulate.links import LINKS
from aotc.tools.simulate.step import Exchange, Simulation

DGX = cluster_of("nvlink", "ib", 8)
# Microseconds of an all_reduce of bytes between two H200 by NCCL 2.28.9 in a CUDA graph, without NVLink multicast.
MEASURED = {8 << 10: 6.6, 128 << 10: 7.2, 512 << 10: 9.9, 2 << 20: 26.9, 8 << 20: 45.7, 64 << 20: 245.0}


@pytest.mark.parametrize("size", MEASURED)
def test_an_all_reduce_takes_the_measured_time(size):
    assert DGX.seconds_of("all_reduce", size, (0, 1)).seconds * 1e6 == pytest.approx(MEASURED[size], rel=0.25)


def test_a_ring_inside_a_host_has_steps_and_bytes():
    found = DGX.seconds_of("all_gather", 32 << 20, range(8))
    assert found.algorithm == "ring Simple"
    assert found.seconds == pytest.approx((8.4 + 7 * 3.4) / 1e6 + 7 * (32 << 20) / 280e9)


def test_a_ring_between_hosts_leaves_each_host_by_the_links_of_its_ranks():
    one_rank_a_host, all_ranks = range(0, 64, 8), range(64)
    size = 8 << 20
    slow = DGX.seconds_of("reduce_scatter", size, one_rank_a_host)
    assert slow.algorithm == "ring LL128"
    assert slow.seconds == pytest.approx((14 + 7 * 8.5) / 1e6 + size * 7 / 8 / (0.92 * 50e9))
    fast = DGX.seconds_of("reduce_scatter", size, all_ranks)
    assert fast.seconds == pytest.approx((14 + (63 - 7) * 1.9 + 7 * 4) / 1e6 + size * 63 / 64 / (0.92 * 280e9))


def test_a_tree_is_faster_for_small_arrays_on_many_hosts():
    found = DGX.seconds_of("all_reduce", 1 << 10, range(512))
    assert found.algorithm == "tree LL"
    hops = 2 * (7 * 0.6 + 6 * 5.0)
    assert found.seconds == pytest.approx((6.8 + hops) / 1e6 + 2 * 1024 / 20.4e9, rel=0.05)
    assert DGX.seconds_of("all_reduce", 1 << 30, range(16)).algorithm == "ring Simple"


def test_pcie_has_no_protocol_of_nvlink():
    found = {cluster_of("pcie", "ib", 8).seconds_of("all_reduce", 1 << n, range(8)).algorithm for n in range(8, 30)}
    assert not any("LL128" in name for name in found)


def test_one_rank_needs_no_time():
    assert DGX.seconds_of("all_reduce", 1 << 20, (3,)) == (0.0, "-")
    assert DGX.permute_time(1 << 20, 3, 3).seconds == 0


@pytest.mark.parametrize("wrong", [("ib", "ib", 8), ("nvlink", "nvlink", 8), ("nvlink", "ib", 0)])
def test_a_cluster_without_sense_is_refused(wrong):
    with pytest.raises(aotc.CallError, match=r"no such link|at least one rank"):
        cluster_of(*wrong)


# ------------------------------------------------------------ schedules by hand


def step(number, after=(), within="", graph=0, control="", end=0):
    facts = {}, 1, 1, False, (), (), (), tuple(after), False
    return FlowStep(number, graph, within, 0, *facts, control=control, end=end)


def flow(*steps, iterations=1):
    return SimpleNamespace(steps=list(steps), iterations_of=lambda name: iterations if name.startswith("loop") else 1)


class FixedCluster:
    """A cluster in which a collective takes its ``size`` in seconds, times the number of its first rank plus one."""

    def seconds_of(self, op, size, ranks):
        return SimpleNamespace(seconds=size * (min(ranks) + 1.0))

    def permute_time(self, size, source, target):
        return SimpleNamespace(seconds=float(size))


def simulated(steps, seconds, exchanges, ranks=2, **options):
    return Simulation(flow(*steps, **options), seconds, exchanges, ranks, FixedCluster())


def test_kernels_run_beside_a_collective_that_they_do_not_need():
    steps = step(0), step(1, [0]), step(2), step(3, [1])
    found = simulated(steps, [2.0, 0.0, 4.0, 1.0], {1: Exchange("all_reduce", 3, (), ())})
    sequential, overlapped = found.run(False), found.run(True)
    assert (sequential.seconds, sequential.kernels, sequential.collectives, sequential.exposed) == (10, 7, 3, 3)
    assert (overlapped.seconds, overlapped.exposed, overlapped.by_rank) == (7, 0, (7, 7))


def test_a_ready_kernel_overtakes_one_that_waits():
    steps = step(0), step(1, [0]), step(2)
    found = simulated(steps, [0.0, 1.0, 4.0], {0: Exchange("all_gather", 3, (), ())})
    assert found.run(True).seconds == 5
    assert found.run(False).seconds == 8


def test_collectives_wait_for_the_slowest_rank_of_their_group():
    groups = Exchange("all_reduce", 1, ((0, 1), (2, 3)), ())  # 1 and 3 seconds
    every = Exchange("all_reduce", 2, ((0, 1, 2, 3),), ())
    found = simulated([step(0), step(1, [0]), step(2, [0])], [0.0, 1.0, 0.0], {0: groups, 2: every}, ranks=4)
    run = found.run(True)
    assert run.by_rank == (5, 5, 5, 5)
    assert (run.collectives, run.kernels) == (5, 1)


def test_a_pair_does_not_stop_other_ranks():
    pair = Exchange("collective_permute", 3, (), ((0, 1),))
    found = simulated([step(0), step(1, [0])], [0.0, 1.0], {0: pair}, ranks=3)
    assert found.run(True).by_rank == (4, 4, 1)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_loop_runs_each_iteration(overlap):
    inner = step(1, within="loop 0", graph=1), step(2, [1], within="loop 0", graph=1)
    steps = step(0), *inner, step(3, graph=2)
    found = simulated(steps, [1.0, 2.0, 0.0, 1.0], {2: Exchange("all_reduce", 3, (), ())}, iterations=4)
    run = found.run(overlap)
    assert (run.seconds, run.kernels, run.collectives) == (22, 10, 12)


def test_a_loop_of_kernels_inside_a_graph_is_a_kernel():
    steps = step(0), step(1, control="loop 0", end=3), step(2, within="loop 0", graph=1), step(3, [0, 1])
    found = simulated(steps, [0.0, 0.0, 2.0, 1.0], {0: Exchange("all_reduce", 3, (), ())}, iterations=3)
    assert found.run(True).seconds == 7
    assert found.run(False).seconds == 10


def test_a_loop_with_a_collective_inside_a_graph_stops_both_lanes():
    steps = step(0), step(1, control="loop 0", end=3), step(2, within="loop 0", graph=1), step(3)
    found = simulated(steps, [4.0, 0.0, 0.0, 1.0], {2: Exchange("all_reduce", 2, (), ())}, iterations=3)
    assert found.run(True).seconds == 11


def test_the_longest_side_of_a_branch_counts():
    sides = step(0, within="branch 1.0"), step(1, within="branch 1.1", graph=1), step(2, graph=2)
    run = simulated(sides, [5.0, 2.0, 1.0], {}).run(True)
    assert (run.seconds, run.kernels) == (6, 6)


# ------------------------------------------------------------ models


def mlp(params, x):
    for up, down in params:
        x = jnp.tanh(x @ up) @ down
    return x


def bundle(mesh, weights, wide=2048, **flags):
    shapes = [(jax.ShapeDtypeStruct((512, wide), "f4"), jax.ShapeDtypeStruct((wide, 512), "f4"))] * 2
    x = jax.ShapeDtypeStruct((512, 512), "f4")
    return aotc.compile(
        mlp, shapes, x, mesh=mesh, in_shardings=([weights] * 2, P("data")), out_shardings=P("data"), **flags
    )


@pytest.fixture(scope="module")
def tensor_parallel():
    return bundle({"data": 2, "model": 8}, (P(None, "model"), P("model")))


def test_a_tensor_parallel_model_has_nothing_to_overlap(tensor_parallel):
    report = aotc.explain("step", tensor_parallel)
    (row,) = report.collectives
    assert (row.op, row.axes, row.group, row.hosts, row.runs) == ("all_reduce", "model", 8, 1, 2)
    assert row.bytes == 256 * 512 * 4
    assert (report.ranks, report.ranks_per_host) == (16, 8)
    assert report.sequential.seconds == pytest.approx(report.sequential.kernels + 2 * row.seconds)
    assert report.overlapped.seconds == pytest.approx(report.sequential.seconds)
    assert len(report.overlapped.by_rank) == 16


def test_smaller_hosts_put_a_group_on_several(tensor_parallel):
    near, far = (aotc.explain("step", tensor_parallel, ranks_per_host=n) for n in (8, 4))
    assert (near.collectives[0].hosts, far.collectives[0].hosts) == (1, 2)
    assert far.sequential.collectives > 1.5 * near.sequential.collectives
    text = " ".join(str(far).split())
    assert "16 ranks in 4 hosts" in text
    assert "InfiniBand" in text


def test_weights_on_512_devices_are_gathered_while_kernels_run():
    found = aotc.explain("step", bundle({"data": 512}, (P("data"), P("data")), wide=1 << 19))
    assert found.ranks == 512
    assert {row.op for row in found.collectives} == {"all_gather"}
    run = found.overlapped
    assert max(run.kernels, run.collectives) < run.seconds < found.sequential.seconds
    assert run.exposed == pytest.approx(run.seconds - run.kernels)


def test_permutations_have_the_time_of_the_slowest_pair():
    mesh = jax.sharding.AbstractMesh((4,), ("x",))

    def shifted(x):
        return jax.lax.ppermute(x, "x", [(i, (i + 1) % 4) for i in range(4)])

    f = jax.jit(jax.shard_map(shifted, mesh=mesh, in_specs=P("x"), out_specs=P("x")))
    report = aotc.explain("step", f, np.zeros((4, 1 << 18), "f4"), ranks_per_host=2)
    (row,) = report.collectives
    assert (row.op, row.axes, row.hosts) == ("collective_permute", "x", 2)
    assert row.seconds == pytest.approx(DGX_2.permute_time(4 << 18, 1, 2).seconds)
    assert row.seconds > DGX_2.permute_time(4 << 18, 0, 1).seconds


DGX_2 = cluster_of("nvlink", "ib", 2)


def test_a_model_of_one_device_runs_alone():
    report = aotc.explain("step", jnp.tanh, np.zeros((64, 64), "f4"))
    assert (report.ranks, report.mesh, report.collectives, report.sequential.collectives) == (1, "", (), 0)
    assert report.overlapped.seconds == report.sequential.seconds > 0
    assert "1 rank in 1 host" in str(report)


def test_the_command_prints_the_simulation(tensor_parallel, tmp_path):
    path = tmp_path / "model.vmfb"
    path.write_bytes(tensor_parallel)
    command = [sys.executable, "-m", "aotc", "explain", "step", str(path), "--between=ethernet", "--ranks-per-host=4"]
    text = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    assert "no rank was run" in " ".join(text.split())
    found = json.loads(subprocess.run([*command, "--json"], capture_output=True, check=True, text=True).stdout)
    assert found["between"]["bandwidth"] == LINKS["ethernet"].bandwidth
    assert found["overlapped"]["seconds"] > 0
    refused = subprocess.run([*command, "--link=loopback"], capture_output=True, text=True)
    assert refused.returncode == 1
    assert "no such link inside a host" in refused.stderr
