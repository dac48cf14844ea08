"""The contracts between compiler and runtime: kernels, pointer table and command buffers.

Kernel (CPU)
    ``void kernel(void **buffers, int64_t *dims, int64_t begin, int64_t end, void *scratch, int64_t *monitor)``
    ``buffers`` has the inputs, then the outputs; ``dims`` the kernel's int64 parameters; ``[begin, end)`` is a range of
    its grid; ``scratch`` is 64-byte aligned memory that belongs to the calling worker, of the size that the kernel
    declares. A long-running kernel polls: at intervals it calls the function whose address is the first word of
    ``monitor``, ``int64_t poll(int64_t *monitor)``, and returns at once if the result is not 0; its outputs are then
    undefined. A kernel library exports one table, :data:`TABLE_SYMBOL`, an array of function addresses in the order of
    the bundle's kernel list, and :data:`INTERFACE_SYMBOL`, the digest of the manifest's description of the kernels
    (:mod:`aotc.vmfb.verify.kernel_interface`). In a segment of cubins or PTX the digest is the last bytes. For each
    function imported from another library it exports a pointer named :data:`IMPORT_PREFIX` and the function's name,
    which the loader fills in.

Command buffer
    One flat array of int64 words, a sequence of *nodes*. It is position
    independent and is executed by one call into the executor. Small integers
    that may depend on the call are *operands*: ``2*c`` is the constant ``c``,
    ``2*i + 1`` is entry ``i`` of the submission's parameter array.

    A *place* is two words: slot number, byte offset operand. The slots are the
    pointer table of a submission, see :class:`Slots`.

    ``GRAPH, words, commands, state, serial, offset_0 ... offset_{n-1}``, then the commands: an acyclic graph. ``words``
    is the node's length; ``state`` the number of the first of its commands' cells in the submission's state memory
    (:data:`STATE_WORDS` words for each command); ``serial`` is 1 if the graph is so small that the caller runs it
    alone; ``offset_i`` counts words from the start of the node.

    A command: ``kind, kernel, items, grain, predecessors, n_successors, n_places,``
    ``n_dims, successors..., places (2 words each)..., dims (operands)...``. ``kind`` is :data:`DISPATCH`; ``kernel`` is
    a number that the loader replaces by the function's address; ``items`` is an operand, the size of the grid;
    ``grain`` is an operand, the number of grid items that a worker claims at once. :data:`COPY` has two places (source,
    destination) and one dim operand (bytes). :data:`CONTROL` is a loop or a branch that runs concurrently with other
    commands: its dims are nodes, and its ``kernel`` is the number, relative to the graph's first cell, of the first of
    :data:`INNER_CELLS` cells of its own. These follow the graph's cells, one group for each control command.

    ``TILED`` is a graph in which some commands wait for others tile by tile; it has twice as many cells. The dims of
    each command are followed by ``n_followers, n_tiles, followers..., tiles (4 words each)...``. A tile ``producer,
    times, over, plus`` says that the items before ``end`` may run once the producer's items before ``(end * times +
    plus) // over`` have completed, and the last items once the producer has finished. The producer lists the command
    among its followers. ``predecessors`` of such a command includes its tiles. An ``over`` of 0 requires the same
    fraction of the producer's items, rounded up, and ``plus`` more; if either command has :data:`FEW_ITEMS` items or
    more, all of them.

    ``WHILE, words, cond_words, body_words, slot, offset`` then the condition's
    nodes, then the body's: runs the condition, reads the byte at the place, and
    while it is not 0 runs the body and the condition again.

    ``CASE, words, branches, slot, offset, words_0 ... words_{n-1}`` then the
    branches' nodes: runs branch number i32-at-place, the last if out of range.

Call block
    The state of one call into the executor, :data:`CALL_WORDS` words aligned to 64 bytes; the positions of the words
    have names that start with ``CALL_``. The host fills in the words :data:`CALL_POOL` to :data:`CALL_DEVICES`, the
    executor maintains the others. :data:`CALL_MONITOR` is the address passed to the caller's kernels as ``monitor``. A
    nonzero :data:`CALL_STOP` ends the call: every participant reads it between two claims, and kernels poll it as
    described above.

Pool
    The worker threads of a process, in ``aotc_pool_bytes()`` zeroed bytes of memory. The words :data:`POOL_HOST_WORDS`
    are functions of the host language, which must regain control at intervals during a call: the executor calls
    ``release()`` when the call begins and ``regain(state)``, with the result of ``release``, when it ends. When it
    polls and :data:`CALL_EVERY` nanoseconds have passed since the last time, it calls ``regain``, ``notice`` with
    :data:`CALL_ARGUMENT`, and ``release``. If ``notice`` returns 0 the call is stopped, else its result is passed to
    ``drop``. :data:`POOL_HALT` stops all calls of the process while it is not 0. A call whose :data:`CALL_ASKED`
    differs from :data:`POOL_ASK` notifies the host at once. Concurrent calls share the workers; callers and workers
    together are at most :data:`POOL_CORES`, or the largest :data:`CALL_THREADS` of the calls. :data:`CALL_DEVICES` has
    a bit for each logical device of the call. Devices with running calls have equal shares of :data:`POOL_CORES`, and
    each divides its share equally among its calls. :data:`POOL_COUNTS` are never reset: items that participants ran
    beyond their static shares, nanoseconds that they waited within graphs, and wake-ups of workers.

Trial
    For tests: while :data:`POOL_TRIAL` is not 0 it is the address of :data:`TRIAL_HEADER` words and of
    :data:`TRIAL_CAPACITY` rows. With an odd :data:`TRIAL_ORDER`, a seed, every graph is shared, even if it is serial,
    and each participant chooses at random a ready command, a number of its items up to the grain, and a delay. With an
    even one, twice a number of threads, nobody steals: command ``n`` of a shared graph is run by participant ``n``
    modulo that number alone. Each claim takes :data:`TRIAL_FACTOR` times its processor time if :data:`TRIAL_SLOW` is
    the number of its participant, counted from 1, or the address of its command. A row is a claim: number of the
    graph's execution, address of the command, first item and the one after the last, logical start and end times
    (:data:`TRIAL_CLOCK`, which counts on), participant, logical devices of the call. Serial graphs that one thread runs
    alone have no rows.

    The constants below are the positions of these words; no other module has them. :mod:`aotc.vmfb.commands` encodes
    and decodes command buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

EXECUTOR_VERSION = 6  # version of the interface between executor and kernels
COMMANDS_VERSION = 2  # version of the command encoding
# Versions that this loader runs. For an older executor version it loads the executor from the bundle itself.
EXECUTOR_VERSIONS = frozenset({2, 3, 4, 5, EXECUTOR_VERSION})
COMMANDS_VERSIONS = frozenset({1, COMMANDS_VERSION})
TILES_SINCE = 4  # first executor version with tiles
PARTS_SINCE = 6  # first executor version with tiles whose ``over`` is 0
CONTROLS_SINCE = 2  # first encoding version with control commands
TABLE_SYMBOL = "aotc_kernels"
INTERFACE_SYMBOL = "aotc_interface"
INTERFACE_BYTES = 32
IMPORT_PREFIX = "aotc_import_"
ALIGNMENT = 64
GPU_ALIGNMENT = 16  # bytes; GPU kernels access arrays in vectors of this size
MAP_BYTES, MAP_ALIGNMENT = 128, 64  # of a tensor map, a parameter of CUDA kernels

MAX_PLACES = 256
MAX_DIMS = 64
MAX_NESTING = 32
STATE_WORDS = 8
INNER_CELLS = 5

GRAPH, WHILE, CASE, TILED = 1, 2, 3, 4
DISPATCH, COPY, CONTROL = 0, 1, 2

# Positions of the words of a header; the last name of a line is the header's length.
NODE_KIND, NODE_WORDS, NODE_HEADER = range(3)
GRAPH_COMMANDS, GRAPH_STATE, GRAPH_SERIAL, GRAPH_HEADER = range(NODE_HEADER, 6)
WHILE_CONDITION, WHILE_BODY, WHILE_SLOT, WHILE_OFFSET, WHILE_HEADER = range(NODE_HEADER, 7)
CASE_BRANCHES, CASE_SLOT, CASE_OFFSET, CASE_HEADER = range(NODE_HEADER, 6)
KIND, KERNEL, ITEMS, GRAIN, PREDECESSORS, SUCCESSORS, PLACES, DIMS, COMMAND_HEADER = range(9)
PLACE_SLOT, PLACE_OFFSET, PLACE_WORDS = range(3)
FOLLOWERS, TILES, TILED_HEADER = range(3)  # follow the dims of a command in a tiled graph
TILE_PRODUCER, TILE_TIMES, TILE_OVER, TILE_PLUS, TILE_WORDS = range(5)
FEW_ITEMS = 1 << 31  # the product of two such numbers fits in a word

# Layout of the call block: fields that all threads read, fields of the caller alone, fields written during the call.
CALL_MONITOR, CALL_STOP, CALL_POOL, CALL_SLOTS, CALL_PARAMS, CALL_CELLS, CALL_STRIDE, CALL_SCRATCH = range(8)
CALL_CODE, CALL_LENGTH, CALL_THREADS, CALL_EVERY, CALL_ARGUMENT, CALL_DEVICES = range(8, 14)
CALL_SINCE, CALL_PERIOD, CALL_TURNS, CALL_STATE, CALL_ASKED, CALL_RUN = range(16, 22)
CALL_PARTICIPANT = CALL_LAG, CALL_SEAT = 22, 23
CALL_WORDS = 24

POOL_HALT = 0
POOL_HOST_WORDS = POOL_RELEASE, POOL_REGAIN, POOL_NOTICE, POOL_DROP = tuple(range(1, 5))
POOL_ASK, POOL_CORES, POOL_TRIAL = 5, 6, 7
POOL_COUNTS = POOL_STEALS, POOL_IDLE, POOL_WAKEUPS = tuple(range(8, 11))
POOL_ALIVE = 16

TRIAL_ORDER, TRIAL_SLOW, TRIAL_FACTOR, TRIAL_CLOCK, TRIAL_RUNS, TRIAL_ROWS, TRIAL_CAPACITY, TRIAL_HEADER = range(8)
ROW_RUN, ROW_COMMAND, ROW_FIRST, ROW_LAST, ROW_BEGAN, ROW_ENDED, ROW_WHO, ROW_DEVICES = range(8)
ROW_WORDS = 8


# ---------------------------------------------------------------- slots


class Slots:
    """The pointer table of a submission: arguments, results, the arenas, the constants.

    Attributes
    ----------
    arena, constants : int
        Slots of the first arena and of the first constants; each memory space has an arena and constants of its own.
    count : int
        The number of all slots.
    homes : sequence of int
        The number of the memory space of each argument and result; empty if there is only one memory space.
    """

    __slots__ = ("arena", "arguments", "constants", "count", "homes")

    def __init__(self, arguments: int, results: int, spaces: int = 1, homes: Sequence[int] = ()) -> None:
        self.arguments = arguments
        self.homes = homes
        self.arena = arguments + results
        self.constants = self.arena + spaces
        self.count = self.constants + spaces

    def arena_slot(self, space: int) -> int:
        """Return the slot of the arena of memory space number ``space``."""
        return self.arena + space

    def constants_slot(self, space: int) -> int:
        """Return the slot of the constants of memory space number ``space``."""
        return self.constants + space

    def result_slot(self, number: int) -> int:
        """Return the slot of result ``number``. The slot of an argument is its number."""
        return self.arguments + number

    def memory_space(self, slot: int) -> int:
        """Return the number of the memory space that contains ``slot``."""
        if slot < self.arena:
            return self.homes[slot] if self.homes else 0
        return slot - (self.arena if slot < self.constants else self.constants)


# ---------------------------------------------------------------- command buffers


Place: TypeAlias = tuple[int, int]
"""A memory location: a slot, and an operand for the byte offset in it."""


class Record:
    """Base class of the decoded parts of a command buffer; ``==`` compares all fields except the position ``at``.

    Plain classes, to keep loading fast: creating a ``NamedTuple`` or a dataclass takes 0.1 ms and more, creating a
    class with slots a fraction of that.
    """

    __slots__ = ("at",)

    at: int

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and all(getattr(self, f) == getattr(other, f) for f in self.__slots__)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{f}={getattr(self, f)!r}' for f in self.__slots__)})"


class TileEdge(Record):
    """Tile-by-tile dependence of a command, the consumer, on an earlier command of its graph, the producer.

    The consumer's first ``end`` items may run once ``(end * times + plus) // over`` items of the producer have
    completed. An ``over`` of 0 stands for the same fraction of the producer's items, and ``plus`` more.

    Attributes
    ----------
    producer : int
        Number of the producer in the graph.
    times, over, plus : int
        Terms of the formula, counted in items.
    """

    __slots__ = ("over", "plus", "producer", "times")

    def __init__(self, producer: int, times: int, over: int, plus: int) -> None:
        self.producer = producer
        self.times = times
        self.over = over
        self.plus = plus

    @property
    def halo(self) -> int:
        """Return the number of producer items required beyond those proportional to the consumer's progress."""
        return -(-self.plus // self.over) if self.over else self.plus

    def required_items(self, end: int, items: int, producer_items: int) -> int:
        """Return the number of items that the producer must complete before the consumer runs its item ``end - 1``.

        ``items`` and ``producer_items`` are the grid sizes of the consumer and of the producer.
        """
        if end >= items or (not self.over and max(items, producer_items) >= FEW_ITEMS):
            return producer_items
        times, over, plus = self.times, self.over, self.plus
        if not over:
            times, over, plus = producer_items, items, (plus + 1) * items - 1
        return max(0, min(producer_items, (end * times + plus) // over))


class Command(Record):
    """A dispatch or a copy; its fields are in the order of the words.

    Attributes
    ----------
    kind : int
        :data:`DISPATCH` or :data:`COPY`.
    kernel : int
        Number of the kernel, or its address in an executor's buffer.
    items, grain : int
        Operands.
    predecessors : int
        Number of commands that this command waits for, completely or tile by tile.
    successors : sequence of int
        Numbers of the commands in the same graph that wait for it.
    places : sequence of Place
    dims : sequence of int
        Operands.
    tiles, followers : sequence of TileEdge, sequence of int
        The tiles of other commands that this command waits for, and the numbers of the commands that wait for its
        tiles.
    at : int
        Position of the command's first word in the buffer from which it was decoded.
    """

    __slots__ = (
        "dims", "followers", "grain", "items", "kernel", "kind", "places", "predecessors", "successors", "tiles",
    )  # fmt: skip

    def __init__(
        self,
        kind: int,
        kernel: int,
        items: int,
        grain: int,
        predecessors: int,
        successors: Sequence[int],
        places: Sequence[Place],
        dims: Sequence[int],
        at: int = 0,
        tiles: Sequence[TileEdge] = (),
        followers: Sequence[int] = (),
    ) -> None:
        self.kind = kind
        self.kernel = kernel
        self.items = items
        self.grain = grain
        self.predecessors = predecessors
        self.successors = successors
        self.places = places
        self.dims = dims
        self.at = at
        self.tiles = tiles
        self.followers = followers


class Control(Record):
    """A loop or a branch that is a command of a graph, so that other commands can run concurrently.

    Attributes
    ----------
    cell : int
        Number of the first state cell of this command, relative to the graph's first cell.
    predecessors, successors
        As in :class:`Command`.
    nodes : sequence of Node
        The nodes inside the loop or branch.
    """

    __slots__ = ("cell", "nodes", "predecessors", "successors")
    tiles: Sequence[TileEdge] = ()
    followers: Sequence[int] = ()

    def __init__(
        self, cell: int, predecessors: int, successors: Sequence[int], nodes: Sequence[Node], at: int = 0
    ) -> None:
        self.cell = cell
        self.predecessors = predecessors
        self.successors = successors
        self.nodes = nodes
        self.at = at


class Graph(Record):
    """Acyclic graph of commands; each command runs after its predecessors.

    Attributes
    ----------
    commands : list of Command or Control
    state : int
        Number of the state cell of the first command.
    serial : bool
        True if the calling thread runs all commands alone.
    leaves : list of Command
        The dispatches and copies outside of control commands.
    tiled : bool
        True if a command waits for tiles of another; such a graph has no control commands.
    cells : int
        Number of state cells: one for each command, two in a tiled graph, and those of control commands.
    """

    __slots__ = ("cells", "commands", "leaves", "serial", "state", "tiled")

    def __init__(self, commands: Sequence[Command | Control], state: int, serial: bool, at: int = 0) -> None:
        self.commands = commands
        self.leaves = [c for c in commands if isinstance(c, Command)]
        self.state = state
        self.serial = serial
        self.at = at
        self.tiled = any(command.tiles for command in commands)
        self.cells = (2 if self.tiled else 1) * len(commands) + INNER_CELLS * (len(commands) - len(self.leaves))


class WhileNode(Record):
    """A loop: run ``condition``; while the byte at ``place`` is not 0, run ``body`` and ``condition`` again."""

    __slots__ = ("body", "condition", "place")

    def __init__(self, condition: Sequence[Node], body: Sequence[Node], place: Place, at: int = 0) -> None:
        self.condition = condition
        self.body = body
        self.place = place
        self.at = at


class Case(Record):
    """A branch: run the nodes ``branches[i]`` for the i32 ``i`` at ``place``.

    The last ones if ``i`` is out of range.
    """

    __slots__ = ("branches", "place")

    def __init__(self, branches: Sequence[Sequence[Node]], place: Place, at: int = 0) -> None:
        self.branches = branches
        self.place = place
        self.at = at


Node: TypeAlias = "Graph | WhileNode | Case"


def constant_operand(value: int) -> int:
    """Encode an integer as an operand word of a command buffer."""
    return 2 * value


def parameter_operand(index: int) -> int:
    """Encode a reference to entry ``index`` of a submission's parameter array as an operand word."""
    return 2 * index + 1


def operand_value(operand: int, parameters: Sequence[int]) -> int:
    """Decode an operand word: an integer, or an entry of ``parameters``, the submission's parameter array."""
    return parameters[operand >> 1] if operand & 1 else operand >> 1


def operand_text(operand: int) -> str:
    """Format an operand word for display: ``12`` for an integer, ``p0`` for entry 0 of the parameter array."""
    return f"p{operand >> 1}" if operand & 1 else str(operand >> 1)
