"""Everything about a program and its command buffers that is checked once, at load.

After these checks the interpreter and the native executor trust what they read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aotc.vmfb import abi
from aotc.vmfb.abi import COMMAND_HEADER, COPY, DISPATCH, GRAPH_HEADER
from aotc.vmfb.dtypes import DTYPES
from aotc.vmfb.isa import BY_NAME, ISA, Arg, Axis, Cb, Dt, Imm, In, Ins, Out, Res, Slot, Target, Text

_RETURN = BY_NAME["return"].opcode
_BRANCH = BY_NAME["branch"].opcode
_SUBMIT = BY_NAME["submit"].opcode
_RESULT = BY_NAME["result"].opcode
_SCALARS = frozenset(name for name, row in DTYPES.items() if row.kind in "biu" and row.bits in (1, 8, 16, 32, 64))


class Invalid(Exception):
    """A program or a command buffer breaks a rule; the loader adds the bundle's name."""


# ---------------------------------------------------------------- host programs


def check_program(
    code: Sequence[Any], registers: int, signature: dict[str, Any], buffers: Sequence[dict[str, Any]]
) -> None:
    """Check one host program.

    Parameters
    ----------
    code : sequence of [opcode, operands...]
    registers : int
        How many the program may name.
    signature : dict
        The function's entry in the manifest.
    buffers : sequence of dict
        The variant's ``command_buffers``.

    Raises
    ------
    Invalid
        Names the instruction and the rule.
    """
    if not code or code[-1][:1] not in ([_RETURN], [_BRANCH]):
        raise Invalid("the program does not end with return or branch")
    ranks = [len(value["dims"]) for value in signature["arguments"]]
    results = [len(value["dims"]) for value in signature["results"]]
    limits = {
        Out: registers,
        In: registers,
        Arg: len(ranks),
        Res: len(results),
        Slot: len(ranks) + len(results) + 2,
        Cb: len(buffers),
        Target: len(code),
    }
    for number, line in enumerate(code):
        row = ISA.get(line[0]) if line and type(line[0]) is int else None
        if row is None:
            raise Invalid(f"instruction {number}: unknown opcode {line[:1]}")
        if len(line) != len(row.kinds) + 1:
            raise Invalid(f"instruction {number}: {row.name} has {len(row.kinds)} operands, found {len(line) - 1}")
        argument = 0
        for kind, value in zip(row.kinds, line[1:], strict=True):
            problem = _operand_problem(kind, value, limits, ranks[argument] if kind is Axis else 0)
            if problem:
                raise Invalid(f"instruction {number}: {row.name}: {problem}")
            argument = value if kind is Arg else argument
        if line[0] == _RESULT and len(line[2]) != results[line[1]]:
            raise Invalid(f"instruction {number}: result {line[1]} has rank {results[line[1]]}, not {len(line[2])}")
        if line[0] == _SUBMIT and len(line[2]) != buffers[line[1]]["parameters"]:
            need = buffers[line[1]]["parameters"]
            raise Invalid(f"instruction {number}: command buffer {line[1]} has {need} parameters, not {len(line[2])}")


def _operand_problem(kind: type, value: Any, limits: dict[type, int], rank: int) -> str:
    if kind is Text:
        return "" if isinstance(value, str) else "the message is not text"
    if kind is Dt:
        return "" if isinstance(value, str) and value in _SCALARS else f"{value!r} is not an integer dtype"
    if kind is Ins:
        if not isinstance(value, list):
            return "the registers are not a list"
        return next(filter(None, (_operand_problem(In, x, limits, 0) for x in value)), "")
    if not isinstance(value, int) or isinstance(value, bool):
        return f"{kind.__name__} is {value!r}, not an integer"
    if kind is Imm:
        return "" if -(1 << 63) <= value < 1 << 63 else f"{value} does not fit in 64 bits"
    limit = rank if kind is Axis else limits[kind]
    return "" if 0 <= value < limit else f"{kind.__name__} {value} is not below {limit}"


# ---------------------------------------------------------------- command buffers


class _Limits:
    """What the words of one command buffer may name."""

    def __init__(self, kernels: int, slots: int, states: int, parameters: int) -> None:
        self.kernels, self.slots, self.states, self.parameters = kernels, slots, states, parameters

    def operand(self, word: int) -> None:
        """Refuse parameters out of range and negative constants."""
        if word & 1:
            if not 0 <= word >> 1 < self.parameters:
                raise Invalid(f"parameter {word >> 1} of {self.parameters}")
        elif word < 0:
            raise Invalid(f"negative constant {word >> 1}")

    def place(self, slot: int, offset: int) -> None:
        """Refuse slots out of range."""
        if not 0 <= slot < self.slots:
            raise Invalid(f"slot {slot} of {self.slots}")
        self.operand(offset)


