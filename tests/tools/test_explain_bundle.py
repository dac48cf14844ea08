"""``aotc explain schedule`` and ``memory``: what a bundle's own words say, as rows and pictures."""

import json
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from typer.testing import CliRunner
from whole.test_overlap import random_function

import aotc
from aotc.tools.explain.memory import explain_memory
from aotc.tools.explain.schedule import explain_schedule
from aotc.tools.flow import arena_places, flow_of
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.errors import ArgumentValueError, BundleError
from aotc_cli.main import app

pytestmark = pytest.mark.cpu
X = np.linspace(-1, 1, 64 * 64, dtype=np.float32).reshape(64, 64)
LARGE = 64 * 64 * 4


def opened(function, *arguments, **flags):
    """The bundle of a function, opened."""
    return open_bundle(aotc.compile(function, *arguments, **flags))


def branches(x):
    """A product that two others wait for, and their sum."""
    y = jnp.tanh(x @ x)
    return jnp.sort(y @ x, 1) + jnp.sort(y @ x.T, 0)


def test_explained_commands_wait_for_their_operands():
    flow = flow_of(opened(branches, X))
    writers = {}
    for step in flow.steps:
        for slot, begin, end in step.reads:
            for (other, first, last), number in list(writers.items()):
                if other == slot and first < end and begin < last:
                    reach, stack = set(), [step.number]
                    while stack:
                        at = stack.pop()
                        reach |= set(flow.steps[at].after)
                        stack += flow.steps[at].after
                    assert number in reach
        writers |= dict.fromkeys(step.writes, step.number)
    assert len(flow.steps) >= 5


def test_the_critical_path_is_marked():
    report = explain_schedule(opened(branches, X))
    by_number = {row.number: row for row in report.rows}
    for row in report.rows:
        ends = [by_number[n].begin + by_number[n].ns for n in row.after]
        assert row.begin == max(ends, default=0.0)
        assert row.bound in ("compute", "memory", "overhead")
    assert report.path == max(row.begin + row.ns for row in report.rows)
    assert report.work == sum(row.ns for row in report.rows)
    assert any(row.critical for row in report.rows)
    last = max(report.rows, key=lambda row: row.begin + row.ns)
    assert last.critical
    assert "test_explain_bundle.py" in report.rows[0].loc


@pytest.mark.usefixtures("no_unrolling")
def test_loops_and_branches_are_named():
    def function(x, n):
        y = lax.fori_loop(0, n, lambda i, c: jnp.tanh(c @ x), x)
        return lax.cond(n > 2, lambda v: v @ x, lambda v: jnp.sort(v, 1), y)

    rows = explain_schedule(opened(function, X, np.int32(2))).rows
    within = {row.within for row in rows}
    assert "loop 0" in within
    assert {"branch 1.0", "branch 1.1"} <= within
    graphs = [row.graph for row in rows]
    assert graphs == sorted(graphs)


@pytest.mark.usefixtures("no_unrolling")
@pytest.mark.parametrize(("iterations", "shown", "runs"), [(3, "3", 3), (1000, "1,000", 1000), (None, "~16", 16)])
def test_work_in_a_loop_is_multiplied_by_its_trip_count(iterations, shown, runs, tmp_path):
    """Where that is not known it is a guess, and said to be one."""

    def function(x, n):
        last = n if iterations is None else iterations
        return lax.fori_loop(0, last, lambda i, c: lax.fori_loop(0, 2, lambda j, d: jnp.tanh(d @ x), c) @ x, x)

    path = tmp_path / "loops.vmfb"
    path.write_bytes(aotc.compile(function, X, np.int32(2)))
    report = explain_schedule(open_bundle(path))
    products = {row.within: row for row in report.rows if "matmul" in row.kernel}
    assert [(row.runs, row.guessed) for row in products.values()] == [
        (2 * runs, iterations is None),
        (runs, iterations is None),
    ]
    assert report.work == pytest.approx(sum(row.ns * row.runs for row in report.rows))
    assert runs * sum(row.ns for row in report.rows if row.within) < report.path <= report.work
    result = CliRunner().invoke(app, ["explain", "schedule", str(path)])
    assert result.exit_code == 0
    assert f" {shown} " in result.output


def test_sizes_are_set_or_assumed():
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, 8"), np.float32)
    bundle = opened(jax.export.export(jax.jit(lambda x: jnp.sort(x @ x.T, 1)))(shape))
    small, large = (explain_schedule(bundle, sizes=sizes) for sizes in ({}, {"n": 500}))
    assert [dict(row.sizes) for row in small.rows] == [{"n": 16}] * len(small.rows)
    assert large.work > small.work
    assert "f32[500, 500]" in {row.type for row in explain_memory(bundle, sizes={"n": 500}).rows}
    assert explain_memory(bundle, sizes={"n": 500}).arena >= 500 * 500 * 4


