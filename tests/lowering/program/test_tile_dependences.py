"""What commands wait for tile by tile, against every element that every item touches."""

from __future__ import annotations

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from support.schedules.item_accesses import accesses_of

from aotc.frontend.importer import import_model
from aotc.ir.dims.algebra import static
from aotc.ir.loop.parser import parse_kernel
from aotc.ir.program.ir import Launch, accessed_storages
from aotc.lowering.analysis.access_intervals import item_spans
from aotc.lowering.cost_model.model import Costs
from aotc.lowering.lower import lower
from aotc.lowering.program import tile_dependences as tile_edges
from aotc.lowering.program.graphs import command_sequences
from aotc.lowering.program.tile_dependences import lowest_linear_tile_edge
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.targets import resolve_targets
from aotc.vmfb.abi import TileEdge
from aotc.vmfb.commands import all_graphs, decode_commands
from aotc.vmfb.dtypes import size_of

pytestmark = pytest.mark.ir

# ---------------------------------------------------------------- bytes of items

LOOPS = {
    "rows": ("a[p, i]", "o[p, i]", "for i in range(0, 5):"),
    "window": ("a[p + i, 0]", "o[p, 0]", "for i in range(0, 3):"),
    "stride": ("a[2*p + i, 1]", "o[p, 0]", "for i in range(0, 2):"),
    "dilation": ("a[p + 2*i, 2]", "o[p, 0]", "for i in range(0, 2):"),
    "padding": ("a[max(0, min(8, p + i - 1)), 0]", "o[p, 0]", "for i in range(0, 3):"),
    "reversed": ("a[8 - p, i]", "o[p, i]", "for i in range(0, 5):"),
    "row-of-all": ("a[i, 0]", "o[p, 0]", "for i in range(0, 9):"),
    "column": ("a[i, p]", "o[p, 0]", "for i in range(0, 9):"),
    "halves": ("a[p // 2, i + 2*(p % 2)]", "o[p, i]", "for i in range(0, 2):"),
    "joined": ("a[(7*p + i) // 5, (7*p + i) % 5]", "o[p, 0]", "for i in range(0, 4):"),
    "triangle": ("a[p, i]", "o[p, i]", "for i in range(0, p + 1):"),
    "steps": ("a[p, i]", "o[p, i]", "for i in range(0, 5, 2):"),
}
ROWS = {"joined": 6, "window": 7, "stride": 4, "dilation": 7, "column": 5, "triangle": 5}


def kernel_of(name: str):
    read, written, loop = LOOPS[name]
    rows = ROWS.get(name, 9)
    return parse_kernel(f"""
def k(a: "f32[9, 5]", /, o: "f32[{rows}, 5]", *, grid: "{rows}", flops: "0", bytes: "0"):
    for p in parallel(0, {rows}):
        {loop}
            {written} = {read}
""")


def check_spans(kernel, rng, exact=False):
    """No item touches a byte outside of the interval of its block."""
    items = static(kernel.grid)
    found = accesses_of(kernel, rng)
    for step in (1, 2, 5):
        edges = [*range(0, items, step), items]
        for b, spans in enumerate(item_spans(kernel, edges)):
            size = size_of((*kernel.inputs, *kernel.outputs)[b].dtype)
            for n, (begin, end) in enumerate(pairwise(edges)):
                every = set().union(*(found[item][b] for item in range(begin, end)))
                if every:
                    assert spans.begins[n] <= min(every)
                    assert max(every) + size <= spans.ends[n]
                if exact and step == 1:
                    assert (spans.begins[n], spans.ends[n]) == (min(every), max(every) + size)


