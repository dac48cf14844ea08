"""The native executor: order, exactly-once, loops, branches, many callers, sleeping workers."""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from aotc.kernels.cpu.build import build_executor
from aotc.options import Options
from aotc.targets import host_target
from aotc.vmfb import abi
from aotc.vmfb.commands import decode_commands, encode_commands, kernel_words
from aotc.vmfb.verify.program import check_commands
from benchmarks.engines import load_module

pytestmark = pytest.mark.cpu

# stamp(clock, begin, end, counts; command, base): notes when the command first began and last ended, counts
# each item, and marks its scratch memory while inside (counts[-1] counts strangers met there).
KERNELS = """
define void @stamp(ptr %buffers, ptr %dims, i64 %first, i64 %stop, ptr %scratch, ptr %monitor) {
entry:
  %clock = load ptr, ptr %buffers
  %b1 = getelementptr ptr, ptr %buffers, i64 1
  %begins = load ptr, ptr %b1
  %b2 = getelementptr ptr, ptr %buffers, i64 2
  %ends = load ptr, ptr %b2
  %b3 = getelementptr ptr, ptr %buffers, i64 3
  %counts = load ptr, ptr %b3
  %command = load i64, ptr %dims
  %d1 = getelementptr i64, ptr %dims, i64 1
  %base = load i64, ptr %d1
  %stranger = atomicrmw xchg ptr %scratch, i64 1 seq_cst
  %bad = getelementptr i64, ptr %counts, i64 -1
  %unused0 = atomicrmw add ptr %bad, i64 %stranger seq_cst
  %now = atomicrmw add ptr %clock, i64 1 seq_cst
  %begin = getelementptr i64, ptr %begins, i64 %command
  %unused1 = atomicrmw min ptr %begin, i64 %now seq_cst
  br label %head
head:
  %i = phi i64 [ %first, %entry ], [ %next, %body ]
  %more = icmp slt i64 %i, %stop
  br i1 %more, label %body, label %done
body:
  %at = add i64 %base, %i
  %count = getelementptr i64, ptr %counts, i64 %at
  %unused2 = atomicrmw add ptr %count, i64 1 seq_cst
  %next = add i64 %i, 1
  br label %head
done:
  %later = atomicrmw add ptr %clock, i64 1 seq_cst
  %end = getelementptr i64, ptr %ends, i64 %command
  %unused3 = atomicrmw max ptr %end, i64 %later seq_cst
  store atomic i64 0, ptr %scratch seq_cst, align 8
  ret void
}
define void @countdown(ptr %buffers, ptr %dims, i64 %first, i64 %stop, ptr %scratch, ptr %monitor) {
  %counter = load ptr, ptr %buffers
  %b1 = getelementptr ptr, ptr %buffers, i64 1
  %flag = load ptr, ptr %b1
  %old = load i64, ptr %counter
  %new = sub i64 %old, 1
  store i64 %new, ptr %counter
  %more = icmp sge i64 %new, 0
  %byte = zext i1 %more to i8
  store i8 %byte, ptr %flag
  ret void
}
"""
STRIDE = 64
MOST = 5
THREADS = (1, 2, 3, MOST)


@dataclass
class Command:
    """One command of a test graph; ``after`` are the commands that it waits for."""

    kernel: int
    places: list[tuple[int, int]]
    dims: list[int]
    items: int = 1
    grain: int = 1
    after: list[int] = field(default_factory=list)
    items_word: int | None = None
    kind: int = abi.DISPATCH


def graph(commands: list[Command], state: int = 0, serial: int = 0) -> list[abi.Node]:
    """Return a graph of ``commands``, alone in its list."""
    rows = []
    for number, c in enumerate(commands):
        successors = [n for n, other in enumerate(commands) if number in other.after]
        items = abi.constant_operand(c.items) if c.items_word is None else c.items_word
        places = [(slot, abi.constant_operand(offset)) for slot, offset in c.places]
        dims = [abi.constant_operand(d) for d in c.dims]
        grain = abi.constant_operand(c.grain)
        rows.append(abi.Command(c.kind, c.kernel, items, grain, len(c.after), successors, places, dims))
    return [abi.Graph(rows, state, bool(serial))]