def test_sizes_read_from_memory_are_assumed():
    def function(x, mask):
        return jnp.sort(jnp.where(mask, x, 0)) * 2

    text = """func.func public @main(%x: tensor<8xf32>, %n: tensor<i32>) -> tensor<?xf32> {
      %one = stablehlo.constant dense<1> : tensor<i32>
      %m = stablehlo.add %n, %one : tensor<i32>
      %s = stablehlo.reshape %m : (tensor<i32>) -> tensor<1xi32>
      %0 = stablehlo.dynamic_iota %s, dim = 0 : (tensor<1xi32>) -> tensor<?xf32>
      return %0 : tensor<?xf32> }"""
    assert explain_schedule(open_bundle(aotc.compile(text))).rows
    assert explain_schedule(opened(function, X[0], X[0] > 0)).rows


def test_values_live_from_their_producer_to_their_last_reader():
    def function(x):
        return jnp.sort(jnp.sort(jnp.sort(x, 1), 0) @ x, 1)

    report = explain_memory(opened(function, X))
    assert [row.type for row in report.rows] == ["f32[64, 64]"] * 3
    for before, after in zip(report.rows, report.rows[1:]):
        assert before.last == after.first
        assert after.producer in before.read_by
        assert not (before.offset < after.end and after.offset < before.end)
    assert report.peak == 2 * LARGE == report.arena
    assert {row.type for row in report.at_peak} == {"f32[64, 64]"}


def swapping(x, n):
    """A loop that is unrolled by two: a branch in its body either copies the states or computes them again."""
    y = lax.fori_loop(0, n, lambda i, c: (jnp.sort(c[1], 0), c[0] @ x), (x, x + 1))
    return y[0] @ y[1]


def one_side_writes_over_what_the_other_reads(x, n):
    y = jnp.sort(x, 0)
    return jnp.sort(lax.cond(n > 0, lambda: jnp.sort(jnp.sort(y, 1) @ x, 0) @ x, lambda: y @ jnp.sort(x @ x, 1)), 0)


def an_empty_side(x, n):
    y = jnp.sort(x, 0)
    return lax.fori_loop(0, n, lambda i, c: lax.cond(c[0, 0] > i, lambda: jnp.sort(c, 0) @ c, lambda: c), y) @ x


BRANCHES = {f.__name__: f for f in (swapping, one_side_writes_over_what_the_other_reads, an_empty_side)}
BRANCHES |= {f"random {seed}": lambda x, n, seed=seed: random_function(seed)(x * n, x)[-1] for seed in range(6)}


@pytest.mark.parametrize("name", BRANCHES)
def test_values_alive_at_the_same_time_do_not_overlap(name):
    """What one side of a branch left in memory that the other uses too seemed to be alive in that and after it."""
    bundle = opened(BRANCHES[name], X, np.int32(2))
    report, flow = explain_memory(bundle), flow_of(bundle)
    for n, a in enumerate(report.rows):
        assert a.first <= a.last
        for b in report.rows[:n]:
            together = a.first <= b.last and b.first <= a.last and a.first != b.last and b.first != a.last
            shared = a.offset < b.end and b.offset < a.end
            assert not (together and shared), (a, b)
    for step in flow.steps:
        read = [place for place, written, _ in arena_places(flow, step) if not written]
        alive = [(row.offset, row.end) for row in report.rows if row.first <= step.number <= row.last]
        for _, begin, end in read:
            assert any(low <= begin and end <= high for low, high in alive), step
    assert report.peak <= report.arena


def test_loop_states_live_during_the_whole_loop():
    def function(x, n):
        return lax.fori_loop(0, n, lambda i, c: jnp.sort(c, 0) @ x, x)[0]

    bundle = opened(function, X, np.int32(2))
    flow, report = flow_of(bundle), explain_memory(bundle)
    (loop,) = flow.loops
    carried = [row for row in report.rows if row.first < loop.begin <= row.last]
    assert carried
    for row in carried:
        places = [r for r in report.rows if r.offset < row.end and row.offset < r.end]
        assert all(any(r.first <= t <= r.last for r in places) for t in range(loop.begin, loop.end))


def test_explain_memory_reports_scratch_memory():
    report = explain_memory(opened(lambda x: jnp.sort(x), X.reshape(-1)))
    assert report.scratch >= X.nbytes


def test_pictures_are_svg():
    for report in (explain_schedule(opened(branches, X)), explain_memory(opened(branches, X))):
        root = ElementTree.fromstring(report.picture)
        assert root.tag.endswith("svg")
        boxes = [e for e in root if e.tag.endswith("rect")]
        assert len(boxes) == len(report.rows)
        width, height = (float(root.attrib[name]) for name in ("width", "height"))
        for box in boxes:
            assert 0 <= float(box.attrib["x"]) <= float(box.attrib["x"]) + float(box.attrib["width"]) <= width + 1
            assert 0 <= float(box.attrib["y"]) <= float(box.attrib["y"]) + float(box.attrib["height"]) <= height


