"""Command buffers: what is written reads back, and what is damaged is refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny

from aotc.vmfb import abi
from aotc.vmfb.commands import all_commands, decode_commands, encode_commands, kernel_words
from aotc.vmfb.verify.kernel_interface import Invalid
from aotc.vmfb.verify.program import check_commands

pytestmark = pytest.mark.ir


def check(words, kernels, slots, states, parameters):
    """Read and check a command buffer as a loader does; return where the numbers of kernels stand."""
    nodes = decode_commands(words)
    check_commands(nodes, kernels, slots, states, parameters)
    return kernel_words(nodes)


# ---------------------------------------------------------------- both ways

NUMBERS = st.integers(0, 99)
LISTS = st.lists(NUMBERS, max_size=3)
PLACES = st.tuples(NUMBERS, NUMBERS)
COMMANDS = st.builds(
    abi.Command,
    st.sampled_from([abi.DISPATCH, abi.COPY]), NUMBERS, NUMBERS, NUMBERS, NUMBERS, LISTS,
    st.lists(PLACES, max_size=3), LISTS,
)  # fmt: skip
TILES = st.lists(st.builds(abi.TileEdge, NUMBERS, NUMBERS, NUMBERS, NUMBERS), max_size=2)


@st.composite
def graphs(draw):
    """Graphs, of which some have tiles."""
    commands = draw(st.lists(COMMANDS, max_size=3))
    tiles = [draw(TILES) for _ in commands] if draw(st.booleans()) else []
    if any(tiles):
        for command, some in zip(commands, tiles, strict=True):
            command.tiles, command.followers = some, draw(LISTS)
    return abi.Graph(commands, draw(NUMBERS), draw(st.booleans()))


NODES = st.recursive(
    graphs(),
    lambda inner: st.one_of(
        st.builds(abi.WhileNode, st.lists(inner, max_size=2), st.lists(inner, max_size=2), PLACES),
        st.builds(abi.Case, st.lists(st.lists(inner, max_size=2), min_size=1, max_size=3), PLACES),
    ),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(st.lists(NODES, max_size=3))
def test_encoded_commands_decode_to_the_same(nodes):
    words = encode_commands(nodes)
    read = decode_commands(words)
    assert read == nodes
    for command in all_commands(read):
        assert words[command.at + abi.KERNEL] == command.kernel


def test_the_words_are_those_of_the_format():
    """As the docstring of ``abi`` lists them: a change of these lines is a new version of the format."""
    places, dims = [(2, abi.constant_operand(64))], [abi.constant_operand(3)]
    command = abi.Command(abi.DISPATCH, 7, abi.parameter_operand(0), abi.constant_operand(4), 0, (), places, dims)
    graph = [1, 17, 1, 5, 1, 6, 0, 7, 1, 8, 0, 0, 1, 1, 2, 128, 6]
    assert encode_commands([abi.Graph([command], 5, True)]) == graph
    assert encode_commands([abi.WhileNode([], [abi.Graph([command], 5, True)], (3, 0))]) == [2, 23, 0, 17, 3, 0, *graph]
    assert encode_commands([abi.Case([[], [abi.Graph([command], 5, True)]], (3, 0))]) == [3, 24, 2, 3, 0, 0, 17, *graph]


# ---------------------------------------------------------------- damage


def test_the_words_of_tiles_are_those_of_the_format():
    first = abi.Command(abi.DISPATCH, 7, abi.constant_operand(4), abi.constant_operand(1), 0, (), [], [], followers=[1])
    edge = abi.TileEdge(0, 4, 3, 5)
    second = abi.Command(abi.DISPATCH, 8, abi.constant_operand(3), abi.constant_operand(1), 1, (), [], [], tiles=[edge])
    rows = [0, 7, 8, 2, 0, 0, 0, 0, 1, 0, 1], [0, 8, 6, 2, 1, 0, 0, 0, 0, 1, 0, 4, 3, 5]
    assert encode_commands([abi.Graph([first, second], 0, False)]) == [4, 32, 2, 0, 0, 7, 18, *rows[0], *rows[1]]
    check(encode_commands([abi.Graph([first, second], 0, False)]), 9, 0, 4, 0)


@pytest.mark.parametrize(
    ("tiles", "followers", "message"),
    [
        ([abi.TileEdge(1, 4, 3, 5)], [1], "command 1 waits for tiles of command 1"),
        ([abi.TileEdge(-1, 4, 3, 5)], [1], "command 1 waits for tiles of command -1"),
        ([abi.TileEdge(0, 4, -1, 5)], [1], "a tile of 4 items over -1 and 5"),
        ([abi.TileEdge(0, -4, 3, 5)], [1], "a tile of -4 items over 3 and 5"),
        ([abi.TileEdge(0, 4, 3, -1)], [1], "a tile of 4 items over 3 and -1"),
        ([abi.TileEdge(0, 4, 3, 5)], [], "command 0 has other followers"),
        ([abi.TileEdge(0, 4, 3, 5)], [1, 1], "command 0 has other followers"),
        ([abi.TileEdge(0, 4, 3, 5)] * 2, [1, 1], "the numbers of predecessors do not agree"),
    ],
)
def test_tiles_that_are_wrong(tiles, followers, message):
    one, three, four = (abi.constant_operand(n) for n in (1, 3, 4))
    first = abi.Command(abi.DISPATCH, 0, four, one, 0, (), [], [], followers=followers)
    second = abi.Command(abi.DISPATCH, 0, three, one, 1, (), [], [], tiles=tiles)
    with pytest.raises(Invalid, match=message):
        check(encode_commands([abi.Graph([first, second], 0, False)]), 1, 0, 4, 0)


def test_a_tiled_graph_has_twice_as_many_cells_and_tiles():
    first = abi.Command(abi.DISPATCH, 0, abi.constant_operand(4), abi.constant_operand(1), 0, (), [], [], followers=[1])
    edge = abi.TileEdge(0, 1, 1, 0)
    second = abi.Command(abi.DISPATCH, 0, abi.constant_operand(3), abi.constant_operand(1), 1, (), [], [], tiles=[edge])
    with pytest.raises(Invalid, match="cells 0 to 4 of 3"):
        check(encode_commands([abi.Graph([first, second], 0, False)]), 1, 0, 3, 0)
    with pytest.raises(Invalid, match="a serial graph with tiles"):
        check(encode_commands([abi.Graph([first, second], 0, True)]), 1, 0, 4, 0)
    words = [4, 17, 1, 0, 0, 6, 0, 0, 2, 2, 0, 0, 0, 0, 0, 0]
    with pytest.raises(Invalid, match=r"a tiled graph without tiles|the node is too short|do not fill"):
        check([*words, 0], 1, 0, 2, 0)


def test_the_tiny_command_buffers_are_valid():
    kernels = 0
    for words, states, parameters in tiny.command_buffers():
        kernels += len(check(words, 4, 5, states, parameters))
    assert kernels == 7


def _valid():
    first = tiny.dispatch(tiny.ADD, abi.parameter_operand(0), [tiny.place(0), tiny.place(1)], [abi.constant_operand(4)])
    body = tiny.graph(first, tiny.copy(tiny.place(1), tiny.place(2), abi.constant_operand(8)))
    loop, branch = abi.WhileNode([tiny.graph(first)], [body], tiny.place(2)), abi.Case([[], [body]], tiny.place(0))
    return encode_commands([loop, branch])


def test_no_changed_word_escapes_or_crashes():
    """A changed word is refused, or is one of those that may have that value: large constants."""
    words = _valid()
    limits = (1, 3, 2, 1)
    assert len(check(words, *limits)) == 3
    copy = [abi.COPY, 0, abi.constant_operand(1)]  # the kernel of a copy is not read
    unread = {i for i in range(1, len(words)) if words[i - 1 : i + 2] == copy}
    for place in sorted(set(range(len(words))) - unread):
        for value in (-1, 1 << 40, -(1 << 62)):
            bad = [*words[:place], value, *words[place + 1 :]]
            try:
                check(bad, *limits)
            except Invalid:
                continue
            assert value > 0, f"word {place} = {value} was accepted"
    for length in range(1, len(words)):
        try:
            check(words[:length], *limits)
        except Invalid:
            continue
        assert length == words[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([9, 2], "unknown node 9"),
        ([abi.GRAPH, 5, 0, 0, 2], "serial 2"),
        ([abi.GRAPH, 5, 0, 3, 0], "cells 3 to 3 of 2"),
        ([abi.WHILE, 6, 0, 1, 0, 0], "do not fill"),
        ([abi.GRAPH, 99, 0, 0, 0], "a node of 99 words"),
    ],
)
def test_command_buffers_that_are_wrong(words, message):
    with pytest.raises(Invalid, match=message):
        check(words, 1, 3, 2, 1)


def test_a_cycle_is_refused():
    graph = tiny.graph(*[tiny.copy(tiny.place(0), tiny.place(1), abi.constant_operand(8))] * 2)
    graph.commands[0].successors = [0]
    words = encode_commands([graph])
    with pytest.raises(Invalid, match="word 0: command 0 is before command 0"):
        check(words, 0, 2, 2, 0)