def loop(condition: list[abi.Node], body: list[abi.Node], slot: int) -> list[abi.Node]:
    return [abi.WhileNode(condition, body, (slot, abi.constant_operand(0)))]


def branch(branches: list[list[abi.Node]], slot: int) -> list[abi.Node]:
    return [abi.Case(branches, (slot, abi.constant_operand(0)))]


class Executor:
    """The executor in memory, and a pool."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(build_executor(host_target(), Options(cache=False)))
        self.library = ctypes.CDLL(str(path))
        self.library.aotc_pool_bytes.restype = self.library.aotc_run.restype = ctypes.c_int64
        self.pool = aligned(self.library.aotc_pool_bytes() // 8)
        self.engine = load_module(KERNELS)
        self.kernels = [self.engine.get_function_address(name) for name in ("stamp", "countdown")]

    def prepare(self, nodes: list[abi.Node], slots: int, states: int, parameters: int = 0) -> np.ndarray:
        """Return the words with kernel addresses, after the loader's check."""
        words = encode_commands(nodes)
        code = np.array(words, np.int64)
        read = decode_commands(words)
        check_commands(read, len(self.kernels), slots, states, parameters)
        patches = kernel_words(read)
        code[patches] = np.array(self.kernels)[code[patches]]
        return code

    def run(self, code: np.ndarray, slots: list[np.ndarray], cells: np.ndarray, threads: int, values=()) -> None:
        assert self.status(code, slots, cells, threads, values) == 0

    def status(self, code: np.ndarray, slots: list[np.ndarray], cells: np.ndarray, threads: int, values=()) -> int:
        table = np.array([x.ctypes.data for x in slots], np.int64)
        params = np.array(values or (0,), np.int64)
        scratch = aligned(STRIDE // 8 * threads)
        where = np.array([scratch.ctypes.data], np.int64)
        block = aligned(abi.CALL_WORDS)
        parts = {
            abi.CALL_POOL: self.pool, abi.CALL_SLOTS: table, abi.CALL_PARAMS: params, abi.CALL_CELLS: cells,
            abi.CALL_SCRATCH: where, abi.CALL_CODE: code,
        }  # fmt: skip
        for word, array in parts.items():
            block[word] = array.ctypes.data
        block[abi.CALL_STRIDE], block[abi.CALL_LENGTH], block[abi.CALL_THREADS] = STRIDE, len(code), threads
        return self.library.aotc_run(pointer(block))


def aligned(words: int) -> np.ndarray:
    memory = np.zeros(words + 8, np.int64)
    skip = -memory.ctypes.data % 64 // 8
    return memory[skip : skip + words]


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    made = Executor(tmp_path_factory.mktemp("executor") / "executor.so")
    yield made
    made.library.aotc_pool_stop(pointer(made.pool))


class Trace:
    """The memory of ``stamp``, for graphs of ``commands`` commands of up to ``items`` items."""

    def __init__(self, commands: list[Command]) -> None:
        self.commands = commands
        self.bases = np.cumsum([0, *(c.items for c in commands)])
        self.clock = np.zeros(1, np.int64)
        self.begin = np.full(len(commands), 1 << 60)
        self.end = np.full(len(commands), -1)
        self.memory = np.zeros(1 + self.bases[-1], np.int64)
        self.cells = aligned(abi.STATE_WORDS * max(len(commands), 1))
        self.cells[:] = 77
        for number, command in enumerate(commands):
            command.dims = [number, int(self.bases[number])]
            command.places = [(slot, 8 * (slot == 3)) for slot in range(4)]

    @property
    def slots(self) -> list[np.ndarray]:
        return [self.clock, self.begin, self.end, self.memory]

    def check(self, runs: int = 1) -> None:
        assert self.memory[0] == 0, "two participants shared scratch memory"
        assert (self.memory[1:] == runs).all(), "an item ran not exactly once"
        if runs == 1:
            self.check_order()

    def check_order(self) -> None:
        latest = np.full(len(self.commands), -1)  # the end of the last ancestor that had items
        for number, command in enumerate(self.commands):
            for before in command.after:
                latest[number] = max(latest[number], latest[before], self.end[before])
            assert self.begin[number] > latest[number]


def random_graph(rng: random.Random) -> list[Command]:
    commands: list[Command] = []
    for number in range(rng.choice((1, 2, 5, 20, 60))):
        after = sorted(rng.sample(range(number), min(number, rng.choice((0, 1, 1, 2, 4)))))
        commands.append(Command(0, [], [], rng.choice((0, 1, 1, 3, 17)), rng.choice((1, 2, 5)), after))
    return commands


@pytest.mark.parametrize("threads", THREADS)
def test_random_graphs_run_in_order_exactly_once(executor: Executor, threads: int) -> None:
    rng = random.Random(threads)
    for _ in range(300):
        commands = random_graph(rng)
        trace = Trace(commands)
        code = executor.prepare(graph(commands, serial=int(rng.random() < 0.1)), 4, len(commands))
        executor.run(code, trace.slots, trace.cells, threads)
        trace.check()


@pytest.mark.parametrize("threads", THREADS)
def test_same_cells_again_and_again(executor: Executor, threads: int) -> None:
    commands = [*random_graph(random.Random(7)), Command(0, [], [], 40, 1)]
    trace = Trace(commands)
    code = executor.prepare(graph(commands), 4, len(commands))
    for _ in range(2000):
        executor.run(code, trace.slots, trace.cells, threads)
    trace.check(runs=2000)


def test_many_callers_at_once(executor: Executor) -> None:
    failures: list[BaseException] = []

    def call(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(100):
                commands = random_graph(rng)
                trace = Trace(commands)
                code = executor.prepare(graph(commands), 4, len(commands))
                executor.run(code, trace.slots, trace.cells, rng.choice(THREADS))
                trace.check()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_workers_sleep_and_wake(executor: Executor) -> None:
    commands = [Command(0, [], [], 64, 1), Command(0, [], [], 64, 1, [0])]
    for _ in range(20):
        trace = Trace(commands)
        code = executor.prepare(graph(commands), 4, 2)
        time.sleep(0.003)
        executor.run(code, trace.slots, trace.cells, MOST)
        trace.check()


def test_idle_workers_use_no_processor(executor: Executor) -> None:
    time.sleep(0.02)
    before = time.process_time()
    time.sleep(0.1)
    assert time.process_time() - before < 0.05


@pytest.mark.parametrize("threads", THREADS)
def test_items_from_a_parameter(executor: Executor, threads: int) -> None:
    commands = [Command(0, [], [], 50, 3, items_word=abi.parameter_operand(1)), Command(0, [], [], 1, 1, [0])]
    for items in (0, 1, 2, 50):
        trace = Trace(commands)
        code = executor.prepare(graph(commands), 4, 2, 2)
        executor.run(code, trace.slots, trace.cells, threads, (9, items))
        assert trace.memory[1:51].sum() == items
        assert trace.memory[51] == 1


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("rounds", [0, 1, 500])
def test_while_over_a_parallel_graph(executor: Executor, threads: int, rounds: int) -> None:
    commands = [Command(0, [], [], 9, 2), Command(0, [], [], 5, 1, [0]), Command(0, [], [], 3, 1, [0, 1])]
    trace = Trace(commands)
    counter, flag = np.array([rounds]), np.zeros(1, np.int8)
    condition = graph([Command(1, [(4, 0), (5, 0)], [])], state=3)
    code = executor.prepare(loop(condition, graph(commands), 5), 6, 4)
    cells = aligned(4 * abi.STATE_WORDS)
    executor.run(code, [*trace.slots, counter, flag], cells, threads)
    assert counter[0] == -1
    trace.check(runs=rounds)


@pytest.mark.parametrize("threads", [1, MOST])
def test_case_and_nested_loops(executor: Executor, threads: int) -> None:
    """Three rounds, each of which branches on ``chosen`` into one of three counters."""
    down = graph([Command(1, [(0, 0), (1, 0)], [])], state=0)
    arms = [graph([Command(1, [(slot, 0), (6, 0)], [])], state=1) for slot in (3, 4, 5)]
    inner = branch(arms, 2)
    code = executor.prepare(loop(down, inner + inner, 1) + inner, 7, 2)
    for chosen, arm in ((0, 0), (1, 1), (2, 2), (7, 2), (-1, 2)):
        counters = [np.zeros(1, np.int64) for _ in range(3)]
        slots = [np.array([3]), np.zeros(1, np.int8), np.array([chosen], np.int32), *counters, np.zeros(1, np.int8)]
        executor.run(code, slots, aligned(2 * abi.STATE_WORDS), threads)
        assert [int(c[0]) for c in counters] == [-7 if n == arm else 0 for n in range(3)]


@pytest.mark.parametrize("threads", [1, MOST])
def test_copies_wait_for_each_other(executor: Executor, threads: int) -> None:
    data = [np.arange(64) + 1, np.zeros(64, np.int64), np.zeros(64, np.int64)]
    commands = [
        Command(0, [(0, 0), (1, 0)], [512], kind=abi.COPY),
        Command(0, [(1, 8), (2, 16)], [80], after=[0], kind=abi.COPY),
    ]
    code = executor.prepare(graph(commands), 3, 2)
    executor.run(code, data, aligned(2 * abi.STATE_WORDS), threads)
    assert (data[1] == data[0]).all()
    assert data[2].tolist() == [0, 0, *range(2, 12), *[0] * 52]


def test_many_commands(executor: Executor) -> None:
    commands = [Command(0, [], [], 1 + n % 3, 1, [n - 1] if n % 7 else []) for n in range(3000)]
    trace = Trace(commands)
    code = executor.prepare(graph(commands), 4, 3000)
    executor.run(code, trace.slots, trace.cells, MOST)
    trace.check()


def test_pool_stops_and_starts_again(executor: Executor) -> None:
    library, pool = executor.library, aligned(executor.library.aotc_pool_bytes() // 8)
    commands = [Command(0, [], [], 64, 1)]
    mine, executor.pool = executor.pool, pool
    for _ in range(20):
        trace = Trace(commands)
        code = executor.prepare(graph([Command(0, c.places, c.dims, 64) for c in commands]), 4, 1)
        executor.run(code, trace.slots, trace.cells, 3)
        trace.check()
        assert pool[abi.POOL_ALIVE] == 2
        library.aotc_pool_stop(pointer(pool))
        assert pool[abi.POOL_ALIVE] == 0
    executor.pool = mine


@pytest.mark.parametrize("threads", [1, MOST])
def test_a_halt_ends_every_loop(executor: Executor, threads: int) -> None:
    """The loop's flag is never written, so that nothing else ends it; the pool works on afterwards."""
    commands = [Command(0, [], [], 9, 2), Command(0, [], [], 5, 1, [0])]
    trace = Trace(commands)
    code = executor.prepare(loop(graph(commands), graph(commands), 4), 5, 2)
    timer = threading.Timer(0.05, executor.pool.__setitem__, (abi.POOL_HALT, 1))
    timer.start()
    assert executor.status(code, [*trace.slots, np.ones(1, np.int8)], trace.cells, threads) == 1
    executor.pool[abi.POOL_HALT] = 0
    trace = Trace(commands)
    executor.run(executor.prepare(graph(commands), 4, 2), trace.slots, trace.cells, threads)
    trace.check()
