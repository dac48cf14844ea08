"""Commands of a call and their dependencies: symbolic execution of a bundle's function for given sizes.

No code of the bundle is run. The reports of memory and schedule are computed from the result.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from aotc.lowering.cost_model.work import iterations_or_estimate
from aotc.targets import resolve_targets
from aotc.vmfb.abi import COPY, Case, Command, Control, Graph, Node, Slots, TileEdge, WhileNode, operand_value
from aotc.vmfb.api.choose_function import choose_function
from aotc.vmfb.assumed_sizes import ASSUMED_SIZE, assumed_sizes, check_dims
from aotc.vmfb.bundle import OpenedBundle
from aotc.vmfb.devices.mixed.spaces import Spaces
from aotc.vmfb.errors import BundleError, CallError
from aotc.vmfb.isa import Frame
from aotc.vmfb.profile.debug_texts import command_locs
from aotc.vmfb.profile.trace import evaluate_dim, read_kernel_header
from aotc.vmfb.verify.buffers import Buffers, load_command_buffers
from aotc.vmfb.verify.kernel_interface import Invalid, evaluate_size
from aotc.vmfb.vm import decode_program, interpret_program

Place = tuple[int, int, int]
"""A slot of the pointer table with a byte range: begin, end (exclusive)."""


@dataclass(frozen=True, slots=True)
class FlowStep:
    """A command of a call: ``reads`` and ``writes`` are the byte ranges that it accesses, ``after`` its predecessors.

    Attributes
    ----------
    number : int
        Position in the order of the call; steps inside a loop or branch are numbered once.
    graph : int
        Number of its graph. Commands of one graph may run concurrently; graphs run in sequence.
    within : str
        The loops and branches around it, for example ``loop 1 > branch 0``.
    kernel : int
        Number of its kernel; -1 for a copy and for a loop or branch.
    control : str
        The name of a loop or branch that is a command of a graph, as in ``within``; the steps inside follow it.
    end : int
        Number of the step after the steps inside.
    types : tuple of str
        Types of its operands and then of its results, where known.
    updates : bool
        True if it reads the values that it overwrites.
    loc : str
        Its location in the model, where known.
    tiles : tuple of TileEdge
        Dependencies on items of steps among ``after``, rather than on the whole steps.
    """

    number: int
    graph: int
    within: str
    kernel: int
    sizes: Mapping[str, int]
    items: int
    claim: int
    serial: bool
    reads: tuple[Place, ...]
    writes: tuple[Place, ...]
    types: tuple[str, ...]
    after: tuple[int, ...]
    updates: bool
    loc: str = ""
    tiles: tuple[TileEdge, ...] = ()
    control: str = ""
    end: int = 0


@dataclass(frozen=True, slots=True)
class FlowSpan:
    """A loop over the steps from ``begin`` to ``end`` (exclusive); ``iterations`` is its trip count or None."""

    begin: int
    end: int
    iterations: int | None


@dataclass(frozen=True, slots=True)
class FlowBlock:
    """A loop, with one range of steps, or a branch, with a range per side; a call runs one side of a branch."""

    sides: tuple[tuple[int, int], ...]
    is_loop: bool

    @property
    def begin(self) -> int:
        """Return the number of the first step."""
        return self.sides[0][0]

    @property
    def end(self) -> int:
        """Return the number of the step after the last."""
        return self.sides[-1][1]


@dataclass(frozen=True, slots=True)
class FlowSpace:
    """A memory space: the model's name of its GPU, or its kind, and the target of its kernels."""

    name: str
    target: str


