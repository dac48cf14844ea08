"""Verification of host programs and command buffers when a bundle is loaded.

After these checks the interpreter and the native executor trust their input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aotc.vmfb import abi, trees
from aotc.vmfb.commands import all_nodes
from aotc.vmfb.dtypes import DTYPES
from aotc.vmfb.errors import BundleError
from aotc.vmfb.isa import BY_NAME, ISA, Arg, Axis, Cb, Dt, Imm, In, Ins, Mem, Out, Res, Slot, Target, Text
from aotc.vmfb.manifest import signatures_and_programs
from aotc.vmfb.verify.kernel_interface import Invalid

if TYPE_CHECKING:
    from aotc.vmfb.bundle import OpenedBundle

_RETURN = BY_NAME["return"].opcode
_SUBMIT = BY_NAME["submit"].opcode
_TAKE = BY_NAME["take"].opcode
_RESULT = BY_NAME["result"].opcode
_SCALARS = frozenset(name for name, row in DTYPES.items() if row.kind in "biu" and row.bits in (1, 8, 16, 32, 64))


# ---------------------------------------------------------------- host programs


def check_functions(bundle: OpenedBundle) -> None:
    """Check the signatures and programs of all variants of a bundle.

    Raises
    ------
    BundleError
        Its message has the first problem.
    """
    entries = bundle.manifest["functions"]
    for name, entry in entries.items():
        for value in (*entry["arguments"], *entry["results"]):
            if value["dtype"] not in DTYPES:
                raise BundleError(bundle.where, f"function {name!r} has an unknown dtype", value["dtype"])
        for tree, values in (("in_tree", "arguments"), ("out_tree", "results")):
            try:
                found = trees.count_leaves(entry[tree]) if entry.get(tree) else len(entry[values])
            except ValueError as error:
                raise BundleError(bundle.where, f"{tree} of function {name!r}: {error}") from None
            if found != len(entry[values]):
                raise BundleError(bundle.where, f"{tree} of function {name!r}", f"{found} leaves", len(entry[values]))
        if wrong := [n for n in entry.get("bound", ()) if not 0 <= n < len(entry["arguments"])]:
            expected = f"below {len(entry['arguments'])}, its arguments"
            raise BundleError(bundle.where, f"function {name!r} has no bound argument", wrong[0], expected)
    for variant in bundle.manifest["variants"]:
        _check_custom_calls(bundle, variant)
        spaces = len(variant.get("spaces", ())) or 1
        for name in variant["functions"]:
            if name not in entries:
                raise BundleError(bundle.where, f"program {name!r} of {variant['target']} has no signature")
        _check_prepare_and_call(bundle, variant)
        for name, (entry, program) in signatures_and_programs(bundle.manifest, variant).items():
            try:
                check_program(program["code"], program["registers"], entry, variant["command_buffers"], spaces)
            except Invalid as error:
                where = f"program {name!r} of {variant['target']}"
                raise BundleError(bundle.where, f"{where} is invalid: {error}") from None


def _check_custom_calls(bundle: OpenedBundle, variant: dict[str, Any]) -> None:
    """Check dtype and rank of each operand and result of custom calls: the runtime makes NumPy arrays of them."""
    for part in (variant, *variant.get("parts", ())):
        for row in part.get("custom_calls", ()):
            for value in (*row["operands"], *row["results"]):
                match value:
                    case [str(dtype), int(rank)] if dtype in DTYPES and rank >= 0 and not isinstance(rank, bool):
                        continue
                what = f"custom call {row['name']!r} of {variant['target']} has an array of no known type"
                raise BundleError(bundle.where, what, value, "a dtype and a rank")


def _check_prepare_and_call(bundle: OpenedBundle, variant: dict[str, Any]) -> None:
    """Check that the ``prepare`` and ``call`` programs of each function with bound arguments fit the function."""
    prepared = variant.get("prepared", {})
    names = [*variant["functions"], *(row[key]["name"] for row in prepared.values() for key in ("prepare", "call"))]
    if len(set(names)) < len(names):
        raise BundleError(bundle.where, "two programs have one name", ", ".join(names))
    shared: dict[int, Any] = {}
    for name, row in prepared.items():
        problem = _prepare_and_call_problem(bundle.manifest["functions"].get(name, {}), row)
        if name not in variant["functions"] or problem:
            what = f"what is prepared for {name!r} is invalid: {problem or 'no such function'}"
            raise BundleError(bundle.where, what)
        for value in row["prepare"]["results"]:
            known = shared.setdefault(value.get("value", -1 - len(shared)), _dtypes_and_dims([value]))
            if known != _dtypes_and_dims([value]):
                what = f"what is prepared for {name!r} has the number of what is of another type"
                raise BundleError(bundle.where, what)


def _prepare_and_call_problem(entry: dict[str, Any], row: dict[str, Any]) -> str:
    """Describe the first contradiction between a function and its ``prepare`` and ``call`` programs.

    Empty if there is none.

    ``entry`` is the function's entry in the manifest, ``row`` that of its two programs.
    """
    first, second, weights = row["prepare"], row["call"], row["weights"]
    arguments = entry.get("arguments", [])
    sources = [n for value in first["results"] for n in value.get("sources", ())]
    if not all(0 <= n < len(arguments) for n in (*weights, *sources)) or len(set(weights)) < len(weights):
        return f"arguments {weights} of {len(arguments)}"
    unread = [n for n in range(len(arguments)) if n not in weights]
    every = [*arguments, *first["results"]]
    taken = [n for n in row["takes"] if n < len(arguments)]
    if taken[: len(unread)] != unread or not set(taken[len(unread) :]) <= set(weights):
        return f"a call takes the arguments {taken}"
    if not all(n < len(every) for n in row["takes"]):
        return f"a call takes {row['takes']} of {len(every)} arguments and results"
    if not all(isinstance(d, int) for value in first["results"] for d in value["dims"]):
        return f"results of {first['name']!r} have sizes that only a call knows"
    given = [arguments[n] for n in weights], [every[n] for n in row["takes"]]
    for values, half in zip(given, (first, second), strict=True):
        if _dtypes_and_dims(values) != _dtypes_and_dims(half["arguments"]):
            return f"the arguments of {half['name']!r} are of other types"
    if _dtypes_and_dims(entry.get("results", [])) != _dtypes_and_dims(second["results"]):
        return f"the results of {second['name']!r} are of other types"
    dtypes = {v["dtype"] for half in (first, second) for key in ("arguments", "results") for v in half[key]}
    return "" if dtypes <= DTYPES.keys() else f"unknown dtypes {sorted(dtypes - DTYPES.keys())}"


def _dtypes_and_dims(values: Sequence[dict[str, Any]]) -> list[Any]:
    return [(value["dtype"], value["dims"]) for value in values]


def check_program(
    code: Sequence[Any], registers: int, signature: dict[str, Any], buffers: Sequence[dict[str, Any]], spaces: int = 1
) -> None:
    """Verify one host program: opcodes, operands in range, and that it ends with a return.

    Parameters
    ----------
    code : sequence of [opcode, operands...]
    registers : int
        Number of registers that the program may use.
    signature : dict
        The function's entry in the manifest.
    buffers : sequence of dict
        The ``command_buffers`` of the variant.
    spaces : int
        Number of memory spaces of the variant.

    Raises
    ------
    Invalid
        Its message has the instruction and the violated rule.
    """
    if not code or code[-1][:1] != [_RETURN]:
        raise Invalid("the program does not end with return")
    if registers > len(code):
        raise Invalid(f"{registers} registers for {len(code)} instructions")
    ranks = [len(value["dims"]) for value in signature["arguments"]]
    results = [len(value["dims"]) for value in signature["results"]]
    limits = {
        Out: registers,
        In: registers,
        Arg: len(ranks),
        Res: len(results),
        Slot: abi.Slots(len(ranks), len(results), spaces).count,
        Mem: spaces,
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
            if kind is Target and value <= number:
                raise Invalid(f"instruction {number}: {row.name} goes back to {value}: a program has no loops")
            argument = value if kind is Arg else argument
        if line[0] == _RESULT and len(line[2]) != results[line[1]]:
            raise Invalid(f"instruction {number}: result {line[1]} has rank {results[line[1]]}, not {len(line[2])}")
        if line[0] == _TAKE and not _may_share_memory(signature, *line[1:]):
            raise Invalid(f"instruction {number}: result {line[1]} cannot be in the memory of argument {line[2]}")
        if line[0] == _SUBMIT and len(line[2]) != buffers[line[1]]["parameters"]:
            need = buffers[line[1]]["parameters"]
            raise Invalid(f"instruction {number}: command buffer {line[1]} has {need} parameters, not {len(line[2])}")


def _may_share_memory(signature: dict[str, Any], result: int, argument: int) -> bool:
    """Return True if a result may use an argument's memory: the argument is donated, and dtype and dims are equal."""
    one, other = signature["results"][result], signature["arguments"][argument]
    return other["donated"] and (one["dtype"], one["dims"]) == (other["dtype"], other["dims"])


