"""Divide steps into graphs of commands, and find the graphs that several threads run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from aotc.ir.program.ir import (
    Branch,
    Copy,
    Launch,
    Loop,
    Step,
    accessed_storages_in_nested_steps,
    step_memory_space,
    walk,
)
from aotc.lowering.cost_model import work
from aotc.lowering.cost_model.model import Costs
from aotc.lowering.cost_model.work import SHARING_NS, estimated_dim, iterations_or_estimate
from aotc.lowering.plans.thresholds import ORDER_WORKERS
from aotc.lowering.program.list_schedule import critical_paths
from aotc.lowering.threshold import Limit
from aotc.targets import Target

Run: TypeAlias = list[Launch | Copy | Loop | Branch]
Edges: TypeAlias = list[list[int]]
"""For each of some commands the earlier commands that it waits for."""


def command_sequences(steps: Sequence[Step]) -> Iterator[Run]:
    """Yield the maximal sequences of launches and copies of one memory, including those in loops and branches."""
    for sequence in _sequences_between_host_reads(steps):
        yield from (run for run in split_at_control_steps(sequence) if not is_control(run[0]))


def shared_graphs(steps: Sequence[Step], costs: Costs) -> list[Run]:
    """Return the graphs that several threads run, with dependences as if no two values shared memory."""
    sequences = _sequences_between_host_reads(steps)
    runs = (run for sequence in sequences for run in split_into_graphs(sequence, data_dependences, costs))
    return [run for run in runs if not is_lone_control_step(run) and not is_serial_graph(run, costs)]


def split_into_graphs(steps: Run, edges: Callable[[Run], Edges], costs: Costs) -> list[Run]:
    """Split steps into command graphs, and loops and branches that run alone.

    A graph that one thread runs is split at matmuls of unknown size, which several threads may share.
    """
    if _is_faster_as_one_graph(steps, edges, costs):
        return [steps]
    return [part for run in split_at_control_steps(steps) for part in _split_at_unknown_matmuls(run, costs)]


def _split_at_unknown_matmuls(run: Run, costs: Costs) -> list[Run]:
    """Return a serial graph in parts; each matmul of unknown size is a part of its own."""
    if is_lone_control_step(run) or not costs.is_serial(command_nanoseconds(run, costs)):
        return [run]
    parts: list[Run] = []
    for step in run:
        if parts and not is_unknown_product(step, costs) and not is_unknown_product(parts[-1][0], costs):
            parts[-1].append(step)
        else:
            parts.append([step])
    return parts


def is_unknown_product(step: Step, costs: Costs) -> bool:
    """Return True if a command is a matmul in tiles whose work is known only in a call, so the call divides it."""
    return isinstance(step, Launch) and costs.symbolic_matmul_work(step.kernel) is not None


def is_serial_graph(run: Run, costs: Costs) -> bool:
    """Return True if one thread runs a graph, however large a call's sizes are."""
    return costs.is_serial(command_nanoseconds(run, costs)) and not is_unknown_product(run[0], costs)


def split_at_control_steps(steps: Run) -> list[Run]:
    """Split steps at loops, branches and changes of memory space."""
    runs: list[Run] = []
    for step in steps:
        if runs and not is_control(step) and not is_control(runs[-1][0]) and not _begins_graph(step, runs[-1]):
            runs[-1].append(step)
        else:
            runs.append([step])
    return runs


def is_control(step: Step) -> bool:
    """Return True for a loop or a branch."""
    return isinstance(step, Loop | Branch)


def is_lone_control_step(run: Run) -> bool:
    """Return True for a loop or branch that is not a command of a graph."""
    return len(run) == 1 and is_control(run[0])


def _sequences_between_host_reads(steps: Sequence[Step]) -> Iterator[Run]:
    """Yield the sequences of commands between steps at which the host reads memory, in loops and branches too."""
    lists = [tuple(steps)]
    for step in walk(steps):
        lists += _steps_inside_control(step)
    for part in lists:
        sequence: Run = []
        for step in part:
            if isinstance(step, Launch | Copy | Loop | Branch):
                sequence.append(step)
            elif sequence:
                yield sequence
                sequence = []
        if sequence:
            yield sequence


def _steps_inside_control(step: Step) -> Sequence[tuple[Step, ...]]:
    """Return the step sequences nested in a loop or branch; empty for another step."""
    match step:
        case Loop(cond=cond, body=body):
            return cond, body
        case Branch(branches=branches):
            return branches
    return ()


def _begins_graph(step: Step, run: Run) -> bool:
    """Return True if ``step`` needs another graph than ``run``: it uses another memory, or copies between memories."""
    assert isinstance(step, Launch | Copy)
    assert isinstance(run[0], Launch | Copy)
    return step_memory_space(run[0]) != step_memory_space(step) or step_memory_space(step) < 0


# ---------------------------------------------------------------- what commands take


def command_nanoseconds(run: Run, costs: Costs) -> list[float]:
    """Return the nanoseconds of each command on one core."""
    return [_step_nanoseconds(step, costs) for step in run]


