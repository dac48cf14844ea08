"""What a second call costs, and what several modules of a process share."""

import threading
from pathlib import Path

import numpy as np
import pytest
from support.small_models import array

import aotc
from aotc.vmfb import vm
from aotc.vmfb.abi import POOL_ALIVE, POOL_CORES
from aotc.vmfb.devices.cpu.device import CpuExecutable
from aotc.vmfb.memory.arena import ARENAS, ArenaPool

pytestmark = pytest.mark.cpu

DIAMOND = (Path(__file__).parents[1] / "support" / "programs" / "diamond.mlir").read_text()
THREADS = 2


@pytest.fixture(scope="module")
def bundles():
    """The same model in four sizes."""
    return [aotc.compile(DIAMOND.replace("1024x1024", f"{size}x{size}")) for size in (192, 200, 208, 216)]


def test_a_second_call_records_and_allocates_nothing(bundles, monkeypatch):
    module = aotc.load(bundles[0], threads=THREADS)
    arguments = array(192, 192), array(64, 32)
    ARENAS.trim()
    counts = {"plans": 0, "buffers": 0, "arenas": 0}

    def counted(name, function):
        def call(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(vm, "Recorder", counted("plans", vm.Recorder))
    monkeypatch.setattr(CpuExecutable, "_native_call", counted("buffers", CpuExecutable._native_call))
    monkeypatch.setattr(ArenaPool, "_allocate_arena", counted("arenas", ArenaPool._allocate_arena))
    module.invoke("diamond", *arguments)
    assert counts == {"plans": 1, "buffers": 1, "arenas": 1}
    for _ in range(3):
        module.invoke("diamond", *arguments)
    assert counts == {"plans": 1, "buffers": 1, "arenas": 1}


def test_four_modules_share_one_thread_pool_within_the_quota(bundles):
    modules = [aotc.load(data, threads=THREADS) for data in bundles]
    executors = {id(module._executable._executor): module._executable._executor for module in modules}
    (executor,) = executors.values()
    most = max(THREADS, executor[POOL_CORES])
    alive, wrong = [], []

    def work(module, size):
        arguments = array(size, size), array(64, 32)
        want = module.invoke("diamond", *arguments)
        for _ in range(20):
            got = module.invoke("diamond", *arguments)
            alive.append(executor[POOL_ALIVE])
            if not all(np.array_equal(a, b) for a, b in zip(got, want, strict=True)):
                wrong.append(size)

    sizes = (192, 200, 208, 216)
    threads = [threading.Thread(target=work, args=row) for row in zip(modules, sizes, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert wrong == []
    assert max(alive) < most