def _operand_problem(kind: type, value: Any, limits: dict[type, int], rank: int) -> str:
    """Describe the first problem of an instruction's operand; an empty string if it is valid.

    Parameters
    ----------
    kind : type
        The operand's kind, a class of :mod:`aotc.vmfb.isa`.
    value : object
    limits : dict of type to int
        By kind, the number above all valid ones.
    rank : int
        Number of dims of the argument to which an axis refers.
    """
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


class _ReferenceLimits:
    """Numbers of kernels, slots, state cells and parameters that exist.

    A command buffer must refer to smaller numbers.
    """

    def __init__(self, kernels: int, slots: int, states: int, parameters: int) -> None:
        self.kernels, self.slots, self.states, self.parameters = kernels, slots, states, parameters


def check_commands(nodes: Sequence[abi.Node], kernels: int, slots: int, states: int, parameters: int) -> None:
    """Verify the nodes of a command buffer: all references are in range, and graphs are acyclic.

    Parameters
    ----------
    nodes : sequence of Node
    kernels, slots, states, parameters : int
        Number of each.

    Raises
    ------
    Invalid
        Its message has the position of the node, and the violated rule.
    """
    limits = _ReferenceLimits(kernels, slots, states, parameters)
    commands = 0
    for node in all_nodes(nodes):
        try:
            if isinstance(node, abi.Graph):
                commands += node.cells
                _check_graph(node, limits)
            else:
                _check_operands({node.place}, set(), limits)
        except Invalid as error:
            raise Invalid(f"word {node.at}: {error}") from None
    if states > commands:
        raise Invalid(f"{states} cells where {commands} are used")


