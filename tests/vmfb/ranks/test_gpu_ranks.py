"""Ranks on simulated GPUs: collectives through memory of the host, and by a played NCCL."""

import math
import os
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import rank_cases
from support.rank_cases import run_threads
from support.sharded_models import CASES, LINE, Sharded, check, f32
from vmfb.played_nccl import Network
from vmfb.simulated_gpu import SimulatedGpu, install

import aotc
from aotc.diagnostics import CompileError
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.errors import ArgumentValueError, BundleError, CallError, RankLost
from aotc.vmfb.gang.rank_recording import record_calls_on_rank, recording_of_data
from aotc.vmfb.ranks.collective_function import check_collective_attributes
from aotc.vmfb.ranks.collectives import Collective, are_sizes_valid
from aotc.vmfb.ranks.gpu_calls import collective_arrays
from aotc.vmfb.ranks.nccl import calls as nccl_calls
from aotc.vmfb.ranks.nccl import communicators
from aotc.vmfb.ranks.nccl.calls import NcclTransport
from aotc.vmfb.ranks.nccl.library import Nccl
from aotc.vmfb.ranks.ranks import Ranks
from aotc.vmfb.ranks.threads import thread_links

pytest.importorskip("numba_cuda")
pytestmark = pytest.mark.cudasim

TARGET = "cuda:sm_90a"
WAYS = ("host", "nccl")
FAST = ("mlp", "branch", "loop", "sums_over_axes")  # the others take up to half a minute


@pytest.fixture
def on_gpus(monkeypatch):
    """Return a function that gives a module to each rank of a bundle, and returns what ``work(module, link)`` does."""

    def run(data, way, work, network=None):
        size = math.prod(n for _, n in open_bundle(data).manifest["mesh"]["axes"])
        install(monkeypatch, data, count=size, ranks=True)
        libraries = (network or Network()).libraries(size)
        if way == "nccl":
            monkeypatch.setattr(
                "aotc.vmfb.ranks.member.HostTransport", lambda link: NcclTransport(Nccl(libraries[link.rank]), link)
            )

        def of_rank(link):
            with aotc.load(data, devices=f"cuda:{link.rank}", ranks=link) as module:
                return work(module, link)

        return run_threads(thread_links(size), of_rank)

    return run


def until(condition):
    """Wait until something holds, which another thread does."""
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def checked(results):
    """Return results without exceptions; the first cause is raised."""
    failed = sorted((x for x in results if isinstance(x, BaseException)), key=lambda x: isinstance(x, RankLost))
    if failed:
        raise failed[0]
    return results


