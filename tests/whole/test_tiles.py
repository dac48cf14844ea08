"""Programs whose commands wait for tiles: the same numbers with any number of threads, and an early end."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.differential import close
from support.schedules.trials import Watched, trial
from typer.testing import CliRunner

import aotc
from aotc.lowering.cost_model.model import Costs
from aotc.lowering.program import tile_dependences as tile_edges
from aotc.tools.explain.schedule import explain_schedule
from aotc.vmfb.abi import EXECUTOR_VERSION
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.commands import all_graphs
from aotc.vmfb.describe import describe_bundle
from aotc.vmfb.errors import BundleError
from aotc.vmfb.verify import buffers
from aotc.vmfb.verify.buffers import load_command_buffers
from aotc_cli.main import app

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("bundles_anew")]
PATIENCE = 60


def pooled(x, w, v):
    for weights in (w, v):
        x = lax.conv_general_dilated(x, weights, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = lax.reduce_window(jnp.maximum(x, 0), -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    return x


def pooled_first(x, w, v):
    """The same with channels first, in and out."""
    for weights in (w, v):
        x = lax.conv_general_dilated(x, weights, (1, 1), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW"))
        x = lax.reduce_window(jnp.maximum(x, 0), -jnp.inf, lax.max, (1, 1, 3, 3), (1, 1, 2, 2), "SAME")
    return x


def rows(x, scale):
    y = jax.nn.softmax(x, -1)
    y = (y - y.mean(-1, keepdims=True)) / jnp.sqrt(y.var(-1, keepdims=True) + 1e-5) * scale
    return jax.nn.gelu(y)


def sorts(x, a):
    for _ in range(3):
        x = jnp.sort(jnp.tanh(x) * a, -1)
    return x


def looped(x, a):
    return lax.fori_loop(0, 5, lambda _, y: sorts(y, a), x)


PROGRAMS = {
    "pooled": (pooled, [(2, 40, 36, 3), (3, 3, 3, 8), (3, 3, 8, 8)]),
    "pooled_first": (pooled_first, [(2, 3, 40, 36), (16, 3, 3, 3), (16, 16, 3, 3)]),
    "rows": (rows, [(13, 70_000), (70_000,)]),
    "sorts": (sorts, [(700, 96), (96,)]),
    "looped": (looped, [(300, 96), (96,)]),
}


@pytest.fixture
def everywhere(monkeypatch):
    """Whatever can wait for tiles does."""
    monkeypatch.setattr(tile_edges, "tile_edge_pays", lambda *_: True)
    monkeypatch.setattr(Costs, "is_serial", lambda *_: False)


def compiled(name):
    """A bundle, arguments, and what XLA makes of them."""
    function, shapes = PROGRAMS[name]
    rng = np.random.default_rng(0)
    arguments = [rng.standard_normal(s).astype(np.float32) / 4 for s in shapes]
    return aotc.compile(function, *arguments, verify_each=True), arguments, jax.jit(function)(*arguments)


def edges(data):
    """The tiles of a bundle's first variant."""
    opened = open_bundle(data)
    nodes = load_command_buffers(opened, opened.manifest["variants"][0]).nodes
    return [t for some in nodes for graph in all_graphs(some) for c in graph.commands for t in c.tiles]


@pytest.mark.parametrize("name", PROGRAMS)
def test_tile_edges_give_the_same_results_at_any_thread_count(name, everywhere, monkeypatch):
    data, arguments, expected = compiled(name)
    assert edges(data)
    monkeypatch.setattr(tile_edges, "tile_edge_pays", lambda *_: False)
    whole, _, _ = compiled(name)
    assert not edges(whole)
    (want,) = aotc.load(whole, threads=1).invoke("main", *arguments)
    close([want], [expected], factor=40)
    for threads in (1, 2, 8):
        module = aotc.load(data, threads=threads)
        for _ in range(10):
            (got,) = module.invoke("main", *arguments)
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_a_call_is_cancelled_between_tiles(threads, everywhere):
    data, (x, a), _ = compiled("looped")
    endless = aotc.compile(lambda x, a: lax.while_loop(lambda y: y[0, 0] < 9, lambda y: sorts(y, a), x), x, a)
    assert edges(endless)
    module = aotc.load(endless, threads=threads)
    for deadline in (0.01, 0.03, 0.1):
        fence = module.submit("main", x, a, deadline=deadline)
        assert isinstance(fence.exception(PATIENCE), aotc.DeadlineExceeded)
    other = aotc.load(data, threads=threads)
    first, second = (other.invoke("main", x, a)[0] for _ in range(2))
    np.testing.assert_array_equal(first, second)