def worker_width_of_command(step: Step, costs: Costs) -> int:
    """Return the number of workers that can share the work of a command."""
    match step:
        case Launch(kernel=kernel):
            return -(-estimated_dim(kernel.grid) // costs.grain(kernel))
        case Loop() | Branch():
            return max(1, round(_step_nanoseconds(step, costs) / max(_control_step_nanoseconds(step, costs), 1.0)))
    return 1


def _step_nanoseconds(step: Step, costs: Costs) -> float:
    """Return the nanoseconds of a launch, copy, loop or branch on one core."""
    match step:
        case Launch(kernel=kernel):
            return costs.of(kernel).ns
        case Copy(size=size):
            return costs.copy_nanoseconds(size)
    return _sum_of_inner_graph_times(step, lambda steps: sum(_step_nanoseconds(s, costs) for s in steps))


def _control_step_nanoseconds(step: Step, costs: Costs) -> float:
    """Return the nanoseconds of a loop or branch if its graphs run one after the other, each on several workers."""
    return _sum_of_inner_graph_times(
        step,
        lambda steps: sum(
            _graph_nanoseconds_alone(run, costs) for run in split_at_control_steps(_command_steps(steps))
        ),
    )


def _sum_of_inner_graph_times(step: Step, time: Callable[[Sequence[Step]], float]) -> float:
    """Return the time of a loop or branch: all iterations, or the slowest branch."""
    inner = [time(steps) for steps in _steps_inside_control(step)]
    if not isinstance(step, Loop):
        return max(inner, default=0.0)
    return sum(inner) * iterations_or_estimate(step.iterations)


def _command_steps(steps: Sequence[Step]) -> Run:
    return [step for step in steps if isinstance(step, Launch | Copy | Loop | Branch)]


def _graph_nanoseconds_alone(run: Run, costs: Costs) -> float:
    """Return the nanoseconds of a graph, or of a lone loop or branch, that runs alone."""
    if is_lone_control_step(run):
        return _control_step_nanoseconds(run[0], costs)
    times = command_nanoseconds(run, costs)
    return (
        sum(times)
        if costs.is_serial(times)
        else SHARING_NS.value + _min_parallel_nanoseconds(run, data_dependences(run), costs)
    )


def _min_parallel_nanoseconds(run: Run, before: Edges, costs: Costs) -> float:
    """Return the least nanoseconds on several workers: the longer of critical path and fully utilised workers."""
    times = command_nanoseconds(run, costs)
    best = [
        _control_step_nanoseconds(step, costs)
        if is_control(step)
        else ns / min(worker_width_of_command(step, costs), ORDER_WORKERS.value)
        for step, ns in zip(run, times, strict=True)
    ]
    return max(sum(times) / ORDER_WORKERS.value, *critical_paths(before, best))


# ---------------------------------------------------------------- what overlaps


def data_dependences(steps: Run) -> Edges:
    """Return the direct dependences of each command by its data: as if no two values shared memory."""
    result: Edges = []
    writer: dict[object, int] = {}
    readers: dict[object, list[int]] = {}
    for command, step in enumerate(steps):
        reads, writes = accessed_storages_in_nested_steps(step)
        needed = {writer[s] for s in (*reads, *writes) if s in writer}
        needed.update(n for s in writes for n in readers.get(s, ()))
        result.append(sorted(needed))
        for s in reads:
            if s.kind != "constant":
                readers.setdefault(s, []).append(command)
        for s in writes:
            writer[s], readers[s] = command, []
    return result


OVERLAP_NS = Limit(
    4 * work.SERIAL_NS.value,
    "nanoseconds saved by concurrent loops and branches, up to which they run one after the other",
    "several times the cost of waking threads, because trip counts are estimates",
)
KNOWN_OVERLAP_NS = Limit(
    work.SERIAL_NS.value,
    "the same, where all trip counts are known",
    "busy Zen 5, 2 threads, 2 loops of 6 matmuls of 128 x 128, unrolled by 2: 274 us one after the other, 259 us at "
    "once",
)
OVERLAP_PERCENT = Limit(
    4,
    "percent of a program's time saved by concurrent loops and branches, up to which they run in sequence",
    "smaller gains are below the error of the estimates",
)


def _is_faster_as_one_graph(steps: Run, edges: Callable[[Run], Edges], costs: Costs) -> bool:
    """Return True if loops and branches finish earlier as commands of one graph than serially."""
    if len(steps) < 2 or not any(map(is_control, steps)) or not _has_native_executor(costs.target):
        return False
    runs = split_at_control_steps(steps)
    alone = sum(_graph_nanoseconds_alone(run, costs) for run in runs)
    if OVERLAP_NS.holds(int(alone)):
        return False
    shared = sum(not is_lone_control_step(run) and not costs.is_serial(command_nanoseconds(run, costs)) for run in runs)
    gain = alone - _min_parallel_nanoseconds(steps, edges(steps), costs) - shared * SHARING_NS.value
    least = KNOWN_OVERLAP_NS if all(map(_has_known_trip_count, walk(steps))) else OVERLAP_NS
    return not least.holds(int(gain)) and not OVERLAP_PERCENT.holds(int(100 * gain / alone))


def _has_known_trip_count(step: Step) -> bool:
    """Return True if the trip count of a step is known, not an estimate."""
    return not isinstance(step, Loop) or step.iterations is not None


def _has_native_executor(target: Target) -> bool:
    """Return True if the native executor runs the whole command buffer."""
    return target.kind == "cpu"
