"""Memory of results that are gone is used again, and never that of one which somebody can still look at."""

import gc
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import aotc
from aotc.vmfb.limits import KEPT_RESULTS
from aotc.vmfb.memory.arena import ARENAS
from aotc.vmfb.memory.result_pool import LEASED_BYTES, ResultMemory, size_class_of

pytestmark = pytest.mark.cpu

COUNT = LEASED_BYTES // 4
MODEL = """
func.func public @main(%x: tensor<?xf32>) -> tensor<?xf32> {
  %0 = stablehlo.add %x, %x : tensor<?xf32>
  return %0 : tensor<?xf32>
}
func.func public @fixed(%x: tensor<262144xf32>) -> (tensor<262144xf32>, tensor<4xf32>) {
  %0 = stablehlo.add %x, %x : tensor<262144xf32>
  %1 = stablehlo.slice %x [0:4] : (tensor<262144xf32>) -> tensor<4xf32>
  return %0, %1 : tensor<262144xf32>, tensor<4xf32>
}
"""
F32 = np.dtype(np.float32)


@pytest.fixture(scope="module")
def data():
    return aotc.compile(MODEL)


@pytest.fixture
def module(data):
    found = aotc.load(data)
    found.trim()
    return found


def numbers(value, count=COUNT):
    return np.full(count, value, np.float32)


def address(array):
    return array.ctypes.data


def idle(module):
    return module.stats()["memory"]["cpu"]["idle_results"]


class TestResultMemory:
    @pytest.mark.parametrize("name", ["main", "fixed"])
    def test_used_again(self, module, name):
        first = module.invoke(name, numbers(1))[0]
        place = address(first)
        second = module.invoke(name, numbers(2))[0]
        assert address(second) != place
        del first
        assert idle(module) == COUNT * 4
        third, *_ = module.invoke(name, numbers(3))
        assert address(third) == place
        assert idle(module) == 0
        assert (second == 4).all()
        assert (third == 6).all()
        assert third.flags.writeable
        assert third.flags.c_contiguous
        assert place % 64 == 0

    def test_small_results_have_memory_of_their_own(self, module):
        large, small = module.invoke("fixed", numbers(1))
        assert small.base is None
        assert large.base is not None
        (few,) = module.invoke("main", numbers(1, COUNT - 1))
        assert few.base is None

    def test_sizes_that_are_near_each_other(self, module):
        place = address(module.invoke("main", numbers(1, COUNT + 3000))[0])
        assert address(module.invoke("main", numbers(1, COUNT + 5000))[0]) == place

    @pytest.mark.parametrize(
        "look",
        [
            lambda x: x[7:],
            lambda x: x.reshape(2, -1).T,
            memoryview,
            np.from_dlpack,
            lambda x: x.base,
            lambda x: x.view(np.int32),
            lambda x: x.view(np.recarray),
            lambda x: x.__dlpack__(),
            np.lib.stride_tricks.sliding_window_view,
            iter,
        ],
    )
    def test_never_that_of_one_that_is_looked_at(self, module, look):
        result = module.invoke("main", numbers(1))[0]
        place = address(result)
        kept = look(result, 3) if look is np.lib.stride_tricks.sliding_window_view else look(result)
        del result
        gc.collect()
        others = [module.invoke("main", numbers(n))[0] for n in range(3)]
        assert place not in map(address, others)
        assert idle(module) == 0
        del kept
        assert idle(module) == COUNT * 4

    def test_garbage_that_only_the_collector_finds(self, module):
        cycle = [module.invoke("main", numbers(1))[0]]
        cycle.append(cycle)
        del cycle
        gc.collect()
        assert idle(module) == COUNT * 4

    def test_trim(self, module):
        del module.invoke("main", numbers(1))[0]
        assert module.trim() >= COUNT * 4
        assert idle(module) == 0

    def test_results_outlive_their_module(self, data):
        module = aotc.load(data, memory_limit="64MB")
        result = module.invoke("main", numbers(4))[0]
        del module
        gc.collect()
        assert (result == 8).all()

    def test_submissions(self, module):
        first = module.submit("main", numbers(1)).result()[0]
        place = address(first)
        del first
        second = module.submit("main", module.submit("main", numbers(1)))
        assert (second.result()[0] == 4).all()
        held = second.result()[0]
        del second
        gc.collect()
        assert idle(module) == COUNT * 4
        assert place in (address(held), address(module.invoke("main", numbers(1))[0]))