def of_any_size(function, *types):
    """A model without JAX's assertions, which demand one row."""
    lines = jax.export.export(jax.jit(function))(*types).mlir_module().splitlines()
    return "\n".join(line for line in lines if "@shape_assertion" not in line).encode()


@pytest.mark.parametrize("name", ["pooled", "pooled_first", "rows", "sorts"])
def test_tile_edges_of_symbolic_sizes_give_the_same_results(name, everywhere, monkeypatch):
    """One line is right for all of them; how many items there are is known when the call runs."""
    function, shapes = PROGRAMS[name]
    (n,) = jax.export.symbolic_shape("n")
    types = [jax.ShapeDtypeStruct(s, "float32") for s in ((n, *shapes[0][1:]), *shapes[1:])]
    text = of_any_size(function, *types)
    data = aotc.compile(text, verify_each=True)
    assert edges(data)
    monkeypatch.setattr(tile_edges, "tile_edge_pays", lambda *_: False)
    whole = aotc.load(aotc.compile(text), threads=1)
    modules = [aotc.load(data, threads=threads) for threads in (1, 2, 8)]
    rng = np.random.default_rng(0)
    for count in (shapes[0][0], 0, 1, 2, 3 * shapes[0][0] + 1):
        arguments = [rng.standard_normal(s).astype(np.float32) / 4 for s in ((count, *shapes[0][1:]), *shapes[1:])]
        (want,) = whole.invoke("main", *arguments)
        for module in modules:
            for _ in range(3):
                (got,) = module.invoke("main", *arguments)
                np.testing.assert_array_equal(got, want)


@pytest.fixture
def of_any_length(everywhere, monkeypatch):
    """A softmax of rows whose length only the call knows: parts of rows wait for the rows before them."""
    monkeypatch.setattr(tile_edges, "begins_before_earlier_ends", lambda *_: True)
    shape = jax.export.symbolic_shape("n, m", constraints=["m >= 1"])
    text = of_any_size(jax.nn.softmax, jax.ShapeDtypeStruct(shape, "float32"))
    return lambda: aotc.compile(text, verify_each=True)


def test_tile_edges_of_symbolic_row_lengths_give_the_same_results(of_any_length, monkeypatch):
    data = of_any_length()
    assert {(t.over, t.halo) for t in edges(data)} == {(0, 0)}
    monkeypatch.setattr(tile_edges, "tile_edge_pays", lambda *_: False)
    whole = aotc.load(of_any_length(), threads=1)
    modules = [aotc.load(data, threads=threads) for threads in (1, 2, 8)]
    rng = np.random.default_rng(0)
    for shape in ((1, 1), (0, 9), (3, 9000), (13, 20_000), (700, 5), (1, 100_000), (64, 4097)):
        x = rng.standard_normal(shape).astype(np.float32)
        (want,) = whole.invoke("main", x)
        close([want], [jax.nn.softmax(x)], factor=40)
        for module in modules:
            for _ in range(3):
                np.testing.assert_array_equal(module.invoke("main", x)[0], want)


def test_an_executor_without_support_for_item_parts_is_refused(of_any_length, monkeypatch):
    data = of_any_length()
    monkeypatch.setattr(buffers, "PARTS_SINCE", EXECUTOR_VERSION + 1)
    with pytest.raises(BundleError, match=f"only executors of version {EXECUTOR_VERSION + 1} and later know parts"):
        aotc.load(data)


def test_inspect_explain_and_traces_show_tile_edges(everywhere, tmp_path):
    """What inspect, explain and traces say of them is what the executor reads."""
    data, arguments, _ = compiled("pooled")
    wanted = sorted((t.times, t.over, t.halo) for t in edges(data))
    opened = open_bundle(data)
    (variant,) = describe_bundle(opened, 0)["variants"]
    assert sorted((t["times"], t["over"], t["halo"]) for t in variant["tiles"]) == wanted
    bundle = tmp_path / "model.vmfb"
    bundle.write_bytes(data)
    said = CliRunner().invoke(app, ["inspect", str(bundle), "--all"]).output
    assert said.count("waits for tiles of") == len(wanted)
    report = explain_schedule(opened)
    assert sorted(halo for row in report.rows for halo in row.halos.values()) == sorted(h for _, _, h in wanted)
    assert report.picture.count("by tiles of") == len(wanted)
    module = aotc.load(data)
    module.invoke("main", *arguments, trace=tmp_path / "trace")
    files = [dict(np.load(f)) for f in sorted((tmp_path / "trace").glob("*.npz"))]
    traced = [(n, *row) for n, f in enumerate(files) for row in f.get("tiles", np.zeros((0, 4))).tolist()]
    assert sorted(tuple(row[2:]) for row in traced) == wanted
    assert all(producer < n for n, producer, *_ in traced)


