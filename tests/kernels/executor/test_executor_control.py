"""Loops and branches as commands of a graph: order, exactly-once, overlap, and the end of a call inside of them."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from kernels.executor.test_executor import (
    MOST,
    THREADS,
    Command,
    Executor,
    Trace,
    aligned,
    branch,
    graph,
    loop,
    pointer,
)

from aotc.vmfb import abi
from aotc.vmfb.commands import all_nodes
from aotc.vmfb.verify.kernel_interface import Invalid

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    made = Executor(tmp_path_factory.mktemp("executor") / "executor.so")
    yield made
    made.library.aotc_pool_stop(pointer(made.pool))


class Cells:
    """Hands out the cells of graphs."""

    def __init__(self) -> None:
        self.used = 0

    def take(self, made: list[abi.Node]) -> list[abi.Node]:
        """Give a graph, and then what its control commands hold, cells of their own."""
        (one,) = made
        assert isinstance(one, abi.Graph)
        one.state, self.used = self.used, self.used + one.cells
        return made


def mixed_graph(rows: list[tuple[Command | list[abi.Node], list[int]]], serial: int = 0) -> list[abi.Node]:
    """Return a graph of commands, and of nodes as control commands; each with what it waits for."""
    leaves = [row if isinstance(row, Command) else Command(0, [], []) for row, _ in rows]
    for leaf, (_, after) in zip(leaves, rows, strict=True):
        leaf.after = after
    (made,) = graph(leaves, serial=serial)
    assert isinstance(made, abi.Graph)
    commands: list[abi.Command | abi.Control] = []
    cell = len(rows)
    for leaf, (row, _) in zip(made.commands, rows, strict=True):
        if isinstance(row, Command):
            commands.append(leaf)
            continue
        commands.append(abi.Control(cell, leaf.predecessors, leaf.successors, row))
        cell += abi.INNER_CELLS
    return [abi.Graph(commands, 0, bool(serial))]


def placed(nodes: list[abi.Node]) -> int:
    """Give every graph of ``nodes`` its cells; return how many."""
    cells = Cells()
    for node in all_nodes(nodes):
        if isinstance(node, abi.Graph):
            cells.take([node])
    return cells.used


@dataclass
class Item:
    """A command, or a loop or branch over graphs of items; ``rounds`` is how often its inside runs."""

    after: list[int]
    leaf: Command | None = None
    inside: list[list[Item]] = field(default_factory=list)
    rounds: int = 1
    chosen: int = -1


class Program:
    """A random program; slots: those of ``Trace``, then two for each loop and one for each branch."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.leaves: list[Command] = []
        self.more: list[np.ndarray] = []
        self.items = self.graph(0)
        self.trace = Trace(self.leaves)
        self.nodes = self.nodes_of(self.items)

    def graph(self, depth: int) -> list[Item]:
        made: list[Item] = []
        for number in range(self.rng.choice((1, 2, 3, 6))):
            after = sorted(self.rng.sample(range(number), min(number, self.rng.choice((0, 0, 1, 2)))))
            if depth < 3 and self.rng.random() < 0.4:
                inside = [self.graph(depth + 1) for _ in range(self.rng.choice((1, 2)))]
                chosen = self.rng.randrange(len(inside)) if self.rng.random() < 0.4 else -1
                made.append(Item(after, None, inside, 1 if chosen >= 0 else self.rng.choice((0, 1, 3)), chosen))
                continue
            self.leaves.append(Command(0, [], [], self.rng.choice((1, 1, 3, 17)), self.rng.choice((1, 2, 5))))
            made.append(Item(after, self.leaves[-1]))
        return made

    def slot(self, value: np.ndarray) -> int:
        self.more.append(value)
        return 3 + len(self.more)

    def nodes_of(self, items: list[Item]) -> list[abi.Node]:
        rows: list[tuple[Command | list[abi.Node], list[int]]] = []
        for item in items:
            rows.append((item.leaf if item.leaf else self.control(item), item.after))
        return mixed_graph(rows, serial=int(self.rng.random() < 0.2))

    def control(self, item: Item) -> list[abi.Node]:
        inside = [self.nodes_of(some) for some in item.inside]
        if item.chosen >= 0:
            return branch(inside, self.slot(np.array([item.chosen], np.int32)))
        counter, flag = self.slot(np.array([0])), self.slot(np.zeros(1, np.int8))
        self.more[counter - 4][0] = item.rounds
        again = self.slot(np.array([0]))  # what a loop inside of a loop counts down from each time
        self.more[again - 4][0] = item.rounds
        begin = graph([Command(0, [(again, 0), (counter, 0)], [8], kind=abi.COPY)])
        condition = graph([Command(1, [(counter, 0), (flag, 0)], [])])
        return begin + loop(condition, [node for some in inside for node in some], flag)

    def run(self, executor: Executor, threads: int) -> None:
        states = placed(self.nodes)
        slots = [*self.trace.slots, *self.more]
        code = executor.prepare(self.nodes, len(slots), states)
        cells = aligned(abi.STATE_WORDS * states)
        cells[:] = 77
        executor.run(code, slots, cells, threads)

    def check(self) -> None:
        assert self.trace.memory[0] == 0, "two participants shared scratch memory"
        self.span(self.items, 1)

    def span(self, items: list[Item], rounds: int) -> tuple[int, int]:
        """Check that each item ran so often, and after those before it; return when the first began, the last ended."""
        spans: list[tuple[int, int]] = []
        ends: list[int] = []  # of an item and all that came before it
        for item in items:
            if item.leaf is not None:
                number, base = item.leaf.dims
                assert (self.trace.memory[1 + base : 1 + base + item.leaf.items] == rounds).all()
                spans.append((int(self.trace.begin[number]), int(self.trace.end[number])))
            else:
                inner = [
                    self.span(some, rounds * item.rounds if item.chosen in (-1, n) else 0)
                    for n, some in enumerate(item.inside)
                ]
                spans.append((min(b for b, _ in inner), max(e for _, e in inner)))
            begin, end = spans[-1]
            latest = max((ends[p] for p in item.after), default=-1)
            assert rounds > 1 or begin > latest
            ends.append(max(latest, end))
        return min(b for b, _ in spans), max(e for _, e in spans)


