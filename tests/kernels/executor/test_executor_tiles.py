"""The native executor, tile by tile: no item before those that it waits for, each once, whatever the threads do."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from kernels.executor.test_executor import Executor, aligned, loop, pointer

from aotc.vmfb import abi
from benchmarks.engines import load_module

pytestmark = pytest.mark.cpu

# item(clock, begins, ends, counts; base, seed): notes for each item when it began and ended, and counts it; in between
# it looks at the clock for a number of turns that the seed and the item choose.
ITEM = """
define void @item(ptr %buffers, ptr %dims, i64 %first, i64 %stop, ptr %scratch, ptr %monitor) {
entry:
  %clock = load ptr, ptr %buffers
  %b1 = getelementptr ptr, ptr %buffers, i64 1
  %begins = load ptr, ptr %b1
  %b2 = getelementptr ptr, ptr %buffers, i64 2
  %ends = load ptr, ptr %b2
  %b3 = getelementptr ptr, ptr %buffers, i64 3
  %counts = load ptr, ptr %b3
  %base = load i64, ptr %dims
  %d1 = getelementptr i64, ptr %dims, i64 1
  %seed = load i64, ptr %d1
  br label %head
head:
  %i = phi i64 [ %first, %entry ], [ %next, %done ]
  %more = icmp slt i64 %i, %stop
  br i1 %more, label %body, label %out
body:
  %at = add i64 %base, %i
  %count = getelementptr i64, ptr %counts, i64 %at
  %unused = atomicrmw add ptr %count, i64 1 seq_cst
  %begin = getelementptr i64, ptr %begins, i64 %at
  %now = atomicrmw add ptr %clock, i64 1 seq_cst
  store i64 %now, ptr %begin
  %mixed = xor i64 %at, %seed
  %spread = mul i64 %mixed, -7046029254386353131
  %turns = lshr i64 %spread, 55
  br label %turn
turn:
  %t = phi i64 [ 0, %body ], [ %t1, %turn ]
  %look = load atomic i64, ptr %clock seq_cst, align 8
  %t1 = add i64 %t, 1
  %again = icmp ult i64 %t1, %turns
  br i1 %again, label %turn, label %done
done:
  %end = getelementptr i64, ptr %ends, i64 %at
  %later = atomicrmw add ptr %clock, i64 1 seq_cst
  store i64 %later, ptr %end
  %next = add i64 %i, 1
  br label %head
out:
  ret void
}
"""
ITEM_KERNEL = 2


@dataclass
class Stage:
    """A command of a test graph: ``after`` are whole commands that it waits for, ``tiles`` the others."""

    items: int
    grain: int = 1
    after: list[int] = field(default_factory=list)
    tiles: list[abi.TileEdge] = field(default_factory=list)
    items_word: int | None = None


class TileExecutor(Executor):
    """An executor with the kernel ``item``."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.items = load_module(ITEM)
        self.kernels.append(self.items.get_function_address("item"))


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TileExecutor]:
    made = TileExecutor(tmp_path_factory.mktemp("executor") / "executor.so")
    yield made
    made.library.aotc_pool_stop(pointer(made.pool))


class ItemTrace:
    """When each item of a graph's commands began and ended."""

    def __init__(self, stages: list[Stage], seed: int = 0) -> None:
        self.stages = stages
        self.bases = [int(n) for n in np.cumsum([0, *(s.items for s in stages)])]
        count = max(self.bases[-1], 1)
        self.slots = [np.zeros(1, np.int64), np.zeros(count, np.int64), np.zeros(count, np.int64),
                      np.zeros(count, np.int64)]  # fmt: skip
        self.cells = aligned(2 * abi.STATE_WORDS * len(stages))
        self.cells[:] = 77
        followers = [[n for n, s in enumerate(stages) for t in s.tiles if t.producer == p] for p in range(len(stages))]
        commands = []
        for n, s in enumerate(stages):
            after = [m for m, other in enumerate(stages) if n in other.after]
            items = abi.constant_operand(s.items) if s.items_word is None else s.items_word
            dims = [abi.constant_operand(self.bases[n]), abi.constant_operand(seed)]
            places = [(slot, 0) for slot in range(4)]
            grain = abi.constant_operand(s.grain)
            commands.append(abi.Command(
                abi.DISPATCH, ITEM_KERNEL, items, grain, len(s.after) + len(s.tiles), after, places, dims,
                tiles=s.tiles, followers=followers[n],
            ))  # fmt: skip
        self.nodes: list[abi.Node] = [abi.Graph(commands, 0, False)]

    def run(self, executor: TileExecutor, threads: int, values: tuple[int, ...] = ()) -> None:
        code = executor.prepare(self.nodes, 4, self.nodes[0].cells, len(values))
        executor.run(code, self.slots, self.cells, threads, values)

    def check(self) -> None:
        """Compare when items began with when those ended that they wait for."""
        _, begins, ends, counts = self.slots
        assert (counts[: self.bases[-1]] == 1).all(), "an item ran not exactly once"
        finished = []  # by command: when all that it is sure to come after had ended
        for n, s in enumerate(self.stages):
            begin, end = (x[self.bases[n] : self.bases[n + 1]] for x in (begins, ends))
            for p in s.after:
                assert (begin > finished[p]).all(), f"command {n} did not wait for {p}"
            for t in s.tiles:
                made = ends[self.bases[t.producer] : self.bases[t.producer + 1]]
                for i in range(s.items):
                    need = t.required_items(i + 1, s.items, len(made))
                    assert (made[:need] < begin[i]).all(), f"item {i} of command {n} came before {t} allows"
            earlier = [finished[p] for p in (*s.after, *(t.producer for t in s.tiles))]
            finished.append(max([*earlier, int(end.max(initial=-1))]))


