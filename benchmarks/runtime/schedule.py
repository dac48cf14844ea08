"""Makespan, slow threads, stealing.

Diamond: two matmuls of 1,024 x 1,024, their sum, and 64 small kernels next to them. Its makespan is compared with a
lower bound: the longest path, or the sum of all commands' times on one thread divided by the number of threads if that
is more. All parts are measured in turn, and the least of each counts. A command of several claims counts on the path
with its time divided by the number of threads. The suite also prints the speed-up of the machine for the same work on
two threads compared with one.

Slow thread: one thread takes ten times as long for each claim. The suite prints the fraction of the time that all
threads together waited, and the bound for equal shares of each command.

Slow branch: each claim of one of the two matmuls takes ten times as long. The suite prints the fraction of the time
that threads waited, and the makespan, with stealing and without; then each command runs on one thread, the matmuls on
different ones. The work of the busiest thread is the makespan with a core for each thread, even if other processes use
the cores.
"""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy as np
import typer

import aotc
from aotc.vmfb.abi import Command, Graph, Slots, operand_value
from aotc.vmfb.devices.cpu import native
from aotc.vmfb.devices.cpu.executor_trials import Claim, Trial
from aotc.vmfb.memory.pointers import aligned_bytes
from benchmarks import options, report, timing
from benchmarks.timing import once

SIZE, ROWS, COLUMNS, FACTOR = 1024, 64, 32, 10


def diamond(size: int) -> str:
    """Return the text of the model, with matrices of ``size``."""
    a, s, row = f"tensor<{size}x{size}xf32>", f"tensor<{ROWS}x{COLUMNS}xf32>", f"tensor<1x{COLUMNS}xf32>"
    lines = [
        f"%l = stablehlo.dot_general %a, %a, contracting_dims = [1] x [0] : ({a}, {a}) -> {a}",
        f"%aa = stablehlo.add %a, %a : {a}",
        f"%r = stablehlo.dot_general %aa, %a, contracting_dims = [1] x [0] : ({a}, {a}) -> {a}",
        f"%o = stablehlo.add %l, %r : {a}",
    ]
    for n in range(ROWS):
        lines.append(f"%x{n} = stablehlo.slice %s [{n}:{n + 1}, 0:{COLUMNS}] : ({s}) -> {row}")
        lines.append(f"%y{n} = stablehlo.sine %x{n} : {row}")
        lines.append(f"%z{n} = stablehlo.cosine %y{n} : {row}")
    names, kinds = ", ".join(f"%z{n}" for n in range(ROWS)), ", ".join([row] * ROWS)
    lines.append(f"%c = stablehlo.concatenate {names}, dim = 0 : ({kinds}) -> {s}")
    body = "\n  ".join([*lines, f"return %o, %c : {a}, {s}"])
    return f"func.func public @main(%a: {a}, %s: {s}) -> ({a}, {s}) {{\n  {body}\n}}\n"


def only_graph(executable: Any) -> Graph:
    """Return the graph of an executable's only command buffer."""
    (graph,) = executable.nodes(0)
    assert isinstance(graph, Graph)
    return graph