@pytest.mark.parametrize("name", LOOPS)
def test_item_spans_cover_the_accessed_bytes(name):
    check_spans(kernel_of(name), np.random.default_rng(0), exact=name != "steps")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_item_spans_of_random_indices_cover_the_accessed_bytes(data):
    """Sums, products, quotients, remainders and clamps of the item and of loop variables, in any sign."""
    some = ["p", "i", "j", "(p // 3)", "(p % 3)", "((p + i) // 2)", "((i + j) % 4)", "p*i", "min(p, j)"]
    terms = st.sampled_from(some)
    count = data.draw(st.integers(1, 3))
    index = " + ".join(f"{data.draw(st.integers(-3, 3))}*{data.draw(terms)}" for _ in range(count))
    offset = data.draw(st.integers(0, 20))
    text = f"""
def k(a: "f32[40]", /, o: "f32[12]", *, grid: "12", flops: "0", bytes: "0"):
    for p in parallel(0, 12):
        for i in range(0, {data.draw(st.integers(1, 4))}):
            for j in range(p % 2, {data.draw(st.integers(2, 5))}):
                o[p] = a[max(0, min(39, {index} + {offset}))]
"""
    check_spans(parse_kernel(text), np.random.default_rng(0))


def test_an_index_loaded_from_memory_spans_the_whole_dim():
    kernel = parse_kernel("""
def k(a: "f32[9]", n: "i32[4]", /, o: "f32[4]", *, grid: "4", flops: "0", bytes: "0"):
    for p in parallel(0, 4):
        at = n[p]
        o[p] = a[at]
""")
    values, places, _ = item_spans(kernel, [0, 1, 2, 3, 4])
    assert values.begins.tolist() == [0] * 4
    assert values.ends.tolist() == [36] * 4
    assert places.begins.tolist() == [0, 4, 8, 12]


def test_spans_beyond_64_bits_are_clamped():
    """Nothing is known of the row, and rows are long: its end times their length is cut, not wrapped around."""
    kernel = parse_kernel("""
def k(a: "f32[4, 67108864]", n: "i32[4]", /, o: "f32[4]", *, grid: "4", flops: "0", bytes: "0"):
    for p in parallel(0, 4):
        at = n[p]
        o[p] = a[at, p + at % 2]
""")
    values, _, _ = item_spans(kernel, [0, 1, 2, 3, 4])
    assert values.begins.tolist() == [0, 4, 8, 12]
    assert values.ends.tolist() == [4 * (3 * 67108864 + p + 2) for p in range(4)]


