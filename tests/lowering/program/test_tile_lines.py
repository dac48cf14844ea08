"""Tile edges for sizes that only a call knows, against every element that every item touches with some sizes."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.schedules.item_accesses import accesses_of

from aotc.diagnostics import UNKNOWN
from aotc.ir.loop.parser import parse_kernel
from aotc.ir.program.ir import Launch, Storage
from aotc.lowering.cost_model.model import Costs
from aotc.lowering.program import tile_dependences as tile_edges
from aotc.lowering.program.tile_dependences import TileEdges, covers_accesses
from aotc.targets import resolve_targets
from aotc.vmfb.abi import FEW_ITEMS, TileEdge

pytestmark = pytest.mark.ir
SIZES = [(n, m) for n in (1, 2, 5, 9) for m in (1, 2, 3)]

# Items of the producer, rows of the array, what an item writes; the same of what another kernel reads.
ROWS = ("n", "for i in range(0, m):", "b[p, i]")
PAIRS = ("n*2", "for i in range(0, m):", "b[(p // 2), i]")
BLOCKS = ("(n + 3) // 4", "for r in range(4*p, min(4*p + 4, n)):\n            for i in range(0, m):", "b[r, i]")
READS = {
    "rows": ROWS,
    "halves": PAIRS,
    "blocks": BLOCKS,
    "window": ("n", "for w in range(0, 3):\n            for i in range(0, m):", "b[max(0, min(n - 1, p + w - 1)), i]"),
    "stride": ("n // 2", "for w in range(0, 2):\n            for i in range(0, m):", "b[2*p + w, i]"),
    "row-below": ("n", "for i in range(0, m):", "b[min(n - 1, p + 1), i]"),
    "several": ("n*3", "for i in range(0, m):", "b[(p // 3), (i + p % 3) % m]"),
}
NEVER = {
    "reversed": ("n", "for i in range(0, m):", "b[n - 1 - p, i]"),
    "all": ("n", "for r in range(0, n):\n            for i in range(0, m):", "b[r, i]"),
    "column": ("m", "for r in range(0, n):", "b[r, p]"),
    "far": ("n", "for i in range(0, m):", "b[min(n - 1, p + m), i]"),
}

HALF = "((m + 1) // 2)"


def cut(row, ends=None):
    """Rows in parts of two elements, as many parts as a call knows; ``ROW`` is the row of an item."""
    element = f"b[{row.replace('ROW', f'(p // {HALF})')}, i]"
    begin, end = ends or (f"2*(p % {HALF})", f"min(2*(p % {HALF}) + 2, m)")
    return f"n*{HALF}", f"for i in range({begin}, {end}):", element


PARTS = {
    "parts-of-rows": (ROWS, cut("ROW"), 0),
    "firsts-of-rows": (ROWS, cut("ROW", (0, 1)), 0),
    "rows-below": (ROWS, cut("min(n - 1, ROW + 1)"), 1),
    "rows-around": (ROWS, cut("max(0, min(n - 1, ROW + p % 2 - 1))"), 0),
    "rows-of-parts": (cut("ROW"), ROWS, 0),
}
NEVER_PARTS = {
    "rows-below-of-parts": (cut("ROW"), READS["row-below"]),
    "parts-of-parts": (cut("ROW"), cut("ROW")),
    "reversed": (ROWS, cut("n - 1 - ROW")),
    "halves": (PAIRS, cut("ROW")),
}


def text_of(writes, grid, loop, element, sizes=None):
    """The text of a kernel that writes ``b`` or reads it, for given sizes if there are some."""
    arrays = 'o: "f32[n, m]"' if writes else 'b: "f32[n, m]", /, o: "f32[n, m]"'
    store = f"{element.replace('b[', 'o[')} = f32(1.0)" if writes else f"o[0, 0] = {element}"
    dims = "" if sizes else 'n: "dim", m: "dim", '
    text = f"""
def k({arrays}, *, {dims}grid: "{grid}", flops: "0", bytes: "0"):
    for p in parallel(0, {grid}):
        {loop}
            {"    " if chr(10) in loop else ""}{store}