def _check_graph(graph: abi.Graph, limits: _ReferenceLimits) -> None:
    """Verify a graph: its commands, its state cells, and that predecessor counts agree with the successors."""
    state, count = graph.state, len(graph.commands)
    if not 0 <= state <= state + graph.cells <= limits.states:
        raise Invalid(f"cells {state} to {state + graph.cells} of {limits.states}")
    waits = [0] * count
    expected = []
    places: set[abi.Place] = set()
    operands: set[int] = set()
    cell = count
    for number, command in enumerate(graph.commands):
        if isinstance(command, abi.Control):
            if command.cell != cell:
                raise Invalid(f"control command {number} has the cells from {command.cell}, not from {cell}")
            cell += abi.INNER_CELLS
        else:
            _check_command(command, limits.kernels)
            places.update(command.places)
            operands.update((command.items, command.grain), command.dims)
        expected.append(command.predecessors)
        for successor in command.successors:
            if not number < successor < count:
                raise Invalid(f"command {number} is before command {successor} of {count}")
            waits[successor] += 1
    if graph.tiled:
        _check_tiles(graph, waits)
    if waits != expected:
        raise Invalid("the numbers of predecessors do not agree with the successors")
    _check_operands(places, operands, limits)


def _check_tiles(graph: abi.Graph, waits: list[int]) -> None:
    """Verify the tile dependences of a graph, and add them to ``waits``, the number of predecessors of each command."""
    if graph.serial:
        raise Invalid("a serial graph with tiles")
    followers: list[list[int]] = [[] for _ in graph.commands]
    for number, command in enumerate(graph.commands):
        for tile in command.tiles:
            if not 0 <= tile.producer < number:
                raise Invalid(f"command {number} waits for tiles of command {tile.producer}")
            if not (0 <= tile.times < 1 << 31 and 0 <= tile.over < 1 << 31 and 0 <= tile.plus < 1 << 62):
                raise Invalid(f"a tile of {tile.times} items over {tile.over} and {tile.plus}")
            followers[tile.producer].append(number)
        waits[number] += len(command.tiles)
    for number, command in enumerate(graph.commands):
        if list(command.followers) != followers[number]:
            raise Invalid(f"command {number} has other followers than those that wait for its tiles")


def _check_command(command: abi.Command, kernels: int) -> None:
    """Verify the kind, the kernel and the grain of a dispatch or copy."""
    kind, kernel, places, dims = command.kind, command.kernel, command.places, command.dims
    if len(places) > abi.MAX_PLACES or len(dims) > abi.MAX_DIMS:
        raise Invalid(f"a command with {len(places)} places and {len(dims)} dims")
    if kind == abi.DISPATCH:
        if not 0 <= kernel < kernels:
            raise Invalid(f"kernel {kernel} of {kernels}")
    elif kind != abi.COPY or (len(places), len(dims)) != (2, 1):
        raise Invalid(f"a command of kind {kind} with {len(places)} places and {len(dims)} dims")
    if command.grain == 0:
        raise Invalid("a grain of 0")


def _check_operands(places: set[abi.Place], operands: set[int], limits: _ReferenceLimits) -> None:
    """Refuse slots and parameters out of range, and negative constants."""
    for slot, offset in places:
        if not 0 <= slot < limits.slots:
            raise Invalid(f"slot {slot} of {limits.slots}")
        operands.add(offset)
    for word in operands:
        if word & 1:
            if not 0 <= word >> 1 < limits.parameters:
                raise Invalid(f"parameter {word >> 1} of {limits.parameters}")
        elif word < 0:
            raise Invalid(f"negative constant {word >> 1}")