class SingleCommands:
    """Commands of a model's only graph, which can be run one at a time."""

    def __init__(self, data: bytes, arguments: tuple[np.ndarray, ...]) -> None:
        self.module = aotc.load(data, threads=1)
        executable: Any = self.module._executable
        found: list[tuple[Any, tuple[int, ...]]] = []
        plain = executable._native_call

        def call(buffer: Any, slots: Any, parameters: Sequence[int], *rest: Any) -> Any:
            found.append((slots, tuple(parameters)))
            return plain(buffer, slots, parameters, *rest)

        executable._native_call = call
        self.kept = self.module.invoke("main", *arguments), arguments
        ((slots, self.parameters),) = found
        self.commands: list[Command] = list(only_graph(executable).commands)
        layout = Slots(len(arguments), len(self.kept[0]))
        for n, array in enumerate((*arguments, *self.kept[0])):
            slots[n] = np.asarray(array).ctypes.data
        arena, slots[layout.arena] = aligned_bytes(self.module.stats()["arena_peak"], 64)
        memory, address = aligned_bytes(executable._stride, 64)
        scratch = ctypes.c_void_p(address)
        self.memory = arena, memory, scratch
        self.calls = [executable.call_of_command(c, slots, self.parameters, scratch) for c in self.commands]

    def longest_path(self, seconds: list[float], threads: int) -> float:
        """Return the seconds of the longest path if all threads share each command's claims."""
        begins = [0.0] * len(self.commands)
        last = 0.0
        for n, command in enumerate(self.commands):
            items, grain = (max(operand_value(x, self.parameters), 1) for x in (command.items, command.grain))
            end = begins[n] + seconds[n] / min(-(-items // grain), threads)
            last = max(last, end)
            for successor in command.successors:
                begins[successor] = max(begins[successor], end)
        return last


def run_concurrently(calls: list[Callable[[], object]]) -> None:
    """Run each call on its own thread, and wait for all."""
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def makespan(data: bytes, arguments: tuple[np.ndarray, ...], threads: int, rounds: int) -> list[float]:
    """Report the makespan next to its lower bound; return the seconds of each command alone."""
    alone, several = SingleCommands(data, arguments), aotc.load(data, threads=threads)
    single = [aotc.load(data, threads=1) for _ in range(threads)]
    calls = [lambda module=module: module.invoke("main", *arguments) for module in single]
    least = [float("inf")] * len(alone.calls)

    def commands() -> float:
        least[:] = [min(best, once(call)) for best, call in zip(least, alone.calls, strict=True)]
        return sum(least)

    samples: dict[str, Callable[[], float]] = {
        "commands": commands, "one thread": lambda: once(calls[0]),
        "makespan": lambda: once(lambda: several.invoke("main", *arguments)),
        "threads of their own": lambda: once(lambda: run_concurrently(calls)),
    }  # fmt: skip
    times = timing.measured(samples, rounds, warm_up=False)
    path, share = alone.longest_path(least, threads), sum(least) / threads
    whole, serial, bound = times.least("makespan"), times.least("one thread"), max(path, share)
    speed = threads * serial / times.least("threads of their own")
    table = report.Table(f"diamond, {threads} threads", report.ms("least"), "of bound")
    table.add("makespan", whole, whole / bound)
    table.add("one thread", serial, serial / bound)
    table.add("longest path", path, path / bound)
    table.add("sum of commands by threads", share, share / bound)
    table.add("work of one thread by the speed of all", serial / speed, serial / speed / bound)
    report.note(f"{threads} threads of their own do {speed:.2f} times the work of one")
    return least


def slow_thread(data: bytes, arguments: tuple[np.ndarray, ...], threads: int, rounds: int) -> None:
    """Report the waiting time of threads if one of them is slow."""
    module, one = aotc.load(data, threads=threads), aotc.load(data, threads=1)
    trial = Trial(1 << 16)
    rows = []
    for _ in range(rounds):
        serial = once(lambda: one.invoke("main", *arguments))
        trial.slow_down(1, FACTOR)
        native.set_trial(trial.address)
        before = module.stats()
        whole = once(lambda: module.invoke("main", *arguments))
        native.set_trial(0)
        after = module.stats()
        slow = sum(c.last - c.first for c in trial.claims() if c.who == 1)
        idle = (after["idle"] - before["idle"]) / whole / threads
        rows.append((idle, after["steals"] - before["steals"], slow, whole / serial))
    idle, steals, slow, took = map(float, np.median(np.array(rows), 0))
    columns = ["idle", "steals", "slow items", "of 1 thread", "equal parts"]
    table = report.Table(f"a thread {FACTOR} times as slow", *columns)
    table.add(f"{threads} threads", idle, int(steals), int(slow), took, FACTOR / threads)


def slow_branch(
    data: bytes, arguments: tuple[np.ndarray, ...], threads: int, rounds: int, seconds: list[float]
) -> None:
    """Report the waiting time of threads if one of two matmuls is slow, and the makespan, with and without stealing.

    ``seconds`` are the times of each command alone.
    """
    module = aotc.load(data, threads=threads)
    module.invoke("main", *arguments)
    executable: Any = module._executable
    commands = list(only_graph(executable).commands)
    first = executable._buffers[0].address
    slow = [first + 8 * c.at for c in commands if "matmul" in executable._variant["kernels"][c.kernel]["name"]][-1]
    work = {first + 8 * c.at: s * (FACTOR if first + 8 * c.at == slow else 1) for c, s in zip(commands, seconds)}
    trial = Trial(1 << 16)
    trial.slow_down_command(slow, FACTOR)
    native.set_trial(trial.address)
    rows: dict[bool, list[tuple[float, ...]]] = {True: [], False: []}
    for _ in range(rounds):
        for steals, each in rows.items():
            if steals:
                trial.allow_stealing()
            else:
                trial.forbid_stealing(threads)
            before = module.stats()
            whole = once(lambda: module.invoke("main", *arguments))
            after = module.stats()
            idle = (after["idle"] - before["idle"]) / whole / threads
            busiest = seconds_of_busiest_thread(trial.claims(), work)
            each.append((whole, idle, after["steals"] - before["steals"], busiest))
    native.set_trial(0)
    columns = [report.ms("makespan"), report.ms("least"), "idle", "stolen", report.ms("busiest")]
    table = report.Table(f"a matmul {FACTOR} times as slow", *columns)
    for steals, each in rows.items():
        whole, idle, stolen, most = map(float, np.median(np.array(each), 0))
        table.add("with stealing" if steals else "without", whole, min(each)[0], idle, int(stolen), most)
    off, on = (np.array(rows[steals]) for steals in (False, True))
    report.note(
        f"without stealing / with: makespan {np.median(off[:, 0] / on[:, 0]):.2f}, the busiest thread's work "
        f"{np.median(off[:, 3] / on[:, 3]):.2f}; all threads {1e3 * sum(work.values()):.2f} ms"
    )


def seconds_of_busiest_thread(claims: list[Claim], work: dict[int, float]) -> float:
    """Return the seconds of work of the busiest thread: the makespan if each thread has a core."""
    items: dict[int, int] = defaultdict(int)
    for c in claims:
        items[c.command] += c.last - c.first
    each: dict[int, float] = defaultdict(float)
    for c in claims:
        each[c.who] += work[c.command] * (c.last - c.first) / items[c.command]
    return max(each.values())


def run(
    threads: options.Threads = 2,
    rounds: options.Rounds = 30,
    size: Annotated[int, typer.Option(help="Rows and columns of the matmuls.")] = SIZE,
) -> None:
    """Measure all three parts."""
    size, rounds = (64, 1) if timing.SMOKE else (size, rounds)
    rng = np.random.default_rng(0)
    arguments = tuple(rng.standard_normal(s).astype(np.float32) for s in ((size, size), (ROWS, COLUMNS)))
    data = aotc.compile(diamond(size))
    seconds = makespan(data, arguments, threads, rounds)
    slow_thread(data, arguments, threads, rounds)
    slow_branch(data, arguments, threads, rounds, seconds)
