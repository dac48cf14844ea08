"""Verify a bufferized program: steps fit their kernels, everything read was written, and the arena's plan is valid.

The checks do not depend on the decisions of bufferize and plan_memory. They follow the steps in execution order and
track the last writer of each byte. A read of a storage whose bytes another storage has overwritten is an error,
whatever the recorded live ranges are. Sizes that depend on the call get sample values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from aotc.ir.dims.algebra import Dim, Expr, product
from aotc.ir.dims.symbols import substitute, symbols
from aotc.ir.limits import FINDINGS
from aotc.ir.loop.ir import Buffer
from aotc.ir.program.ir import (
    Bind,
    Branch,
    Buffered,
    Check,
    Copy,
    Launch,
    Loop,
    Step,
    Storage,
    accessed_storages,
    split_at_host_reads,
    walk,
)
from aotc.ir.program.text import name_of, step_title
from aotc.ir.tensor.ir import Function
from aotc.vmfb.abi import ALIGNMENT
from aotc.vmfb.dtypes import size_of

_STRIDES = (2, 3, 5, 7, 11, 13)
_NOBODY = -1

Updates = Callable[[str], int]


# ---------------------------------------------------------------- numbers for symbols


# Sets of values of the symbols under which a program with symbols is verified. A single set may miss overlaps that
# another one shows.
SAMPLES = 3


def sample_dim_values(dims: Sequence[Dim]) -> list[dict[str, int]]:
    """Return up to three assignments of values to the symbols of ``dims`` under which no dim is negative."""
    names = sorted({s for e in dims for s in symbols(e)}, key=lambda s: s.name)
    chosen = []
    for n in range(SAMPLES if names else 1):
        values = {s.name: max(s.lo, 1) + n * _STRIDES[k % len(_STRIDES)] for k, s in enumerate(names)}
        if all(evaluated_dim(e, values) >= 0 for e in dims):
            chosen.append(values)
    return chosen


def evaluated_dim(e: Dim, values: Mapping[str, int]) -> int:
    """Return the value of ``e`` under ``values``; -1 if a symbol has no value, or for a division by 0."""
    if not isinstance(e, Expr):
        return int(e)
    try:
        value = substitute(e, values)
    except ZeroDivisionError:
        return -1
    return -1 if isinstance(value, Expr) else value


# ---------------------------------------------------------------- steps


def verify_steps(program: Buffered, function: Function, updates: Updates) -> list[str]:
    """Return the errors in the steps of ``function``, one sentence each (at most 20), or an empty list.

    Checked: A launch has as many reads and writes as its kernel has buffers, of their sizes. It reads and writes the
    same storage only where the kernel declares an alias. Sizes are known where they are used. Arguments and constants
    are not written. Everything read was written before, on every path. Every result is written. Sizes that are read
    from memory, and assertions, are outside of loops and branches.

    Parameters
    ----------
    program : Buffered
    function : Function
        The source of the program.
    updates : callable
        By a kernel's name: the number of its first outputs that it updates, so that their old values must exist.
    """
    check = _StepCheck(function, set(program.arena))
    check.check_steps(program.steps, 0)
    cells = {s: slice(n, n + 1) for n, s in enumerate(storages(program))}
    flow = _ValueFlowCheck(cells, len(cells), updates)
    flow.check_program(program, function)
    return [*check.findings, *flow.findings][:FINDINGS]


def storages(program: Buffered) -> list[Storage]:
    """Return all storages that steps of a program access, in the order of first use."""
    return list(dict.fromkeys(s for step in walk(program.steps) for part in accessed_storages(step) for s in part))


@dataclass(slots=True)
class _StepCheck:
    """Verifier of each step by itself, without the steps before it."""

    function: Function
    arena: set[Storage]
    findings: list[str] = field(default_factory=list)
    known: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.known = {s.name for v in self.function.body.params for d in v.type.shape for s in symbols(d)}
        self.known |= set(self.function.attrs.get("sizes", {}))

    def check_steps(self, steps: Sequence[Step], depth: int) -> None:
        """Check the steps of a block; ``depth`` is the number of loops and branches around them."""
        for step in steps:
            for s in (s for part in accessed_storages(step) for s in part):
                self.check_storage(s, step_title(step))
            match step:
                case Launch():
                    self.check_launch(step)
                case Copy(source, target, size):
                    for end in (source, target):
                        self.check_byte_count(end.size, size, f"{step_title(step)}: of {name_of(end)} it copies")
                case Loop(predicate, cond, body):
                    self.check_byte_count(predicate.size, 1, f"{step_title(step)}: its predicate has")
                    self.check_steps(cond, depth + 1)
                    self.check_steps(body, depth + 1)
                case Branch(index, branches):
                    self.check_byte_count(index.size, 4, f"{step_title(step)}: its index has")
                    if not branches:
                        self.findings.append(f"{step_title(step)}: there is no branch")
                    for branch in branches:
                        self.check_steps(branch, depth + 1)
                case Bind() | Check():
                    self.check_bind_or_assertion(step, depth)

    def check_bind_or_assertion(self, step: Bind | Check, depth: int) -> None:
        """Check a step whose values the host reads: its sizes, and that it is outside of loops and branches."""
        if depth:
            self.findings.append(f"{step_title(step)}: it stands inside a loop or branch, where no host program is")
        if isinstance(step, Bind):
            self.check_byte_count(step.value.size, size_of(step.dtype), f"{step_title(step)}: its value has")
            self.known |= {s.name for s in symbols(step.dim)}
        else:
            self.check_byte_count(step.predicate.size, 1, f"{step_title(step)}: its predicate has")
            for s, dtype in step.values:
                self.check_byte_count(s.size, size_of(dtype), f"{step_title(step)}: a value has")

    def check_storage(self, s: Storage, where: str) -> None:
        if s.kind == "arena" and s not in self.arena:
            self.findings.append(f"{where}: {name_of(s)} is not in the list of the arena's storages")
        self.check_sizes_are_known([s.size], where)

    def check_sizes_are_known(self, dims: Sequence[Dim], where: str) -> None:
        unknown = sorted({s.name for e in dims for s in symbols(e)} - self.known)
        if unknown:
            self.findings.append(f"{where}: {', '.join(unknown)} has no value here")

    def check_byte_count(self, size: Dim, expected: Dim, where: str) -> None:
        """Report ``size`` if it differs from ``expected`` for some values of the dims."""
        dims = [size, expected]
        if size != expected and any(
            evaluated_dim(size, v) != evaluated_dim(expected, v) for v in sample_dim_values(dims) if self.admits(v)
        ):
            self.findings.append(f"{where} {size} bytes, expected {expected}")

    def admits(self, values: Mapping[str, int]) -> bool:
        """Return True if values of symbols satisfy the function's requirements, which the host program checks."""
        for relation, left, right, *_ in self.function.attrs.get("requirements", ()):
            sides = evaluated_dim(left, values), evaluated_dim(right, values)
            if relation == "eq" and -1 not in sides and sides[0] != sides[1]:
                return False
        return True

    def check_range(self, begin: int, size: Dim, whole: Storage, where: str) -> None:
        """Check that ``size`` bytes from ``begin`` on are aligned, and inside ``whole``."""
        fits = begin >= 0 and begin % ALIGNMENT == 0
        dims = [whole.size, size]
        if not fits or any(
            begin + evaluated_dim(size, v) > evaluated_dim(whole.size, v)
            for v in sample_dim_values(dims)
            if self.admits(v)
        ):
            self.findings.append(f"{where} is {size} bytes of {name_of(whole)} from {begin} on, which has {whole.size}")

    def check_launch(self, step: Launch) -> None:
        """Check a launch: the number and sizes of its arrays, and which memory its outputs may overwrite."""
        kernel, where = step.kernel, step_title(step)
        self.check_sizes_are_known([kernel.grid], where)
        unknown = sorted(set(kernel.dims) - self.known)
        if unknown:
            self.findings.append(f"{where}: {', '.join(unknown)} has no value here")
        sides: tuple[tuple[str, tuple[Storage, ...], tuple[Buffer, ...]], ...] = (
            ("reads", step.reads, kernel.inputs),
            ("writes", step.writes, kernel.outputs),
        )
        for verb, places, buffers in sides:
            if len(places) != len(buffers):
                self.findings.append(f"{where}: it {verb} {len(places)} arrays, the kernel has {len(buffers)}")
                return
            begins = step.begins if verb == "reads" and step.begins else (None,) * len(places)
            for s, b, begin in zip(places, buffers, begins, strict=True):
                size = product(b.shape) * size_of(b.dtype)
                if begin is None:
                    self.check_byte_count(s.size, size, f"{where}: {b.name} is {name_of(s)} of")
                else:
                    self.check_range(begin, size, s, f"{where}: {b.name}")
        for n, target in enumerate(step.writes):
            if target.kind == "constant" or (target.kind == "argument" and target.result < 0):
                self.findings.append(f"{where}: it writes to {name_of(target)}")
            if target.size != 0 and target in step.writes[:n]:
                self.findings.append(f"{where}: two outputs are {name_of(target)}")
            for k, source in enumerate(step.reads):
                if source is target and target.size != 0 and (n, k) not in kernel.aliases:
                    self.findings.append(f"{where}: input {k} and output {n} are {name_of(target)}, and may not be one")