class TestHowMuchIsKept:
    def test_bounded_and_those_asked_for_longest_ago_go(self):
        memory = ResultMemory(8 << 20)
        old = memory.empty((COUNT,), F32)
        new = [memory.empty((2 * COUNT,), F32) for _ in range(5)]
        del old
        new.clear()
        assert memory.idle_bytes() == 8 << 20
        assert memory.kept == memory.idle_bytes()
        place = address(memory.empty((COUNT,), F32))
        assert place
        assert memory.idle_bytes() <= 8 << 20

    def test_larger_than_all_that_is_kept(self):
        memory = ResultMemory(2 << 20)
        assert memory.empty((COUNT,), F32).base is not None
        assert memory.empty((3 * COUNT,), F32).base is None
        assert KEPT_RESULTS >= 2 * 64 << 20

    def test_where_the_system_has_no_memory_it_is_freed(self, monkeypatch):
        memory = ResultMemory()
        memory.empty((COUNT,), F32)
        plain, failed = np.empty, []

        def refuse(shape, dtype):
            if memory.idle_bytes():
                failed.append(shape)
                raise MemoryError
            return plain(shape, dtype)

        monkeypatch.setattr(np, "empty", refuse)
        assert memory.empty((2 * COUNT,), F32).shape == (2 * COUNT,)
        assert len(failed) == 1

    def test_memory_limit(self, data):
        limit = 3 * COUNT * 4
        module = aotc.load(data, memory_limit=limit)
        results = [module.invoke("main", numbers(n))[0] for n in range(6)]
        results.clear()
        row = module.stats()["memory"]["cpu"]
        assert 0 < row["idle_results"] <= limit
        assert row["idle_results"] + row["idle"] <= limit
        pool = module._executable.arenas
        arena = pool.take_arena(limit)  # what is kept gives way
        assert idle(module) == 0
        del module.invoke("main", numbers(1))[0]
        assert idle(module) == 0
        pool.return_arena(arena)
        assert address(module.invoke("main", numbers(1))[0])
        assert ARENAS.results.limit == KEPT_RESULTS

    @pytest.mark.parametrize("size", [1 << 20, (1 << 20) + 1, 1_500_000, (1 << 24) - 1, 77_777_777])
    def test_sizes_of_blocks(self, size):
        found = size_class_of(size)
        assert size <= found <= size + size // 8 + 1
        assert size_class_of(found) == found


class TestThreadsAndProcesses:
    def test_threads(self, module):
        kept = {}

        def call(n):
            for iteration in range(30):
                (found,) = module.invoke("main", numbers(n * 100 + iteration))
                if iteration % 7 == 0:
                    kept[n, iteration] = found
                assert (found == 2 * (n * 100 + iteration)).all()

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(call, range(4)))
        assert len({address(x) for x in kept.values()}) == len(kept)
        assert all((x == 2 * (n * 100 + iteration)).all() for (n, iteration), x in kept.items())
        count = len(kept)
        kept.clear()
        gc.collect()
        assert idle(module) >= count * COUNT * 4
        assert module._executable.arenas.results.kept == idle(module)

    def test_dropped_by_another_thread(self, module):
        box = [module.invoke("main", numbers(1))[0]]
        thread = threading.Thread(target=box.clear)
        thread.start()
        thread.join()
        assert idle(module) == COUNT * 4

    @pytest.mark.skipif(not hasattr(os, "fork") or sys.version_info >= (3, 15), reason="forks")
    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    def test_fork(self, module):
        mine = module.invoke("main", numbers(1))[0]
        gone = module.invoke("main", numbers(2))[0]
        place = address(gone)
        del gone
        child = os.fork()
        if child == 0:
            code = 1
            try:
                theirs = module.invoke("main", numbers(3))[0]
                same = address(theirs) == place and (mine == 2).all() and (theirs == 6).all()
                mine[:] = 9
                del mine
                code = 0 if same and idle(module) == COUNT * 4 else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        ours = module.invoke("main", numbers(4))[0]
        assert address(ours) == place
        assert (ours == 8).all()
        assert (mine == 2).all()