def test_only_long_rows_get_tile_edges():
    """As the compiler chooses."""
    function, _ = PROGRAMS["rows"]
    large = aotc.compile(function, np.ones((64, 70_000), np.float32), np.ones(70_000, np.float32))
    report = explain_schedule(open_bundle(large))
    assert [row.halos for row in report.rows if row.halos]
    assert all(set(row.halos) <= set(row.after) for row in report.rows)
    for name in ("sorts", "looped"):
        assert not edges(compiled(name)[0])


LAYOUTS = {"first": ("NCHW", "OIHW", "NCHW"), "last": ("NHWC", "HWIO", "NHWC")}


def pooling(layout, kind):
    """A convolution with its activation, and a pooling, with channels first or last; and types of arguments."""

    def function(x, w):
        y = jnp.maximum(lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=LAYOUTS[layout]), 0)
        window = [2 if axis in "HW" else 1 for axis in LAYOUTS[layout][0]]
        init, combine = (-jnp.inf, lax.max) if kind == "max" else (0.0, lax.add)
        return lax.reduce_window(y, init, combine, window, window, "VALID")

    shapes = {"first": ((1, 16, 224, 224), (32, 16, 3, 3)), "last": ((1, 224, 224, 16), (3, 3, 16, 32))}
    return function, [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes[layout]]


@pytest.mark.parametrize("kind", ["max", "avg"])
def test_windows_wait_for_rows_of_their_convolution_in_both_layouts(kind):
    """As the compiler chooses: a window needs the two rows under it, and one more item is a row of the halo at most."""
    halos = []
    for layout in LAYOUTS:
        function, types = pooling(layout, kind)
        report = explain_schedule(open_bundle(aotc.compile(function, *types, target="cpu:x86-64-v4")))
        (convolution,) = [row.number for row in report.rows if "conv" in row.kernel]
        (windows,) = [row for row in report.rows if "window" in row.kernel]
        halos.append(windows.halos[convolution])
    assert halos[0] == halos[1] <= 3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_windows_start_before_their_convolution_ends(layout, monkeypatch):
    """What a trace says of who claimed what when: a thread takes windows as soon as their rows are done."""
    monkeypatch.setattr(tile_edges, "tile_edge_pays", lambda *_: True)
    function, types = pooling(layout, "max")
    arguments = [np.random.default_rng(0).standard_normal(t.shape).astype(np.float32) for t in types]
    watched = Watched(aotc.compile(function, *types), 1).calls(arguments)
    names = [kernel["name"] for kernel in watched.executable._variant["kernels"]]
    (graph,) = watched.graphs(tiled=True)
    named = {at: names[command.kernel] for at, (command, *_) in graph.items()}
    with trial(1 << 14) as traced:
        (got,) = watched.module.invoke("main", *arguments)
        claims = traced.claims()
    close([got], [jax.jit(function)(*arguments)], factor=40)
    ended = max(c.ended for c in claims if "conv" in named[c.command])
    windows = [c.began for c in claims if "window" in named[c.command]]
    assert sum(began < ended for began in windows) > len(windows) // 2


def test_inspect_and_explain_show_item_parts(of_any_length, tmp_path):
    bundle = tmp_path / "model.vmfb"
    bundle.write_bytes(of_any_length())
    said = CliRunner().invoke(app, ["inspect", "--all", str(bundle)]).output
    assert "for each part of its items the same part, and a halo of 0" in " ".join(said.split())
    halos = [row.halos for row in explain_schedule(open_bundle(bundle), sizes={"n": 8, "m": 9000}).rows]
    assert halos == [{}, {0: 0}]


def test_an_executor_without_support_for_tiles_is_refused(everywhere, monkeypatch):
    data, _, _ = compiled("sorts")
    monkeypatch.setattr(buffers, "TILES_SINCE", EXECUTOR_VERSION + 1)
    with pytest.raises(BundleError, match=f"only executors of version {EXECUTOR_VERSION + 1} and later know tiles"):
        aotc.load(data)