def check_commands(words: Sequence[int], kernels: int, slots: int, states: int, parameters: int) -> list[int]:
    """Check one command buffer.

    Parameters
    ----------
    words : sequence of int
        As :mod:`aotc.vmfb.abi` describes.
    kernels, slots, states, parameters : int
        How many of each there are.

    Returns
    -------
    list of int
        Where in ``words`` kernel numbers stand, for the loader to replace.

    Raises
    ------
    Invalid
        Names the word and the rule.
    """
    limits = _Limits(kernels, slots, states, parameters)
    patches: list[int] = []
    spans = [(0, len(words), 0)]
    while spans:  # the nodes of a body wait here while those around it are read
        at, end, depth = spans.pop()
        if at == end:
            continue
        if depth > abi.MAX_NESTING:
            raise Invalid(f"word {at}: loops and branches are nested {depth} deep")
        try:
            length = words[at + 1]
            if length < 2 or at + length > end:
                raise Invalid(f"a node of {length} words where {end - at} are left")
            bodies = _check_node(words, at, at + length, limits, patches)
        except (Invalid, IndexError) as error:
            raise Invalid(f"word {at}: {error}") from None
        spans.append((at + length, end, depth))
        spans += [(begin, stop, depth + 1) for begin, stop in bodies]
    return patches


def _check_node(
    words: Sequence[int], at: int, end: int, limits: _Limits, patches: list[int]
) -> list[tuple[int, int]]:
    match words[at]:
        case abi.GRAPH:
            _check_graph(words, at, end, limits, patches)
            return []
        case abi.WHILE:
            _need(at + 6, end)
            condition, body = words[at + 2], words[at + 3]
            limits.place(words[at + 4], words[at + 5])
            return _spans([condition, body], at + 6, end)
        case abi.CASE:
            _need(at + 5, end)
            branches = words[at + 2]
            limits.place(words[at + 3], words[at + 4])
            if branches < 1:
                raise Invalid("a case without branches")
            _need(at + 5 + branches, end)
            return _spans(words[at + 5 : at + 5 + branches], at + 5 + branches, end)
    raise Invalid(f"unknown node {words[at]}")


def _need(at: int, end: int) -> None:
    if at > end:
        raise Invalid("the node is too short")


def _spans(lengths: Sequence[int], at: int, end: int) -> list[tuple[int, int]]:
    found = []
    for length in lengths:
        if length < 0:
            raise Invalid(f"a body of {length} words")
        found.append((at, at + length))
        at += length
    if at != end:
        raise Invalid("the bodies do not fill the node")
    return found


def _check_graph(words: Sequence[int], at: int, end: int, limits: _Limits, patches: list[int]) -> None:
    _need(at + GRAPH_HEADER, end)
    count, state, serial = words[at + 2 : at + 5]
    if count < 0 or serial not in (0, 1):
        raise Invalid(f"a graph of {count} commands, serial {serial}")
    if not 0 <= state <= state + count <= limits.states:
        raise Invalid(f"cells {state} to {state + count} of {limits.states}")
    cursor = at + GRAPH_HEADER + count
    _need(cursor, end)
    waits = [0] * count
    expected = []
    for number in range(count):
        if words[at + GRAPH_HEADER + number] != cursor - at:
            raise Invalid(f"command {number} is not where the graph says")
        _need(cursor + COMMAND_HEADER, end)
        header = words[cursor : cursor + COMMAND_HEADER]
        cursor = _check_command(words, cursor, end, header, limits, patches)
        expected.append(header[4])
        for successor in words[cursor - _tail(header) : cursor - _tail(header) + header[5]]:
            if not number < successor < count:
                raise Invalid(f"command {number} is before command {successor} of {count}")
            waits[successor] += 1
    if waits != expected:
        raise Invalid("the numbers of predecessors do not agree with the successors")
    if cursor != end:
        raise Invalid("the commands do not fill the graph")


def _tail(header: Sequence[int]) -> int:
    return header[5] + 2 * header[6] + header[7]


def _check_command(
    words: Sequence[int], at: int, end: int, header: Sequence[int], limits: _Limits, patches: list[int]
) -> int:
    kind, kernel, items, grain, _, successors, places, dims = header
    if min(successors, places, dims) < 0:
        raise Invalid("a command with a negative count")
    if places > abi.MAX_PLACES or dims > abi.MAX_DIMS:
        raise Invalid(f"a command with {places} places and {dims} dims")
    first = at + COMMAND_HEADER + successors
    stop = first + 2 * places + dims
    _need(stop, end)
    if kind == DISPATCH:
        if not 0 <= kernel < limits.kernels:
            raise Invalid(f"kernel {kernel} of {limits.kernels}")
        patches.append(at + 1)
    elif kind != COPY or (places, dims) != (2, 1):
        raise Invalid(f"a command of kind {kind} with {places} places and {dims} dims")
    limits.operand(items)
    limits.operand(grain)
    if grain == 0:
        raise Invalid("a grain of 0")
    for place in range(first, first + 2 * places, 2):
        limits.place(words[place], words[place + 1])
    for operand in words[first + 2 * places : stop]:
        limits.operand(operand)
    return stop
