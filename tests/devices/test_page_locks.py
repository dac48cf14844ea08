"""Copies within a call go through locked pages, which are locked when working memory is new and not in each call."""

import numpy as np
import pytest
from devices.test_mixed_programs import small_stages
from support.simulated_host import PageLock
from vmfb.simulated_gpu import SimulatedGpu, install

import aotc
from aotc.vmfb.devices.cuda import driver as cuda_driver
from aotc.vmfb.devices.cuda.staging import page_lock_arena
from aotc.vmfb.errors import CallError
from aotc.vmfb.memory.arena import ARENAS, ArenaPool

pytest.importorskip("numba_cuda")
pytestmark = pytest.mark.cudasim


def test_working_memory_is_locked_once(monkeypatch):
    ARENAS.trim()
    data = aotc.compile(small_stages(), devices={"d0": "cuda:sm_90", "d1": "cpu"})
    install(monkeypatch, data, count=1)
    module = aotc.load(data)
    copied = []
    moved = SimulatedGpu.download
    monkeypatch.setattr(SimulatedGpu, "download", lambda gpu, to, *rest: (copied.append(to), moved(gpu, to, *rest))[1])
    arrays = [np.ones(a.dims, a.dtype) for a in module._functions["main"].arguments]
    before = PageLock.made
    for _ in range(3):
        module.invoke("main", *arrays)
        assert PageLock.made == before + 1
        assert any(one.begin <= copied[-1] < one.end for one in PageLock.every)
    module.trim()
    assert not PageLock.every


def test_more_is_locked_where_more_is_needed(monkeypatch):
    monkeypatch.setattr(cuda_driver, "PageLock", PageLock)
    arena = ArenaPool().take_arena(5000)
    before = PageLock.made
    for size, made, bytes_ in ((100, 1, 128), (128, 1, 128), (129, 2, 256), (4000, 3, 4096), (5000, 4, 5000)):
        assert page_lock_arena(arena, size, None) is arena
        assert (PageLock.made - before, arena.locked) == (made, bytes_)
    arena.free()
    assert not PageLock.every


def test_a_driver_that_refuses_is_asked_once(monkeypatch):
    asked = []

    def refuse(*arguments):
        asked.append(arguments)
        raise CallError("", "cuMemHostRegister_v2 failed on the GPU")

    monkeypatch.setattr(cuda_driver, "PageLock", refuse)
    arena = ArenaPool().take_arena(5000)
    for _ in range(2):
        assert page_lock_arena(arena, 4096, None).lock is None
    assert len(asked) == 1