def test_a_bundle_without_text_has_memory_but_no_times():
    bundle = opened(branches, X, debug_info=False)
    with pytest.raises(BundleError, match="no kernel text"):
        explain_schedule(bundle)
    assert explain_memory(bundle).peak == explain_memory(opened(branches, X)).peak


def test_errors_list_the_existing_functions():
    with pytest.raises(ArgumentValueError, match="no function 'other'"):
        explain_memory(opened(branches, X), "other")


def test_a_gpu_bundle_is_explained_without_a_gpu():
    bundle = opened(lambda x: jax.nn.softmax(x @ x, 1), X, target="cuda:sm_90")
    report = explain_schedule(bundle)
    assert report.target == "cuda:sm_90a"
    assert all(row.predicted > 0 for row in report.rows)
    assert explain_memory(bundle).rows


# ---------------------------------------------------------------- the commands


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model and its bundle."""
    folder = tmp_path_factory.mktemp("explain")
    (folder / "m.vmfb").write_bytes(aotc.compile(branches, X))
    (folder / "m.mlir").write_text(jax.jit(branches).lower(X).as_text())
    return folder


def invoke(*words):
    """The output of a command that ends well."""
    done = CliRunner().invoke(app, list(map(str, words)))
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("model", ["m.vmfb", "m.mlir"])
def test_explain_accepts_models_and_bundles(files, model):
    schedule = json.loads(invoke("explain", "schedule", files / model, "--json"))
    memory = json.loads(invoke("explain", "memory", files / model, "--json"))
    assert {row["kernel"] for row in schedule["rows"]} >= {row["producer"] for row in memory["rows"]}
    assert "picture" not in schedule
    text = invoke("explain", "schedule", files / model)
    assert "on one core, critical path" in " ".join(text.split())
    assert "alive at step" in invoke("explain", "memory", files / model)


def test_explain_writes_pictures(files):
    for subject in ("schedule", "memory"):
        invoke("explain", subject, files / "m.vmfb", "--picture", files / f"{subject}.svg")
        ElementTree.parse(files / f"{subject}.svg")


def test_a_stored_profile_is_used_by_explain_and_compile(files, tmp_path):
    record, kept, tuned = tmp_path / "r.json", tmp_path / "kept.vmfb", tmp_path / "tuned.vmfb"
    assert "on one core of" in invoke("profile", files / "m.vmfb", "--repeat=1", "-o", record)
    invoke("profile", files / "m.vmfb", "--repeat=1", "-q", "-o", kept)
    assert "measured on" in invoke("explain", "schedule", kept)
    assert "measured on" not in invoke("explain", "schedule", files / "m.vmfb")
    invoke("profile", kept, "--repeat=1", "--apply", "-o", tuned)
    assert "measured on" in invoke("explain", "schedule", tuned)
    want = aotc.load(files / "m.vmfb")(X)
    for path in (kept, tuned):
        np.testing.assert_array_equal(aotc.load(path)(X), want)
    invoke("upgrade", tuned, "-o", tmp_path / "again.vmfb", "-q")
    assert (tmp_path / "again.vmfb").read_bytes() == tuned.read_bytes()


def test_unusable_costs_are_refused(files, tmp_path):
    (tmp_path / "bad.json").write_text("[]")
    (tmp_path / "other.mlir").write_text(jax.jit(jnp.sin).lower(X).as_text())
    record = tmp_path / "r.json"
    invoke("profile", files / "m.vmfb", "--repeat=1", "-q", "-o", record)
    for costs, message in (
        (tmp_path / "bad.json", "the file is not a cost record"), (tmp_path / "none", "cannot read the costs"),
        (files / "m.vmfb", "the bundle has no measured times"), (record, "the costs are stale"),
    ):  # fmt: skip
        words = ["compile", tmp_path / "other.mlir", "-o", tmp_path / "x.vmfb", f"--costs={costs}"]
        done = CliRunner().invoke(app, list(map(str, words)))
        assert message in str(done.exception)
    done = CliRunner().invoke(app, ["profile", str(files / "m.vmfb"), "--apply", "-o", str(record)])
    assert done.exit_code == 2
    (tmp_path / "bare.vmfb").write_bytes(aotc.compile(branches, X, source=False))
    done = CliRunner().invoke(app, ["profile", str(tmp_path / "bare.vmfb"), "--apply"])
    assert "the bundle has no source" in str(done.exception)
    assert not done.output  # nothing was measured
    done = CliRunner().invoke(app, ["explain", "schedule", str(files / "m.mlir"), "--function=f"])
    assert f"{files / 'm.mlir'}: error: no function 'f'" in str(done.exception)
    done = CliRunner().invoke(app, ["explain", "memory", str(files / "m.vmfb"), "--dim=n"])
    assert "cannot read --dim=n" in str(done.exception)