@dataclass
class Flow:
    """Commands and memory of a call of a function with arguments of given sizes.

    Attributes
    ----------
    slots : Slots
        The slots of arguments, results and arenas.
    spaces : tuple of FlowSpace
        Memory spaces, each with an arena.
    arenas : list of int
        Bytes of each arena.
    scratch : int
        Bytes of a worker's scratch: the maximum over the kernels of the function.
    loops : list of FlowSpan
        Loops in the order of their numbers in ``within``.
    blocks : list of FlowBlock
        Loops and branches; an outer one precedes those inside it.
    """

    function: str
    variant: Mapping[str, Any]
    slots: Slots
    spaces: tuple[FlowSpace, ...]
    steps: list[FlowStep] = field(default_factory=list)
    loops: list[FlowSpan] = field(default_factory=list)
    blocks: list[FlowBlock] = field(default_factory=list)
    arenas: list[int] = field(default_factory=list)
    scratch: int = 0

    @property
    def arena(self) -> int:
        """Return the bytes of all arenas of the call."""
        return sum(self.arenas)

    @property
    def targets(self) -> dict[str, str]:
        """Return the target of each device that the model names."""
        return {name: row["target"] for name, row in self.variant.get("targets", {}).items()}

    def memories_of_step(self, step: FlowStep) -> tuple[int, int]:
        """Return the memories (by number) that a step reads and writes; two for a transfer."""
        homes = [self.slots.memory_space(slot) for slot, _, _ in (*step.reads, *step.writes)]
        return (homes[0], homes[-1]) if homes else (0, 0)

    def runs_of(self, within: str) -> int:
        """Return the number of executions of a step inside the loops and branches ``within``.

        All branches are assumed taken.
        """
        return prod(self.iterations_of(part) for part in within.split(" > "))

    def iterations_of(self, name: str) -> int:
        """Return the iteration count of the loop ``name``, an estimate if it is unknown; 1 for a branch."""
        if not name.startswith("loop"):
            return 1
        return iterations_or_estimate(self.loops[int(name.split()[1])].iterations)

    def is_guessed(self, within: str) -> bool:
        """Return True if a loop in ``within`` has an unknown iteration count."""
        loops = (part for part in within.split(" > ") if part.startswith("loop"))
        return any(self.loops[int(part.split()[1])].iterations is None for part in loops)

    def name_of(self, step: FlowStep) -> str:
        """Return the name of the kernel that a step runs."""
        if step.control:
            return step.control
        return "copy" if step.kernel < 0 else self.variant["kernels"][step.kernel]["name"]


def flow_of(opened: OpenedBundle, function: str = "", sizes: Mapping[str, int] | None = None, target: str = "") -> Flow:
    """Execute ``function`` of a bundle symbolically; return its commands. Missing sizes of symbolic dims are guessed.

    Raises
    ------
    BundleError
        If the bundle has no such function or target.
    CallError
        If the program refuses arguments of these sizes, or the function has no such dim.
    """
    name = chosen_function_name(opened, function)
    variant = _variant_for_target(opened, target)
    signature = opened.manifest["functions"][name]
    slots, spaces = _memories_of_variant(opened, variant, signature)
    flow = Flow(name, variant, slots, spaces, arenas=[0] * len(spaces))
    buffers = load_command_buffers(opened, dict(variant))
    texts, own = (_debug_field(opened, variant, key) for key in ("text", "loc"))
    locs = [command_locs(opened, dict(variant), n, nodes) for n, nodes in enumerate(buffers.nodes)]
    walker = _FlowRecorder(flow, buffers, texts, own, locs)
    check_dims(sizes or {}, signature["arguments"], name)
    known = sizes_of_call(signature, sizes or {})
    shapes = [tuple(_assumed_size(d, known) for d in a["dims"]) for a in signature["arguments"]]
    program = variant["functions"][name]
    frame = Frame(program["registers"], shapes, walker, name, tuple(a["name"] for a in signature["arguments"]))
    try:
        interpret_program(decode_program(program["code"]), frame)
    except Invalid as error:
        raise BundleError(opened.where, f"the program is invalid: {error}") from None
    used = {step.kernel for step in flow.steps if step.kernel >= 0}
    flow.scratch = max((variant["kernels"][n]["scratch"] for n in used), default=0)
    return flow


def chosen_function_name(opened: OpenedBundle, function: str = "") -> str:
    """Return ``function``, or by default the name of the only function, or ``main``.

    Raises
    ------
    ArgumentValueError
        If the bundle has no such function.
    """
    return choose_function(opened.manifest["functions"], function, opened.where)


def sizes_of_call(entry: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, int]:
    """Return ``sizes``, and the assumed size of each other symbolic dim of a function; ``entry`` is its signature."""
    return {**sizes, **assumed_sizes(entry["arguments"], entry.get("typical", {}), sizes)}


def _memories_of_variant(
    opened: OpenedBundle, variant: Mapping[str, Any], signature: Mapping[str, Any]
) -> tuple[Slots, tuple[FlowSpace, ...]]:
    """Return the slots of a function (``signature``), and the memory spaces of the variant."""
    if not variant.get("spaces"):
        slots = Slots(len(signature["arguments"]), len(signature["results"]))
        return slots, (FlowSpace(variant["kind"], variant["target"]),)
    spaces = Spaces(opened, variant)
    parts = [spaces.parts[row["part"]] for row in spaces.rows]
    named = zip(spaces.rows, parts, strict=True)
    return spaces.layout(signature), tuple(FlowSpace(r["device"] or p["kind"], p["target"]) for r, p in named)


