"""Encoding and decoding of command buffers: words and the records of :mod:`aotc.vmfb.abi`.

Decoding checks only that all lengths agree. :mod:`aotc.vmfb.verify.program` checks the kernels, slots and other numbers
in the records.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from aotc.vmfb import abi
from aotc.vmfb.verify.kernel_interface import Invalid


def encode_commands(nodes: Sequence[abi.Node]) -> list[int]:
    """Encode the nodes of a command buffer as words."""
    return [word for node in nodes for word in _encode_node(node)]


def decode_commands(words: Sequence[int]) -> list[abi.Node]:
    """Decode the words of a command buffer to nodes.

    Raises
    ------
    Invalid
        If lengths do not agree; the message has the position of the node.
    """
    return _decode_nodes(words, 0, len(words), 0)


def all_nodes(nodes: Sequence[abi.Node]) -> Iterator[abi.Node]:
    """Yield nodes, and the nodes inside of loops, branches and control commands."""
    for node in nodes:
        yield node
        match node:
            case abi.Graph():
                for command in node.commands:
                    if isinstance(command, abi.Control):
                        yield from all_nodes(command.nodes)
            case abi.WhileNode():
                yield from all_nodes(node.condition)
                yield from all_nodes(node.body)
            case abi.Case():
                for branch in node.branches:
                    yield from all_nodes(branch)


def all_graphs(nodes: Sequence[abi.Node]) -> Iterator[abi.Graph]:
    """Yield the graphs among nodes, and those inside of loops, branches and control commands."""
    return (node for node in all_nodes(nodes) if isinstance(node, abi.Graph))


def all_commands(nodes: Sequence[abi.Node]) -> Iterator[abi.Command]:
    """Yield the dispatches and copies of all graphs, also inside of loops, branches and control commands."""
    for graph in all_graphs(nodes):
        yield from graph.leaves


def kernel_words(nodes: Sequence[abi.Node]) -> list[int]:
    """Return the positions of the words with kernel numbers, which a loader replaces by addresses."""
    return [command.at + abi.KERNEL for command in all_commands(nodes) if command.kind == abi.DISPATCH]


def words_of_nodes(words: Any, nodes: Sequence[abi.Node]) -> Any:
    """Return the part of ``words`` that encodes ``nodes``, which are contiguous and were decoded from ``words``."""
    last = nodes[-1].at
    return words[nodes[0].at : last + int(words[last + abi.NODE_WORDS])]


def _decode_nodes(words: Sequence[int], at: int, end: int, depth: int) -> list[abi.Node]:
    """Decode the nodes in the words from ``at`` to ``end``; ``depth`` is the nesting depth of loops and branches."""
    nodes: list[abi.Node] = []
    while at < end:
        if depth > abi.MAX_NESTING:
            raise _invalid_command_error(at, f"loops and branches are nested {depth} deep")
        _require_words(at, at + abi.NODE_HEADER, end)
        length = words[at + abi.NODE_WORDS]
        stop = at + length
        if length < abi.NODE_HEADER or stop > end:
            raise _invalid_command_error(at, f"a node of {length} words where {end - at} are left")
        nodes.append(_decode_node(words, at, stop, depth))
        at = stop
    return nodes


def _decode_node(words: Sequence[int], at: int, end: int, depth: int) -> abi.Node:
    """Decode the graph, loop or branch that occupies the words from ``at`` to ``end``."""
    match words[at + abi.NODE_KIND]:
        case abi.GRAPH | abi.TILED:
            return _decode_graph(words, at, end, depth)
        case abi.WHILE:
            first = at + abi.WHILE_HEADER
            _require_words(at, first, end)
            lengths = words[at + abi.WHILE_CONDITION], words[at + abi.WHILE_BODY]
            place = words[at + abi.WHILE_SLOT], words[at + abi.WHILE_OFFSET]
            condition, body = _decode_bodies(words, at, lengths, first, end, depth)
            return abi.WhileNode(condition, body, place, at)
        case abi.CASE:
            table = at + abi.CASE_HEADER
            _require_words(at, table, end)
            branches = words[at + abi.CASE_BRANCHES]
            if branches < 1:
                raise _invalid_command_error(at, "a case without branches")
            first = table + branches
            _require_words(at, first, end)
            place = words[at + abi.CASE_SLOT], words[at + abi.CASE_OFFSET]
            return abi.Case(_decode_bodies(words, at, words[table:first], first, end, depth), place, at)
        case kind:
            raise _invalid_command_error(at, f"unknown node {kind}")


def _decode_bodies(
    words: Sequence[int], node: int, lengths: Sequence[int], at: int, end: int, depth: int
) -> list[list[abi.Node]]:
    """Decode the bodies of a loop (condition, body) or of a branch (one for each case).

    Parameters
    ----------
    node : int
        Position of the loop or branch, for messages.
    lengths : sequence of int
        Words of each body.
    at, end : int
        The words of all bodies.
    """
    spans = []
    for length in lengths:
        if length < 0:
            raise _invalid_command_error(node, f"a body of {length} words")
        spans.append((at, at + length))
        at += length
    if at != end:
        raise _invalid_command_error(node, "the bodies do not fill the node")
    return [_decode_nodes(words, *span, depth + 1) for span in spans]


def _decode_graph(words: Sequence[int], at: int, end: int, depth: int) -> abi.Graph:
    """Decode a graph and its commands from the words from ``at`` to ``end``."""
    table = at + abi.GRAPH_HEADER
    _require_words(at, table, end)
    count, serial = words[at + abi.GRAPH_COMMANDS], words[at + abi.GRAPH_SERIAL]
    tiled = words[at + abi.NODE_KIND] == abi.TILED
    if count < 0 or serial not in (0, 1):
        raise _invalid_command_error(at, f"a graph of {count} commands, serial {serial}")
    cursor = table + count
    _require_words(at, cursor, end)
    commands: list[abi.Command | abi.Control] = []
    for offset in words[table:cursor]:
        if offset != cursor - at:
            raise _invalid_command_error(at, f"command {len(commands)} is not where the graph says")
        first = cursor + abi.COMMAND_HEADER
        _require_words(at, first, end)
        kind, kernel, items, grain, predecessors, successors, places, dims = words[cursor:first]
        if successors < 0 or places < 0 or dims < 0:
            raise _invalid_command_error(at, "a command with a negative count")
        places_at = first + successors
        dims_at = places_at + abi.PLACE_WORDS * places
        stop = dims_at + dims
        _require_words(at, stop, end)
        if kind == abi.CONTROL:
            if tiled:
                raise _invalid_command_error(at, "a control command in a tiled graph")
            if places or items != grain or items != abi.constant_operand(1):
                raise _invalid_command_error(at, "a control command has one item and no places")
            nodes = _decode_nodes(words, dims_at, stop, depth + 1)
            commands.append(abi.Control(kernel, predecessors, words[first:places_at], nodes, cursor))
            cursor = stop
            continue
        slots = words[places_at : dims_at : abi.PLACE_WORDS]
        offsets = words[places_at + abi.PLACE_OFFSET : dims_at : abi.PLACE_WORDS]
        follow, pairs, rest = words[first:places_at], list(zip(slots, offsets)), words[dims_at:stop]
        command = abi.Command(kind, kernel, items, grain, predecessors, follow, pairs, rest, cursor)
        commands.append(command)
        cursor = _decode_tile_edges(words, at, stop, end, command) if tiled else stop
    if cursor != end:
        raise _invalid_command_error(at, "the commands do not fill the graph")
    graph = abi.Graph(commands, words[at + abi.GRAPH_STATE], serial == 1, at)
    if tiled and not graph.tiled:
        raise _invalid_command_error(at, "a tiled graph without tiles")
    return graph


def _decode_tile_edges(words: Sequence[int], node: int, at: int, end: int, command: abi.Command) -> int:
    """Decode the tile dependences of a command in both directions into ``command``; return the position after them."""
    first = at + abi.TILED_HEADER
    _require_words(node, first, end)
    followers, tiles = words[at:first]
    if followers < 0 or tiles < 0:
        raise _invalid_command_error(node, "a command with a negative count")
    tiles_at = first + followers
    stop = tiles_at + abi.TILE_WORDS * tiles
    _require_words(node, stop, end)
    command.followers = words[first:tiles_at]
    command.tiles = [abi.TileEdge(*words[n : n + abi.TILE_WORDS]) for n in range(tiles_at, stop, abi.TILE_WORDS)]
    return stop


def _require_words(node: int, at: int, end: int) -> None:
    if at > end:
        raise _invalid_command_error(node, "the node is too short")


def _invalid_command_error(node: int, problem: str) -> Invalid:
    return Invalid(f"word {node}: {problem}")


def _encode_node(node: abi.Node) -> list[int]:
    """Encode a graph, a loop or a branch."""
    if isinstance(node, abi.Graph):
        return _encode_graph(node)
    slot, offset = node.place
    if isinstance(node, abi.WhileNode):
        bodies, lengths, size = [encode_commands(node.condition), encode_commands(node.body)], [], abi.WHILE_HEADER
        header = {abi.NODE_KIND: abi.WHILE, abi.WHILE_SLOT: slot, abi.WHILE_OFFSET: offset}
        header |= {abi.WHILE_CONDITION: len(bodies[0]), abi.WHILE_BODY: len(bodies[1])}
    else:
        bodies = [encode_commands(branch) for branch in node.branches]
        lengths = [len(body) for body in bodies]
        size = abi.CASE_HEADER + len(lengths)
        header = {abi.NODE_KIND: abi.CASE, abi.CASE_BRANCHES: len(bodies), abi.CASE_SLOT: slot, abi.CASE_OFFSET: offset}
    header[abi.NODE_WORDS] = size + sum(map(len, bodies))
    return [*_header_words_in_order(header), *lengths, *_concatenate_words(bodies)]


def _encode_graph(graph: abi.Graph) -> list[int]:
    """Encode a graph: header, offsets of the commands, commands."""
    kind = abi.TILED if graph.tiled else abi.GRAPH
    commands = [_encode_command(command, kind) for command in graph.commands]
    offsets = []
    end = abi.GRAPH_HEADER + len(commands)
    for words in commands:
        offsets.append(end)
        end += len(words)
    header = {
        abi.NODE_KIND: kind,
        abi.NODE_WORDS: end,
        abi.GRAPH_COMMANDS: len(commands),
        abi.GRAPH_STATE: graph.state,
        abi.GRAPH_SERIAL: int(graph.serial),
    }
    return [*_header_words_in_order(header), *offsets, *_concatenate_words(commands)]


def _encode_command(command: abi.Command | abi.Control, graph: int) -> list[int]:
    """Encode a command; in a tiled graph (``graph`` is :data:`aotc.vmfb.abi.TILED`) with its tile dependences."""
    if isinstance(command, abi.Control):
        one, nodes = abi.constant_operand(1), encode_commands(command.nodes)
        command = abi.Command(abi.CONTROL, command.cell, one, one, command.predecessors, command.successors, (), nodes)
    header = {
        abi.KIND: command.kind,
        abi.KERNEL: command.kernel,
        abi.ITEMS: command.items,
        abi.GRAIN: command.grain,
        abi.PREDECESSORS: command.predecessors,
        abi.SUCCESSORS: len(command.successors),
        abi.PLACES: len(command.places),
        abi.DIMS: len(command.dims),
    }
    words = [*_header_words_in_order(header), *command.successors, *_concatenate_words(command.places), *command.dims]
    if graph == abi.TILED:
        tiles = [(t.producer, t.times, t.over, t.plus) for t in command.tiles]
        words += [len(command.followers), len(tiles), *command.followers, *_concatenate_words(tiles)]
    return words


def _header_words_in_order(header: dict[int, int]) -> list[int]:
    """Return the words of a header, given by their positions, as a list in order of position."""
    return [header[position] for position in range(len(header))]


def _concatenate_words(parts: Sequence[Sequence[int]]) -> list[int]:
    return [word for part in parts for word in part]