# ---------------------------------------------------------------- the plan of the arena


def verify_plan(
    program: Buffered, function: Function, totals: Sequence[Sequence[Dim]], updates: Updates
) -> list[str]:
    """Return the errors in the offsets of the arena's storages, one sentence each (at most 20).

    Checked: Offsets are aligned, and inside the arena of the stage that uses them. Storages with overlapping live
    ranges do not overlap in memory. No storage is overwritten by another between its write and its read. No step
    overwrites what it reads.

    Parameters
    ----------
    program, function, updates
        As for :func:`verify_steps`.
    totals : sequence of sequence of Dim
        The bytes of each memory space's arena in each stage, see :func:`~aotc.ir.program.ir.split_at_host_reads`.
    """
    sizes = [d for s in program.arena for d in (s.size, s.offset)]
    findings: dict[str, None] = {}
    for values in sample_dim_values([*sizes, *(size for stage in totals for size in stage)]):
        plan = _MemoryPlanCheck(program, values)
        findings.update(dict.fromkeys([*plan.places(totals), *plan.lives(), *plan.steps()]))
        cells, count = plan.cells()
        flow = _ValueFlowCheck(cells, count, updates)
        flow.check_program(program, function)
        findings.update(dict.fromkeys(flow.findings))
    return list(findings)[:FINDINGS]