def _variant_for_target(opened: OpenedBundle, target: str) -> Mapping[str, Any]:
    """Return the manifest entry of the variant for ``target``; the first variant for an empty target."""
    every = opened.manifest["variants"]
    wanted = target if not target or "+" in target else resolve_targets(target)[0].name
    # A kind alone, such as "cuda", means its default target, or else the first variant of that kind.
    of_kind = [v for v in every if v["target"].startswith(f"{target}:")]
    found = [v for v in every if wanted in ("", v["target"])] or of_kind
    if not found:
        expected = ", ".join(v["target"] for v in every)
        raise BundleError(opened.where, f"the bundle is not compiled for {target}", expected=expected)
    return found[0]


def _debug_field(opened: OpenedBundle, variant: Mapping[str, Any], key: str) -> list[str]:
    """Return the field ``key`` of each kernel's debug information; empty strings without such information."""
    held = (opened.manifest.get("debug") or {}).get("kernels") or {}
    return [held.get(f"{variant['target']}/{k['name']}", {}).get(key, "") for k in variant["kernels"]]


def _assumed_size(dim: int | str, sizes: Mapping[str, int]) -> int:
    """Evaluate a dim for ``sizes``, with an assumed size for each missing symbol."""
    if isinstance(dim, int):
        return dim
    try:
        return evaluate_dim(ast.parse(dim, mode="eval").body, sizes)
    except (ValueError, ZeroDivisionError, SyntaxError) as error:
        raise CallError("", f"cannot evaluate dim {dim!r}: {error}") from None