@pytest.mark.parametrize("threads", THREADS)
def test_random_programs_run_in_order_exactly_once(executor: Executor, threads: int) -> None:
    for seed in range(200):
        program = Program(seed)
        program.run(executor, threads)
        program.check()


def test_two_loops_that_wait_for_each_other_end(executor: Executor) -> None:
    """The first waits for a flag that the second clears at its beginning, the second for one that the first clears."""
    one, other = np.ones(1, np.int8), np.ones(1, np.int8)
    clear_one = graph([Command(1, [(0, 0), (1, 0)], [])])
    clear_other = graph([Command(1, [(2, 0), (3, 0)], [])])
    nodes = mixed_graph([([*loop([], [], 1), *clear_other], []), ([*clear_one, *loop([], [], 3)], [])])
    states = placed(nodes)
    code = executor.prepare(nodes, 4, states)
    for _ in range(50):
        one[0] = other[0] = 1
        slots = [np.zeros(1, np.int64), one, np.zeros(1, np.int64), other]
        executor.run(code, slots, aligned(abi.STATE_WORDS * states), 2)
        assert (one[0], other[0]) == (0, 0)


def test_two_loops_that_wait_for_each_other_end_inside_a_loop(executor: Executor) -> None:
    one, other = np.ones(1, np.int8), np.ones(1, np.int8)
    clear_one = graph([Command(1, [(0, 0), (1, 0)], [])])
    clear_other = graph([Command(1, [(2, 0), (3, 0)], [])])
    inside = mixed_graph([([*loop([], [], 1), *clear_other], []), ([*clear_one, *loop([], [], 3)], [])])
    once = np.array([1]), np.zeros(1, np.int8)
    outer = loop(graph([Command(1, [(4, 0), (5, 0)], [])]), inside, 5)
    nodes = mixed_graph([(outer, []), (Command(1, [(6, 0), (7, 0)], []), [])])
    states = placed(nodes)
    code = executor.prepare(nodes, 8, states)
    aside = np.zeros(1, np.int64), np.ones(1, np.int8)
    slots = [np.zeros(1, np.int64), one, np.zeros(1, np.int64), other, *once, *aside]
    executor.run(code, slots, aligned(abi.STATE_WORDS * states), 2)
    assert (one[0], other[0]) == (0, 0)


@pytest.mark.parametrize("threads", [1, 2, MOST])
def test_a_halt_ends_loops_side_by_side(executor: Executor, threads: int) -> None:
    """Their flags are never written, so that nothing else ends them; the pool works on afterwards."""
    forever = [loop([], graph([Command(1, [(0, 0), (1, 0)], [], 9, 2)]), 2) for _ in range(3)]
    nodes = mixed_graph([(forever[0], []), (forever[1], []), (forever[2], [])])
    states = placed(nodes)
    code = executor.prepare(nodes, 3, states)
    slots = [np.zeros(1, np.int64), np.zeros(1, np.int8), np.ones(1, np.int8)]
    cells = aligned(abi.STATE_WORDS * states)
    timer = threading.Timer(0.05, executor.pool.__setitem__, (abi.POOL_HALT, 1))
    timer.start()
    assert executor.status(code, slots, cells, threads) == 1
    executor.pool[abi.POOL_HALT] = 0
    program = Program(3)
    program.run(executor, threads)
    program.check()


def test_cells_of_control_commands_are_checked(executor: Executor) -> None:
    beside = abi.Command(0, 0, abi.constant_operand(1), abi.constant_operand(1), 0, [], [], [])
    for cell in (0, 1, 3):
        with pytest.raises(Invalid, match=f"the cells from {cell}, not from 2"):
            executor.prepare([abi.Graph([abi.Control(cell, 0, [], []), beside], 0, False)], 1, 7)
    with pytest.raises(Invalid, match="cells 0 to 7 of 6"):
        executor.prepare([abi.Graph([abi.Control(2, 0, [], []), beside], 0, False)], 1, 6)
