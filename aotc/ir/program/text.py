"""A bufferized program as text: printer and parser.

    program @main {
      %0 = argument 0 : 64
      %7 = argument 1 for result 1 : 64
      %1 = arena 128 : 4*b, steps 3 to 9
      %2 = result 0 : 4*b
      launch @k0_tanh(%0) -> (%1)
      while %3, 8 iterations {
        launch @k1_lt(%1) -> (%3)
      } do {
        copy %0 to %1, 64
      }
      case %4 {
      } case {
      }
      bind n = %5 as i32
      check %6 "a size is negative: {0}" (%5 as i32)
    }

A storage prints as its kind, then the number of the argument or result, or the byte offset; its memory space unless
that is 0 (``arena 128 in space 1``), its bytes, and its live range in steps. Kernels print as names, which the parser
looks up. A kernel that reads a part of a storage has a byte offset: ``launch @k1(%0 + 128) -> (%1)``. A loop has its
number of iterations if that is known. Internal data of bufferize is not printed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence

from aotc.diagnostics import UNKNOWN
from aotc.ir.dims.algebra import Dim
from aotc.ir.loop.ir import Kernel
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
    reused_arguments,
    walk,
)
from aotc.ir.tensor.text import parse_dim


def print_program(program: Buffered, name: str = "main") -> str:
    """Return ``program`` as text, with a final newline."""
    places = [*program.arena, *(s for step in walk(program.steps) for part in accessed_storages(step) for s in part)]
    names = {s: f"%{n}" for n, s in enumerate(dict.fromkeys(places))}
    lines = [f"program @{name} {{"]
    lines += [f"  {text} = {_storage_text(s)}" for s, text in names.items()]
    return "\n".join([*lines, *_step_lines(program.steps, names, "  "), "}", ""])


def _storage_text(s: Storage) -> str:
    """Return the text of a storage: its space, size, offset or number, and live range."""
    space = f" in space {s.space}" if s.space else ""
    if s.kind == "arena":
        return f"arena {s.offset}{space} : {s.size}, steps {s.first} to {s.last}"
    reuse = f" for result {s.result}" if s.result >= 0 else ""
    return f"{s.kind} {s.number}{reuse}{space} : {s.size}"


def _step_lines(steps: Sequence[Step], names: Mapping[Storage, str], indent: str) -> Iterator[str]:
    """Yield the lines of ``steps``, recursively for nested loops."""
    deeper = indent + "  "
    for step in steps:
        match step:
            case Launch(kernel, reads, writes):
                begins = [f" + {n}" for n in step.begins] or [""] * len(reads)
                parts = ", ".join(names[s] + begin for s, begin in zip(reads, begins, strict=True))
                yield f"{indent}launch @{kernel.name}({parts}) -> ({', '.join(names[s] for s in writes)})"
            case Copy(source, target, size):
                yield f"{indent}copy {names[source]} to {names[target]}, {size}"
            case Loop(predicate, cond, body, iterations):
                count = "" if iterations is None else f", {iterations} iterations"
                yield f"{indent}while {names[predicate]}{count} {{"
                yield from _step_lines(cond, names, deeper)
                yield f"{indent}}} do {{"
                yield from _step_lines(body, names, deeper)
                yield f"{indent}}}"
            case Branch(index, branches):
                for n, branch in enumerate(branches):
                    yield f"{indent}}} case {{" if n else f"{indent}case {names[index]} {{"
                    yield from _step_lines(branch, names, deeper)
                yield f"{indent}}}"
            case Bind(dim, value, dtype):
                yield f"{indent}bind {dim} = {names[value]} as {dtype}"
            case Check(predicate, message, values):
                shown = ", ".join(f"{names[s]} as {dtype}" for s, dtype in values)
                yield f"{indent}check {names[predicate]} {json.dumps(message)} ({shown})"


def step_title(step: Step) -> str:
    """Return a short description of a step for messages."""
    match step:
        case Launch(kernel):
            return f"launch of {kernel.name}"
        case Copy(source, target):
            return f"copy of {name_of(source)} to {name_of(target)}"
        case Bind(dim):
            return f"bind of {dim}"
        case Check(message=message):
            return f"check {message!r}"
    return type(step).__name__.lower()


def name_of(s: Storage) -> str:
    """Return a short description of a storage for messages."""
    match s.kind:
        case "arena":
            return f"arena storage at {s.offset} (steps {s.first} to {s.last})"
        case "constant":
            return f"the constant at {s.number}"
    return f"{s.kind} {s.number}"


_STORAGE = re.compile(r"(%\w+) = (\w+) (.+) : (.+?)(?:, steps (-?\d+) to (-?\d+))?")
_LAUNCH = re.compile(r"launch @([^(]+)\((.*)\) -> \((.*)\)")
_BEGIN = re.compile(r" \+ (\d+)")
_COPY = re.compile(r"copy (%\w+) to (%\w+), (.+)")
_BIND = re.compile(r"bind (.+) = (%\w+) as (\w+)")
_CHECK = re.compile(r'check (%\w+) ("(?:[^"\\]|\\.)*") \((.*)\)')
_OPEN = re.compile(r"(while|case) (%\w+)(?:, (\d+) iterations)? \{")
_CLOSE = ("}", "} do {", "} case {")


def parse_program(text: str, kernels: Mapping[str, Kernel]) -> Buffered:
    """Return the program of ``text``; ``kernels`` has the kernels that it launches, by name.

    Raises
    ------
    ValueError
        If a line is invalid; the message has its number.
    """
    reader = _ProgramReader(kernels)
    head, *lines = [line.strip() for line in text.strip().splitlines()]
    if not re.fullmatch(r"program @.+ \{", head):
        raise ValueError(f"line 1: expected program @name {{, found {head}")
    steps, at = reader.block(lines, 0)
    if lines[at:] != ["}"]:
        raise ValueError(f"line {at + 2}: expected }} and the end, found {lines[at]}")
    arena = [s for s in reader.storages.values() if s.kind == "arena"]
    used = {s.kernel.name: s.kernel for s in walk(steps) if isinstance(s, Launch)}
    return Buffered(steps, arena, used, taken=reused_arguments(steps))


class _ProgramReader:
    def __init__(self, kernels: Mapping[str, Kernel]) -> None:
        self.kernels = kernels
        self.storages: dict[str, Storage] = {}

    def block(self, lines: Sequence[str], at: int) -> tuple[tuple[Step, ...], int]:
        """Return the steps from line ``at`` on, and the number of the line that closes them."""
        steps: list[Step] = []
        while at < len(lines) and lines[at] not in _CLOSE:
            try:
                if opened := _OPEN.fullmatch(lines[at]):
                    step, at = self.nest(opened, lines, at)
                    steps.append(step)
                elif row := _STORAGE.fullmatch(lines[at]):
                    self.storages[row[1]] = _parse_storage(row)
                else:
                    steps.append(self.step(lines[at]))
            except KeyError as error:
                raise ValueError(f"line {at + 2}: nothing is called {error}") from None
            at += 1
        if at == len(lines):
            raise ValueError(f"line {at + 1}: expected }}, found the end")
        return tuple(steps), at

    def nest(self, opened: re.Match[str], lines: Sequence[str], at: int) -> tuple[Step, int]:
        """Return the loop or branch that starts in line ``at``, and the number of its last line."""
        word, place, iterations = opened[1], self.storages[opened[2]], int(opened[3]) if opened[3] else None
        between = "} do {" if word == "while" else "} case {"
        blocks: list[tuple[Step, ...]] = []
        while not blocks or lines[at] == between:
            block, at = self.block(lines, at + 1)
            blocks.append(block)
        if lines[at] != "}" or (word == "while" and len(blocks) != 2):
            raise ValueError(f"line {at + 2}: this does not go on with a {word}: {lines[at]}")
        return (Loop(place, blocks[0], blocks[1], iterations) if word == "while" else Branch(place, tuple(blocks))), at

    def step(self, line: str) -> Step:
        """Return the step of one line."""
        if row := _LAUNCH.fullmatch(line):
            begins = tuple(map(int, _BEGIN.findall(row[2])))
            reads, writes = self.several(_BEGIN.sub("", row[2])), self.several(row[3])
            return Launch(self.kernels[row[1]], reads, writes, UNKNOWN, begins)
        if row := _COPY.fullmatch(line):
            return Copy(self.storages[row[1]], self.storages[row[2]], parse_dim(row[3]))
        if row := _BIND.fullmatch(line):
            return Bind(parse_dim(row[1]), self.storages[row[2]], row[3])
        if row := _CHECK.fullmatch(line):
            values = [part.split(" as ") for part in row[3].split(", ") if part]
            return Check(self.storages[row[1]], json.loads(row[2]), tuple((self.storages[s], t) for s, t in values))
        raise ValueError(f"no step reads {line}")

    def several(self, text: str) -> tuple[Storage, ...]:
        """Parse a comma-separated list of storages."""
        return tuple(self.storages[name] for name in text.split(", ") if name)


def _parse_storage(row: re.Match[str]) -> Storage:
    """Return the storage that a line declares, from the match of its parts."""
    rest, _, space = row[3].partition(" in space ")
    where, _, result = rest.partition(" for result ")
    place, size = parse_dim(where), parse_dim(row[4])
    first, last = (int(x) if x else -1 for x in row.group(5, 6))
    if row[2] == "arena":
        return Storage("arena", size, offset=place, first=first, last=last, space=int(space or 0))
    return Storage(row[2], size, number=_storage_number(place), result=int(result or -1), space=int(space or 0))


def _storage_number(place: Dim) -> int:
    if not isinstance(place, int):
        raise ValueError(f"expected a number, found {place}")
    return place
