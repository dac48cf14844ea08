"""Ranks on simulated GPUs: collectives through memory of the host, and by a played NCCL."""

import math

import jax
import numpy as np
import pytest
from support.rank_cases import run_threads
from support.sharded_models import CASES, check
from vmfb.played_nccl import Network
from vmfb.simulated_gpu import install

import aotc
from aotc.vmfb.errors import RankLost
from aotc.vmfb.ranks.nccl.calls import NcclTransport
from aotc.vmfb.ranks.nccl.library import Nccl
from aotc.vmfb.ranks.threads import thread_links

pytest.importorskip("numba_cuda")
pytestmark = pytest.mark.cudasim

TARGET = "cuda:sm_90a"


@pytest.fixture
def on_gpus(monkeypatch):
    """Return a function that runs a case on simulated GPUs, and returns the whole results of each rank."""

    def run(case, way, calls=2, **options):
        data, size = case.compile(target=TARGET, **options), math.prod(case.mesh.values())
        install(monkeypatch, data, count=size, ranks=True)
        links = thread_links(size)
        if way == "nccl":
            network = Network()
            libraries = network.libraries(size)
            monkeypatch.setattr(
                "aotc.vmfb.ranks.member.HostTransport", lambda link: NcclTransport(Nccl(libraries[link.rank]), link)
            )

        def of_rank(link):
            with aotc.load(data, devices=f"cuda:{link.rank}", ranks=link) as module:
                parts = module.shard(*case.args)
                for _ in range(calls):
                    results = module.gather(module(*parts))
                return [np.asarray(x) for x in jax.tree.leaves(results)]

        found = run_threads(links, of_rank)
        failed = sorted((x for x in found if isinstance(x, Exception)), key=lambda x: isinstance(x, RankLost))
        if failed:
            raise failed[0]
        return found

    return run


@pytest.mark.parametrize("way", ["host", "nccl"])
@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_one_device(on_gpus, name, way):
    check(CASES[name], on_gpus(CASES[name], way))