def check_case(on_gpus, case, way, **options):
    def work(module, link):
        parts = module.shard(*case.args)
        for _ in range(2):  # by itself, and by the graph that the first call has recorded
            results = module.gather(module(*parts))
        return [np.asarray(x) for x in jax.tree.leaves(results)]

    check(case, checked(on_gpus(case.compile(target=TARGET, **options), way, work)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_results_are_those_of_one_device(on_gpus, name, way):
    check_case(on_gpus, CASES[name], way)


MOVES = Sharded(
    lambda x: (
        x.sum(0), x.max(1), jnp.sort(x, 0), x.T @ x, (x > 0).any(0), x.astype(jnp.bfloat16).sum(0), (x * 1j).sum(0)
    ),
    (f32(16, 8),), mesh=LINE, ins=(P("data"),), outs=(P(), P(), P(), P("data"), P(), P(), P()), most=2e-2,
)  # fmt: skip


@pytest.mark.parametrize("level", [0, 1, 2])
def test_levels_and_dtypes(on_gpus, level):
    check_case(on_gpus, MOVES, "nccl", opt_level=level, verify_each=True)


def small(f=lambda x: x - x.mean(0), size=2, dtype=np.float32, target=TARGET):
    """Return the bundle of a function of one array over ``size`` ranks."""
    return aotc.compile(
        f, np.ones((4, 8), dtype), mesh={"data": size}, in_shardings=(P("data"),), target=target
    )


@pytest.mark.parametrize("way", WAYS)
def test_arrays_on_the_gpu_at_any_address(on_gpus, way):
    """A graph with a collective holds addresses; arrays at others give right results too, recorded or not."""
    random = np.random.default_rng(0)
    whole = [random.standard_normal((4, 8)).astype(np.float32) for _ in range(30)]

    def work(module, link):
        kept = [module.put(module.shard(x)[0]) for x in whole[:12]]
        found = [module.gather(module(x)) for _ in range(3) for x in kept]
        return [np.asarray(x) for x in found]

    for found in checked(on_gpus(small(), way, work)):
        for n, x in enumerate(found):
            np.testing.assert_allclose(x, whole[n % 12] - whole[n % 12].mean(0), atol=1e-6)


def test_graphs_go_before_their_communicators(on_gpus):
    network = Network()

    def work(module, link):
        module(*module.shard(np.ones((4, 8), np.float32)))
        return next(gpu for gpu in SimulatedGpu.every if gpu.ordinal == link.rank).log

    logs = checked(on_gpus(small(), "nccl", work, network))
    assert all("destroy_collective_graphs" in log for log in logs)
    assert [row[-1] for row in network.rows] == ["ncclCommDestroy"] * 2


@pytest.mark.parametrize("way", WAYS)
def test_a_profile_runs_one_command_at_a_time(on_gpus, way):
    """Calls before it are not logged, nor those behind it."""
    x = np.ones((4, 8), np.float32)

    def work(module, link):
        parts = module.shard(x)
        found = recording_of_data(record_calls_on_rank(module, "main", lambda: module(*parts), parts, 3))
        np.testing.assert_array_equal(np.asarray(module.gather(module(*parts))), x * 0)
        return found

    for found in checked(on_gpus(small(), way, work)):
        (row,) = found.collectives
        assert (row.collective.op, row.bytes) == ("all_reduce", 32)
        (span,) = found.spans
        (around,) = (d for d in found.dispatches if "all_reduce" in d.kernel)
        assert found.begun + around.start <= row.start < row.end <= found.begun + around.start + around.ns
        assert around.start + around.ns <= span.ns


def test_a_lost_rank_is_named_by_all(on_gpus, monkeypatch):
    """NCCL waits for ever for a rank that is gone; the others give up, and abort their communicators."""
    monkeypatch.setattr("aotc.vmfb.ranks.loss.LEFT_SECONDS", 0.2)
    network = Network()

    def work(module, link):
        parts = [module.put(x) for x in module.shard(np.ones((4, 8), np.float32))]
        before = module(*parts)
        np.asarray(before)
        if link.rank == 1:
            return None
        start = time.monotonic()
        with pytest.raises(RankLost, match=r"rank 1 closed the module before all_reduce at .*collective 0") as error:
            np.asarray(module(*parts))
        assert time.monotonic() - start < 5
        with pytest.raises(RankLost):  # no later call waits
            module(*parts)
        np.testing.assert_array_equal(np.asarray(before), 0)  # a value of before the loss stays
        return error.value.rank

    assert checked(on_gpus(small(size=4), "nccl", work, network)).count(1) == 3
    assert until(lambda: [row[-1] for row in network.rows].count("ncclCommAbort") == 3)


def test_a_process_ends_that_nccl_does_not_release(on_gpus, monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr("aotc.vmfb.ranks.loss.LEFT_SECONDS", 0.2)
    monkeypatch.setattr(communicators, "END_SECONDS", 0.2)
    monkeypatch.setattr(nccl_calls, "_LAST_SECONDS", 0.1)
    monkeypatch.setattr(os, "_exit", lambda status: ended.set() if status == 75 else None)
    network = Network()

    def work(module, link):
        parts = module.shard(np.ones((4, 8), np.float32))
        module(*parts)
        network.hangs = True
        if link.rank == 0:
            with pytest.raises(RankLost):
                module(*parts)
            assert ended.wait(5)
            network.hangs = False

    checked(on_gpus(small(), "nccl", work, network))


def test_reductions_that_nccl_has_not():
    def bits(x):
        return jax.lax.reduce(x, np.int16(0), jax.lax.bitwise_or, (0,))

    with pytest.raises(CompileError, match=r"all_reduce of i16 by or: NCCL does not reduce so(.|\n)*convert to"):
        small(bits, dtype=np.int16)


def test_sizes_of_another_collective_are_refused():
    """A changed manifest cannot make a collective read or write other arrays."""
    row = {"operands": [["f32", 1], ["u32", 0]], "results": [["f32", 1], ["u32", 0]]}
    for op, sizes, ranks in (
        ("all_reduce", (32, 64), 2), ("all_gather", (32, 32), 2), ("reduce_scatter", (32, 32), 2),
        ("all_to_all", (4, 4), 2), ("collective_permute", (32, 16), 2),
    ):  # fmt: skip
        with pytest.raises(BundleError, match="sizes of another collective"):
            collective_arrays("m", Collective(op, 0), row, (sizes[0], 4, sizes[1], 4), ranks)
    found = collective_arrays("m", Collective("all_gather", 0, ((0, 1),)), row, (32, 4, 64, 4), 2)
    assert found.operands == (("f32", 8),)


@pytest.mark.parametrize("op", sorted({c.op for c in rank_cases.collectives(4)}))
def test_only_the_size_of_the_specification_agrees(op):
    (size,) = rank_cases.result_shape(Collective(op, 0), 4, 1, (8,))
    assert [n for n in range(64) if are_sizes_valid(op, 8, n, 4)] == [size]


def test_an_unknown_collective_is_refused():
    with pytest.raises(BundleError, match=r"there is no collective 'all_sort'(.|\n)*newer aotc"):
        check_collective_attributes("m", "all_sort", {"serial": 0}, 2)


@pytest.mark.parametrize(
    ("op", "facts"),
    [
        ("reduce_scatter", {"groups": [[0, 1, 2], [3]]}), ("all_reduce", {"groups": [[0, 1], [1, 2, 3]]}),
        ("all_reduce", {"groups": [[0, 1, 2]]}), ("all_gather", {"groups": [[0, 1, 2, 4]]}),
        ("all_gather", {"groups": "0123"}), ("collective_permute", {"pairs": [[0, 1], [2, 1]]}),
        ("collective_permute", {"pairs": [[0, 1, 2]]}), ("all_reduce", {"serial": "0"}),
        ("all_reduce", {"reduction": ["add"]}),
    ],
)  # fmt: skip
def test_facts_that_no_compiler_writes_are_refused(op, facts):
    good = {"serial": 0, "place": "m.py:1", "groups": [[2, 0, 1, 3]], "reduction": "add"}
    check_collective_attributes("m", op, good, 4)
    with pytest.raises(BundleError, match="the facts of a collective are damaged"):
        check_collective_attributes("m", op, good | facts, 4)


def test_a_call_that_fails_between_its_collectives_ends_the_run(on_gpus, monkeypatch):
    """The others do not wait for what this rank does not enqueue, nor pair it with another call."""
    monkeypatch.setattr("aotc.vmfb.ranks.loss.LEFT_SECONDS", 0.2)

    def work(module, link):
        parts = module.shard(np.ones((4, 8), np.float32))
        module(*parts)
        if link.rank == 0:
            with pytest.raises(ZeroDivisionError), module.own_member().calling():
                raise ZeroDivisionError
            with pytest.raises(CallError, match="has left the others"):
                module(*parts)
            return
        with pytest.raises(RankLost, match=r"rank 0 failed \(ZeroDivisionError\)"):
            module(*parts)

    checked(on_gpus(small(), "nccl", work))


def test_wrong_arguments_end_nothing(on_gpus):
    def work(module, link):
        with pytest.raises(ArgumentValueError, match="wrong shape"):
            module(np.ones(3, np.float32))
        return np.asarray(module.gather(module(*module.shard(np.ones((4, 8), np.float32)))))

    for found in checked(on_gpus(small(), "nccl", work)):
        np.testing.assert_array_equal(found, 0)


def test_cpus_and_gpus_in_one_bundle(on_gpus):
    data = small(target=f"cpu,{TARGET}")
    assert [v["kind"] for v in open_bundle(data).manifest["variants"]] == ["cpu", "cuda"]
    x = np.arange(32, dtype=np.float32).reshape(4, 8)

    def work(module, link):
        return np.asarray(module.gather(module(*module.shard(x))))

    for found in checked(on_gpus(data, "host", work)):
        np.testing.assert_allclose(found, x - x.mean(0), atol=1e-6)


def test_nccl_that_is_not_here(monkeypatch):
    from aotc.vmfb.ranks import member
    from aotc.vmfb.ranks.nccl import library

    monkeypatch.setattr(library, "_FOUND", ["libnccl.so.2: no such file"])
    with pytest.warns(UserWarning, match="through memory of the host, which is slow"):
        assert member._gpu_library("m", "") is None
    with pytest.raises(CallError, match="NCCL, which is not here"):
        member._gpu_library("m", "nccl")
    assert member._gpu_library("m", "host") is None
    with pytest.raises(ArgumentValueError, match="unknown GPU transport"):
        Ranks(0, 2, gpus="rdma")