def random_stages(rng: random.Random) -> list[Stage]:
    stages: list[Stage] = []
    for number in range(rng.choice((2, 3, 5, 12))):
        some = rng.sample(range(number), min(number, rng.choice((1, 1, 2, 3))))
        wholes = [p for p in some if rng.random() < 0.2]
        tiles = []
        for p in sorted(set(some) - set(wholes)):
            tiles.append(abi.TileEdge(p, rng.randrange(0, 9), rng.randrange(1, 9), rng.randrange(0, 20)))
        items, grain = rng.choice((0, 1, 7, 64, 65, 200, 700)), rng.choice((1, 2, 5, 30))
        stages.append(Stage(items, grain, sorted(wholes), tiles))
    return stages if any(s.tiles for s in stages) else random_stages(rng)


@pytest.mark.parametrize("threads", [1, 2, 3, 5, 8])
def test_no_item_begins_before_those_that_it_waits_for(executor: TileExecutor, threads: int) -> None:
    for seed in range(300):
        rng = random.Random(1000 * threads + seed)
        trace = ItemTrace(random_stages(rng), rng.randrange(1 << 40))
        trace.run(executor, threads)
        trace.check()


def chain(items: int, stages: int, halo: int) -> list[Stage]:
    return [Stage(items, 3, [], [abi.TileEdge(n - 1, 1, 1, halo)] if n else []) for n in range(stages)]


@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize("halo", [0, 1, 50, 1000])
def test_a_chain_goes_tile_by_tile(executor: TileExecutor, threads: int, halo: int) -> None:
    trace = ItemTrace(chain(100, 6, halo))
    trace.run(executor, threads)
    trace.check()
    _, begins, ends, _ = trace.slots
    overlaps = begins[100] < ends[99]  # the second command's first item, the first one's last
    assert overlaps == (halo < 97) or threads > 1


@pytest.mark.parametrize("threads", [1, 5])
def test_the_number_of_items_may_be_a_parameter(executor: TileExecutor, threads: int) -> None:
    for items in (0, 1, 2, 40, 600):
        second = Stage(items, 1, [], [abi.TileEdge(0, 1, 1, 2)], abi.parameter_operand(0))
        stages = [Stage(items, 1, items_word=abi.parameter_operand(0)), second]
        trace = ItemTrace(stages)
        trace.run(executor, threads, (items,))
        trace.check()


def test_the_same_cells_again_and_again(executor: TileExecutor) -> None:
    trace = ItemTrace(chain(40, 4, 1))
    for n in range(300):
        trace.run(executor, 1 + n % 8)
        trace.check()
        trace.slots[3][:] = 0


def test_many_callers_go_tile_by_tile(executor: TileExecutor) -> None:
    failures: list[BaseException] = []

    def call(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(40):
                trace = ItemTrace(random_stages(rng), seed)
                trace.run(executor, rng.choice((1, 2, 5)))
                trace.check()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_a_halt_ends_a_chain_in_the_middle(executor: TileExecutor, threads: int) -> None:
    """The chain runs again and again, as nobody ever writes the loop's flag."""
    trace = ItemTrace(chain(500, 4, 4))
    code = executor.prepare(loop(trace.nodes, trace.nodes, 4), 5, trace.nodes[0].cells)
    timer = threading.Timer(0.05, executor.pool.__setitem__, (abi.POOL_HALT, 1))
    timer.start()
    assert executor.status(code, [*trace.slots, np.ones(1, np.int8)], trace.cells, threads) == 1
    timer.join()
    executor.pool[abi.POOL_HALT] = 0
    trace = ItemTrace(chain(40, 4, 1))
    trace.run(executor, threads)
    trace.check()