class _FlowRecorder:
    """Device that records submitted commands during symbolic execution of a host program.

    Integers in memory are guessed, and all checks pass.
    """

    def __init__(
        self, flow: Flow, buffers: Buffers, texts: Sequence[str], own: Sequence[str], locs: Sequence[Mapping[int, str]]
    ) -> None:
        self.flow, self.buffers, self.texts, self.own, self.locs = flow, buffers, texts, own, locs
        self.here: Mapping[int, str] = {}  # the locations of the current buffer's commands
        self.graphs = self.branches = 0
        self.iterations: Iterator[int | None] = iter(())  # iteration counts of the loops ahead

    def allocate_result(self, index: int, dims: tuple[int, ...]) -> None:
        """Do nothing: results are not allocated."""

    def share_argument_memory(self, index: int, argument: int) -> None:
        """Do nothing: arguments are not moved."""

    def check_assertion(self, condition: Any, message: str, values: list[Any]) -> None:
        """Do nothing: assertions cannot be evaluated without data."""

    def open_debug_block(self, slot: int, offset: int, size: int) -> None:
        """Do nothing: memory is not accessed."""

    def allocate_arena(self, size: int, space: int = 0) -> None:
        """Record the size of an arena."""
        self.flow.arenas[space] = max(self.flow.arenas[space], size)

    def load_scalar(self, slot: int, offset: int, dtype: str) -> int:
        """Return an assumed value for an integer that a real call would read from memory."""
        return 1 if dtype == "i1" else ASSUMED_SIZE

    def submit(self, number: int, parameters: list[int]) -> None:
        """Record the commands of a buffer."""
        self.iterations = iter(self.flow.variant["command_buffers"][number].get("turns", ()))
        self.here = self.locs[number]
        self._record_nodes(self.buffers.nodes[number], parameters, "")

    def _record_nodes(self, nodes: Sequence[Node], parameters: Sequence[int], within: str) -> None:
        """Record graphs, loops and branches of a command buffer, in order."""
        for node in nodes:
            match node:
                case Graph():
                    self._record_graph(node, parameters, within)
                case WhileNode():
                    block = self._open_block(True)
                    begin, inner = len(self.flow.steps), f"{within}loop {len(self.flow.loops)} > "
                    at, span = len(self.flow.loops), FlowSpan(begin, begin, next(self.iterations, None))
                    self.flow.loops.append(span)
                    self._record_nodes(node.condition, parameters, inner)
                    self._record_nodes(node.body, parameters, inner)
                    self.flow.loops[at] = replace(span, end=len(self.flow.steps))
                    self.flow.blocks[block] = FlowBlock(((begin, len(self.flow.steps)),), True)
                case Case():
                    self.branches += 1
                    self._record_branch(node, parameters, f"{within}branch {self.branches}")

    def _open_block(self, is_loop: bool) -> int:
        """Add a loop or branch to the blocks before its inner ones; return its index."""
        self.flow.blocks.append(FlowBlock(((len(self.flow.steps),) * 2,), is_loop))
        return len(self.flow.blocks) - 1

    def _record_branch(self, node: Case, parameters: Sequence[int], name: str) -> None:
        """Record a branch that is a node of a command buffer: its sides one after the other."""
        sides, block = list[tuple[int, int]](), self._open_block(False)
        for n, branch in enumerate(node.branches):
            begin = len(self.flow.steps)
            self._record_nodes(branch, parameters, f"{name}.{n} > ")
            sides.append((begin, len(self.flow.steps)))
        self.flow.blocks[block] = FlowBlock(tuple(sides), False)

    def _record_graph(self, graph: Graph, parameters: Sequence[int], within: str) -> None:
        """Record the commands of a graph with their byte ranges and predecessors."""
        steps, number, first = self.flow.steps, self.graphs, len(self.flow.steps)
        self.graphs += 1
        after: list[list[int]] = [[] for _ in graph.commands]
        for n, command in enumerate(graph.commands):
            for successor in command.successors:
                after[successor].append(len(steps))
            for follower in command.followers:
                after[follower].append(len(steps))
            where = within.removesuffix(" > ")
            if isinstance(command, Control):
                self._record_control(command, number, where, tuple(after[n]), parameters)
                continue
            kernel = -1 if command.kind == COPY else command.kernel
            extents, count, types, sizes, updates = self._accessed_ranges(command, parameters)
            places = [
                (slot, at := operand_value(offset, parameters), at + size)
                for (slot, offset), size in zip(command.places, extents, strict=True)
            ]
            items, claim = (operand_value(word, parameters) for word in (command.items, command.grain))
            reads, writes = tuple(places[:count]), tuple(places[count:])
            steps.append(FlowStep(
                len(steps), number, where, kernel, sizes, items, claim, graph.serial, reads, writes, types,
                tuple(after[n]), updates, self._loc_of(command),
                tuple(TileEdge(first + t.producer, t.times, t.over, t.plus) for t in command.tiles),
            ))  # fmt: skip

    def _loc_of(self, command: Command) -> str:
        return "" if command.kind == COPY else self.here.get(command.at, self.own[command.kernel])

    def _record_control(
        self, command: Control, graph: int, within: str, after: tuple[int, ...], parameters: Sequence[int]
    ) -> None:
        """Record a loop or branch that is a command of a graph, then the commands inside."""
        first, branch = len(self.flow.steps), isinstance(command.nodes[0], Case)
        name = f"branch {self.branches + 1}" if branch else f"loop {len(self.flow.loops)}"
        step = FlowStep(first, graph, within, -1, {}, 1, 1, False, (), (), (), after, False, control=name)
        self.flow.steps.append(step)
        self._record_nodes(command.nodes, parameters, f"{within} > " if within else "")
        self.flow.steps[first] = replace(step, end=len(self.flow.steps))

    def _accessed_ranges(
        self, command: Command, parameters: Sequence[int]
    ) -> tuple[list[int], int, tuple[str, ...], dict[str, int], bool]:
        """Return facts of a command: bytes of each range, number of inputs, types, dims, True for an update."""
        dims = [operand_value(word, parameters) for word in command.dims]
        if command.kind == COPY:
            return [dims[0], dims[0]], 1, (), {}, False
        entry, text = self.flow.variant["kernels"][command.kernel], self.texts[command.kernel]
        extents = [evaluate_size(size, dims) for size in entry["extents"]]
        if not text:
            return extents, entry["inputs"], (), {}, False
        header = read_kernel_header(text)
        known = dict(zip(header.dims, dims, strict=True))
        types = tuple(
            f"{p.dtype}[{', '.join(str(evaluate_dim(d, known)) for d in p.dims)}]" for p in header.parameters
        )
        updates = bool(header.parameters) and header.parameters[0].name.startswith("a")
        return extents, entry["inputs"], types, known, updates and header.parameters[0].name != "a0"


def arena_places(flow: Flow, step: FlowStep) -> Iterator[tuple[Place, bool, str]]:
    """Yield each arena range that a step accesses, True if the step writes it, and the type of the value."""
    types = (*step.types, *[""] * (len(step.reads) + len(step.writes) - len(step.types)))
    for n, place in enumerate((*step.reads, *step.writes)):
        if flow.slots.arena <= place[0] < flow.slots.constants and place[1] < place[2]:
            yield place, n >= len(step.reads), types[n]