"""
    for name, size in zip("nm", sizes or ()):
        text = re.sub(rf"\b{name}\b", str(size), text)
    return text


def edge(writer, reader, monkeypatch):
    """Two commands of unknown sizes, and the tiles for which the second waits."""
    monkeypatch.setattr(tile_edges, "begins_before_earlier_ends", lambda *_: True)
    array, result = Storage("result", 0, 0), Storage("result", 0, 1)
    earlier = Launch(parse_kernel(text_of(True, *writer)), (), (array,), UNKNOWN)
    later = Launch(parse_kernel(text_of(False, *reader)), (array,), (result,), UNKNOWN)
    (target,) = resolve_targets("cpu:x86-64-v3")
    return earlier, later, TileEdges(Costs(target)).tile_edge(earlier, later, 0)


def check(tile, writer, reader, sizes):
    """Every item waits for all that write what it reads, whatever the analysis thinks that this is."""
    rng = np.random.default_rng(0)
    made = [item[0] for item in accesses_of(parse_kernel(text_of(True, *writer, sizes)), rng)]
    read = [item[0] for item in accesses_of(parse_kernel(text_of(False, *reader, sizes)), rng)]
    for n, mine in enumerate(read):
        for other, its in enumerate(made):
            assert not mine & its or tile.required_items(n + 1, len(read), len(made)) > other, (sizes, n, other)


@pytest.mark.parametrize("writer", [ROWS, PAIRS, BLOCKS], ids=["rows", "halves", "blocks"])
@pytest.mark.parametrize("name", READS)
def test_one_tile_line_covers_the_accesses_for_all_sizes(name, writer, monkeypatch):
    earlier, later, tile = edge(writer, READS[name], monkeypatch)
    assert tile is not None
    for n, m in SIZES:
        check(tile, writer, READS[name], (n, m))
        assert covers_accesses(tile, earlier, later, {"n": n, "m": m})


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_rows_wait_for_the_same_fraction_of_items(name, monkeypatch):
    """However many parts a row has: no constants are right, and the numbers of items are known when the call runs."""
    writer, reader, halo = PARTS[name]
    earlier, later, tile = edge(writer, reader, monkeypatch)
    assert tile == TileEdge(0, 1, 0, halo)
    for n, m in (*SIZES, (3, 9), (7, 8)):
        check(tile, writer, reader, (n, m))
        assert covers_accesses(tile, earlier, later, {"n": n, "m": m})


@pytest.mark.parametrize("name", NEVER_PARTS)
def test_parts_without_a_line_wait_for_the_whole_command(name, monkeypatch):
    assert edge(*NEVER_PARTS[name], monkeypatch)[2] is None


def test_tile_lines_of_many_items_cover_each_item(monkeypatch):
    """Of blocks of items they would be too low."""
    earlier, later, tile = edge(ROWS, READS["window"], monkeypatch)
    assert covers_accesses(tile, earlier, later, {"n": 3000, "m": 2})
    assert not covers_accesses(TileEdge(0, 1, 1, 0), earlier, later, {"n": 3000, "m": 2})


def test_required_items_avoid_overflow_for_many_items():
    part = TileEdge(0, 1, 0, 2)
    assert [part.required_items(end, 12, 4) for end in (1, 3, 4, 7, 12)] == [3, 3, 4, 4, 4]
    assert part.required_items(1, FEW_ITEMS - 1, 1000) == 3
    assert part.required_items(1, FEW_ITEMS, 1000) == 1000
    assert part.required_items(1, 1000, FEW_ITEMS) == FEW_ITEMS


@pytest.mark.parametrize("name", NEVER)
def test_accesses_without_a_line_wait_for_the_whole_command(name, monkeypatch):
    assert edge(ROWS, NEVER[name], monkeypatch)[2] is None


@pytest.mark.parametrize(
    ("writer", "name", "expected"),
    [
        (ROWS, "rows", TileEdge(0, 1, 1, 0)),
        (ROWS, "window", TileEdge(0, 1, 1, 1)),
        (ROWS, "stride", TileEdge(0, 2, 1, 0)),
        (PAIRS, "rows", TileEdge(0, 2, 1, 0)),
        (ROWS, "several", TileEdge(0, 1, 3, 2)),
    ],
)
def test_the_tile_line_is_the_tightest(writer, name, expected, monkeypatch):
    assert edge(writer, READS[name], monkeypatch)[2] == expected


def test_covers_accesses_rejects_a_line_that_is_too_low(monkeypatch):
    earlier, later, _ = edge(ROWS, READS["window"], monkeypatch)
    assert not covers_accesses(TileEdge(0, 1, 1, 0), earlier, later, {"n": 9, "m": 2})
    assert covers_accesses(TileEdge(0, 1, 1, 0), earlier, later, {"n": 0, "m": 2})


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_tile_lines_of_random_indices_cover_the_accesses(data):
    """Where there is a line it is right, with windows, strides and clamps of any kind."""
    terms = ["p", "i", "2*p", "(p // 2)", "(p % 2)", "((p + i) // 2)", "(n - p)", "min(p, i)", "max(p, 2)", "m"]
    some = data.draw(st.lists(st.sampled_from(terms), min_size=1, max_size=3))
    row = f"b[max(0, min(n - 1, {' + '.join(some)} + {data.draw(st.integers(-3, 3))})), 0]"
    reader = ("n", f"for i in range(0, {data.draw(st.sampled_from(['2', 'm', 'p + 1']))}):", row.replace("+ -", "- "))
    with pytest.MonkeyPatch.context() as patch:
        tile = edge(ROWS, reader, patch)[2]
    if tile is not None:
        for sizes in SIZES:
            check(tile, ROWS, reader, sizes)