# Distance in bytes between the memory spaces, in the verifier's address space: twice the largest tensor, so that no
# arena reaches the next one.
SPACE_BYTES = 1 << 57


@dataclass(slots=True)
class _MemoryPlanCheck:
    """Verifier of the offsets of the arena's storages under one assignment of sizes."""

    program: Buffered
    values: Mapping[str, int]
    spans: dict[Storage, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for s in self.program.arena:
            begin = evaluated_dim(s.offset, self.values) + s.space * SPACE_BYTES
            self.spans[s] = begin, begin + evaluated_dim(s.size, self.values)

    def places(self, totals: Sequence[Sequence[Dim]]) -> Iterator[str]:
        """Check the alignment and the bounds of each storage."""
        for sizes, (steps, judged) in zip(totals, split_at_host_reads(self.program.steps), strict=True):
            every_total = [evaluated_dim(size, self.values) for size in sizes]
            every = (s for step in walk([*steps, *judged]) for part in accessed_storages(step) for s in part)
            for s in (s for s in every if s in self.spans):
                begin, end = (at - s.space * SPACE_BYTES for at in self.spans[s])
                total = every_total[s.space]
                if begin % ALIGNMENT:
                    yield f"{name_of(s)} is not aligned to {ALIGNMENT} bytes"
                if begin < 0 or end > total:
                    yield f"{name_of(s)} of {s.size} bytes is not inside the arena of {total}"

    def lives(self) -> Iterator[str]:
        """Check that storages with overlapping live ranges, as bufferize recorded them, do not overlap in memory."""
        some = [s for s, (begin, end) in self.spans.items() if begin < end]
        rows = np.array([(*self.spans[s], s.first, s.last) for s in some], np.int64).reshape(-1, 4)
        begins, ends, first, last = rows.T
        for n, s in enumerate(some):
            begin, end, born, dies = rows[n]
            meet = (begins[:n] < end) & (ends[:n] > begin) & (first[:n] <= dies) & (last[:n] >= born)
            for other in np.flatnonzero(meet)[:1]:
                yield f"{name_of(s)} and {name_of(some[other])} are alive together and share bytes"

    def steps(self) -> Iterator[str]:
        """Check that no step writes a storage that overlaps in memory with another one that it accesses."""
        for step in walk(self.program.steps):
            if isinstance(step, Launch | Copy):
                reads, writes = accessed_storages(step)
                for n, target in enumerate(writes):
                    for other in (*reads, *writes[:n]):
                        if other is not target and self._places_overlap(target, other):
                            yield f"{step_title(step)}: {name_of(target)} is written over {name_of(other)}"

    def _places_overlap(self, a: Storage, b: Storage) -> bool:
        """Return True if two storages have common bytes of the arena."""
        if a not in self.spans or b not in self.spans:
            return False
        (begin, end), (other_begin, other_end) = self.spans[a], self.spans[b]
        return max(begin, other_begin) < min(end, other_end)

    def cells(self) -> tuple[dict[Storage, slice], int]:
        """Divide memory into cells: the arena is split where a storage starts or ends, other storages are a cell each.

        Return the cells of each storage, and the number of cells.
        """
        cuts = np.unique(np.array([x for span in self.spans.values() for x in span], np.int64))
        cells = {}
        for s, span in self.spans.items():
            begin, end = (int(np.searchsorted(cuts, x)) for x in span)
            cells[s] = slice(begin, end)
        count = len(cuts)
        for s in storages(self.program):
            if s not in cells:
                cells[s] = slice(count, count + 1)
                count += 1
        return cells, count


# ---------------------------------------------------------------- who wrote what is read


class _ValueFlowCheck:
    """Abstract execution of the steps: it tracks which storage wrote each cell of memory last.

    A loop body is executed once. At its start, cells that the loop overwrites with another storage are unknown.
    """

    def __init__(self, cells: Mapping[Storage, slice], count: int, updates: Updates) -> None:
        """Record arguments and constants as the owners of their cells; no other cell has one yet."""
        self.cells, self.updates = cells, updates
        self.number = {s: n for n, s in enumerate(cells)}
        self.owner = np.full(count, _NOBODY)
        self.held: Mapping[str, tuple[int, ...]] = {}
        self.findings: list[str] = []
        for s in cells:
            if s.kind in ("argument", "constant"):
                self.record_write(s)

    def check_program(self, program: Buffered, function: Function) -> None:
        """Check a whole program; all results must be written at its end."""
        self.held = program.held
        self.run_steps(program.steps)
        written = {s.number: s for s in self.cells if s.kind == "result"}
        written |= {s.result: s for s in self.cells if s.kind == "argument" and s.result >= 0}
        untouched = program.taken.keys() - written.keys()  # arguments that are returned unchanged
        for n, v in enumerate(function.body.results):
            if product(v.type.shape) != 0 and n not in untouched:
                if n in written:
                    self.check_read(written[n], "the caller")
                else:
                    self.findings.append(f"nothing writes result {n}")

    def run_steps(self, steps: Sequence[Step]) -> None:
        """Check that each step reads only memory that earlier steps wrote, and record its writes."""
        for step in steps:
            match step:
                case Launch(kernel, _, writes):
                    initialized = (writes[n] for n in self.held.get(kernel.name, ()))
                    for s in (*step.reads, *writes[: self.updates(kernel.name)], *initialized):
                        self.check_read(s, step_title(step))
                    for s in writes:
                        self.record_write(s)
                case Copy(source, target):
                    self.check_read(source, step_title(step))
                    self.record_write(target)
                case Loop():
                    self.run_loop(step)
                case Branch():
                    self.run_branch(step)
                case Bind() | Check():
                    for s in accessed_storages(step)[0]:
                        self.check_read(s, step_title(step))

    def run_loop(self, step: Loop) -> None:
        """Follow a loop: memory that an iteration may overwrite has no known owner when it begins."""
        for inner in walk([*step.cond, *step.body]):
            for s in accessed_storages(inner)[1]:
                cells = self.owner[self.cells[s]]
                cells[cells != self.number[s]] = _NOBODY
        self.run_steps(step.cond)
        self.check_read(step.predicate, step_title(step))
        done = self.owner.copy()
        self.run_steps(step.body)
        self.owner = done

    def run_branch(self, step: Branch) -> None:
        """Follow the branches; afterwards a cell has an owner only if all branches agree on it."""
        self.check_read(step.index, step_title(step))
        before, after = self.owner, None
        for branch in step.branches:
            self.owner = before.copy()
            self.run_steps(branch)
            if after is not None:
                self.owner[self.owner != after] = _NOBODY
            after = self.owner

    def check_read(self, s: Storage, reader: str) -> None:
        others = self.owner[self.cells[s]]
        if s.size != 0 and (others != self.number[s]).any():
            self.findings.append(f"{reader} reads {name_of(s)}, which does not hold what was written to it")

    def record_write(self, s: Storage) -> None:
        self.owner[self.cells[s]] = self.number[s]