# ---------------------------------------------------------------- lines


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.integers(50, 60), st.integers(1, 3))
def test_tile_lines_are_never_below_the_required_items(need, of, step):
    need = np.maximum.accumulate(np.array(need))
    edges = [*range(0, len(need) * step, step), len(need) * step]
    tile = lowest_linear_tile_edge(3, need, [0, of], edges)
    assert tile.producer == 3
    for end in range(1, edges[-1] + 1):
        assert tile.required_items(end, edges[-1], of) >= need[(end - 1) // step]
    assert tile.required_items(edges[-1], edges[-1], of) == of


@pytest.mark.parametrize(
    ("need", "of", "expected", "halo"),
    [
        ([1, 2, 3, 4], 4, TileEdge(0, 1, 1, 0), 0),
        ([2, 3, 4, 4], 4, TileEdge(0, 1, 1, 1), 1),
        ([3, 5, 7, 8], 8, TileEdge(0, 2, 1, 1), 1),
        ([1, 1, 2, 2], 2, TileEdge(0, 1, 2, 1), 1),
        ([4, 4, 4, 4], 4, TileEdge(0, 1, 1, 3), 3),
    ],
)
def test_tile_lines_have_the_smallest_halo(need, of, expected, halo):
    tile = lowest_linear_tile_edge(0, np.array(need), list(range(of + 1)), list(range(len(need) + 1)))
    assert tile == expected
    assert tile.halo == halo


# ---------------------------------------------------------------- whole programs


def pooled(x, w):
    y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return lax.reduce_window(jnp.maximum(y, 0), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def pooled_first(x, w):
    y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW"))
    return lax.reduce_window(jnp.maximum(y, 0), -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")


def windows(stride, dilation, padding):
    def function(x, w):
        y = lax.conv_general_dilated(
            jnp.tanh(x), w, (stride, 1), padding, rhs_dilation=(dilation, 1),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )  # fmt: skip
        return lax.reduce_window(y, 0.0, lax.add, (1, 3, 1, 1), (1, stride, 1, 1), padding)

    return function


def rows(x, y):
    return jnp.cumsum(jnp.sort(jax.nn.softmax(x, -1) + y, -1), -1)


def transposed(x, y):
    return jnp.sort(jnp.sort(x, -1)[::-1] + y.mean(0), -1)


def mixed(x, y):
    z = jnp.sort(x, -1)
    return jnp.sort(z, -1) + jnp.sort(z[:, ::-1], -1), y @ z.T


PROGRAMS = {
    "pooled": (pooled, [(1, 10, 8, 4), (3, 3, 4, 16)]),
    "pooled_first": (pooled_first, [(1, 4, 10, 8), (16, 4, 3, 3)]),
    **{f"windows-{s}-{d}-{p}": (windows(s, d, p), [(2, 11, 4, 3), (3, 1, 3, 5)])
       for s, d, p in [(1, 1, "SAME"), (2, 1, "VALID"), (1, 2, "SAME"), (2, 2, "SAME")]},
    "rows": (rows, [(13, 6), (13, 6)]),
    "turned": (transposed, [(9, 6), (9, 6)]),
    "mixed": (mixed, [(8, 7), (5, 7)]),
}  # fmt: skip


def scheduled(function, shapes, monkeypatch, level=2):
    """Return a program's graphs, the commands and their steps: whatever can wait for tiles does."""
    monkeypatch.setattr(tile_edges, "tile_edge_pays", lambda *_: True)
    monkeypatch.setattr(tile_edges, "begins_before_earlier_ends", lambda *_: True)
    monkeypatch.setattr(Costs, "is_serial", lambda *_: False)
    options = Options(target="cpu:x86-64-v4", opt_level=level, verify_each=True)
    types = [jax.ShapeDtypeStruct(s, "float32") for s in shapes]
    (target,) = resolve_targets(options.target)
    module = run_passes(import_model(jax.jit(function).lower(*types).as_text()), options)
    variant = lower(module, target, options)
    (buffer,) = variant.command_buffers
    runs = list(command_sequences(variant.steps["main"].steps))
    found = list(all_graphs(decode_commands(buffer.code)))
    for graph, order, run in zip(found, buffer.orders, runs, strict=True):
        yield graph, [run[n] for n in order]


def bytes_of(step, rng):
    """Return for each item the bytes that it reads and those that it writes, by memory."""
    reads, writes = accessed_storages(step)
    result = []
    for item in accesses_of(step.kernel, rng):
        sets = (set(), set())
        for n, s in enumerate((*reads, *writes)):
            at = s.offset if s.kind == "arena" else 0
            where = (s.kind, 0 if s.kind == "arena" else s.number)
            if s.kind != "constant":
                sets[n >= len(reads)].update((where, at + byte) for byte in item[n])
        result.append(sets)
    return result


def check_order(graph, steps, rng):
    """Every item comes after all earlier commands' items that touch the same bytes, one of them writing."""
    known = [bytes_of(s, rng) for s in steps]
    before, after = [set() for _ in steps], [set() for _ in steps]
    for n, command in enumerate(graph.commands):
        after[n] |= before[n] | {n}
        for t in command.tiles:
            before[n] |= before[t.producer]
            after[n] |= after[t.producer] | before[n]
        for s in command.successors:
            before[s] |= after[n]
    for n, command in enumerate(graph.commands):
        for m in range(n):
            lines = [t for t in command.tiles if t.producer == m]
            for i, (reads, writes) in enumerate(known[n]):
                for j, (earlier_reads, earlier_writes) in enumerate(known[m]):
                    if earlier_writes & (reads | writes) or earlier_reads & writes:
                        done = [t.required_items(i + 1, len(known[n]), len(known[m])) > j for t in lines]
                        assert m in before[n] or any(done), f"item {i} of {n} may come before item {j} of {m}"


@pytest.mark.parametrize("level", [0, 2])
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_order_allowed_by_the_edges_respects_all_dependences(name, level, monkeypatch):
    function, shapes = PROGRAMS[name]
    tiles = 0
    for graph, steps in scheduled(function, shapes, monkeypatch, level):
        assert all(isinstance(s, Launch) for s in steps)
        check_order(graph, steps, np.random.default_rng(0))
        tiles += sum(len(c.tiles) for c in graph.commands)
    assert tiles
