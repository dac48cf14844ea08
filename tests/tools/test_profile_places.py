"""``aotc profile``: times by layer and by line, in the table and in the trace; the bundle changes only with --save."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import aotc
from aotc.vmfb.profile.model_place import times_by_place
from aotc.vmfb.profile.perfetto import LAYERS, trace_events
from aotc.vmfb.profile.records import Dispatch, Span
from aotc_cli.main import app

pytestmark = pytest.mark.cpu
X = np.linspace(-1, 1, 64 * 64, dtype=np.float32).reshape(64, 64)


def model(x):
    for n in range(2):
        with jax.named_scope(f"layer_{n}"):
            with jax.named_scope("q"):
                x = jnp.tanh(x @ X)
            with jax.named_scope("norm"):
                x = jax.nn.softmax(x)
    return x


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("places")
    aotc.compile(model, X, output=folder / "m.vmfb")
    (b,) = jax.export.symbolic_shape("b")
    symbolic = jax.ShapeDtypeStruct((b, 3), "float32")
    aotc.compile(lambda x, y: x + y, symbolic, symbolic, output=folder / "b.vmfb")
    examples = {"prefill": (X,), "decode": (X,)}
    both = aotc.compile({"prefill": model, "decode": jnp.sin}, args=examples, output=folder / "two.vmfb")
    (folder / "two.mlir").write_bytes(both.source)
    return folder


def run(*words):
    return CliRunner().invoke(app, [*map(str, words)], env={"COLUMNS": "200"})


def table(done):
    assert done.exit_code == 0, done.output
    head, rule, *lines = done.output.partition("\n\n")[0].splitlines()
    assert not rule.strip("─ ")
    return head.split(), [line.split() for line in lines]


def test_profile_table_by_scope_sums_layers(files):
    head, rows = table(run("profile", files / "m.vmfb", "--repeat=1", "--by=scope"))
    assert head[:3] == ["scope", "kernels", "runs"]
    assert {row[0] for row in rows} == {f"layer_{n}/{name}" for n in range(2) for name in ("q", "norm")}
    head, rows = table(run("profile", files / "m.vmfb", "--repeat=1", "--by=scope", "--depth=1"))
    assert {row[0] for row in rows} == {"layer_0", "layer_1"}
    assert abs(sum(float(row[row.index("%") - 1]) for row in rows) - 100) < 0.5


def test_profile_tables_by_line_and_kernel_have_a_row_each(files):
    _, rows = table(run("profile", files / "m.vmfb", "--repeat=1", "--by=line"))
    assert len(rows) == 2
    assert all(row[0].startswith("test_profile_places.py:") for row in rows)
    head, rows = table(run("profile", files / "m.vmfb", "--repeat=1"))
    assert head[-2:] == ["from", "scope"]
    assert any(row[-4:] == ["layer_0/q", "and", "1", "more"] for row in rows)  # both layers share the kernel


def test_profile_changes_the_bundle_only_with_save(files, tmp_path):
    bundle = tmp_path / "m.vmfb"
    before = (files / "m.vmfb").read_bytes()
    bundle.write_bytes(before)
    assert run("profile", bundle, "--repeat=1").exit_code == 0
    assert bundle.read_bytes() == before
    assert run("profile", bundle, "--repeat=1", "-q", "--save").exit_code == 0
    assert bundle.read_bytes() != before
    assert "measured" in run("explain", "schedule", bundle).output
    assert run("profile", bundle, "--repeat=1", "-q", "--save", "-o", tmp_path / "r.json").exit_code == 2
    assert run("profile", bundle, "--by=layer").exit_code == 2


def test_times_by_place_divide_shared_kernels():
    row = {"name": "k", "loc": "jit(f)/a/x/add at m.py:1", "runs": 3, "bytes": 10, "ns": {"cpu": 5.0}}
    row["places"] = {"jit(f)/a/x/add at m.py:1": 2, "jit(f)/b/add at m.py:1": 1}
    other = {"name": "j", "loc": "jit(f)/a/mul at m.py:2", "runs": 1, "bytes": 4, "flops": 7, "ns": {"cpu": 100.0}}
    record = {"kernels": [row, other]}
    assert [(t.name, t.runs, t.ns) for t in times_by_place(record, "scope")] == [
        ("a", 1, 100.0), ("a/x", 2, 10.0), ("b", 1, 5.0),
    ]  # fmt: skip
    (first, second) = times_by_place(record, "scope", 1)
    assert (first.name, first.kernels, first.bytes, first.flops) == ("a", {"k", "j"}, 24, 7)
    assert [(t.name, t.ns) for t in times_by_place(record, "line")] == [("m.py:2", 100.0), ("m.py:1", 15.0)]
    assert second.name == "b"


def dispatch(loc, start, ns):
    return Dispatch("k", loc, {}, start, ns, ns, 1, 1, [0], 1, 1, 1.0, 1.0, 1.0, [])


def test_layers_of_a_trace_are_nested_slices():
    rows = [("jit(f)/a/x/add", 0, 10), ("jit(f)/a/y/add", 8, 10), ("jit(f)/b/add", 20, 5), ("jit(f)/b/add", 40, 5)]
    events = trace_events([dispatch(*row) for row in rows], [Span("call", 0, 30), Span("call", 35, 30)], "m")
    slices = [e for e in events if e["tid"] == LAYERS and e["ph"] == "X"]
    found = [(e["args"]["scope"], round(1e3 * e["ts"]), round(1e3 * e["dur"])) for e in slices]
    # The two parts of ``a`` overlap: the first ends where the second begins. ``b`` is one slice in each call.
    assert found == [("a", 0, 18), ("a/x", 0, 8), ("a/y", 8, 10), ("b", 20, 5), ("b", 40, 5)]


def test_trace_of_a_model_has_its_layers(files, tmp_path):
    out = tmp_path / "t.json"
    assert run("profile", files / "m.vmfb", "--repeat=1", "--calls=1", "-q", "-o", out).exit_code == 0
    events = json.loads(out.read_text())["traceEvents"]
    names = [e["name"] for e in events if e["tid"] == LAYERS and e["ph"] == "X"]
    assert names == ["layer_0", "q", "norm", "layer_1", "q", "norm"]
    kernels = [e["args"] for e in events if e.get("cat") == "dispatch"]
    assert {a["scope"] for a in kernels} == {f"layer_{n}/{name}" for n in range(2) for name in ("q", "norm")}


@pytest.mark.parametrize("words", [
    ("run",), ("bench",), ("check",), ("profile",), ("profile", "-o", "t.json"), ("explain", "schedule"),
    ("report", "-o", "t.html"),
])  # fmt: skip
def test_commands_suggest_a_function(files, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    model = files / ("two.mlir" if words[0] in ("check", "report") else "two.vmfb")
    for function, said in (("", "no function is called main"), ("--function=x", "no function 'x'")):
        command, more = (words, ()) if words[0] == "explain" else (words[:1], words[1:])
        done = run(*command, model, *more, *filter(None, [function]))
        text = str(done.exception)
        assert said in text
        assert "prefill, decode" in text
        assert "--function=prefill" in text


@pytest.mark.parametrize(
    "words",
    [
        ("run", "--random"), ("profile", "--repeat=1"), ("bench", "--seconds=0"), ("explain", "schedule"),
        ("explain", "memory"), ("report", "-o", "r.html"),
    ],
)  # fmt: skip
def test_commands_state_the_sizes_that_they_assume(files, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    command, more = (words, ()) if words[0] == "explain" else (words[:1], words[1:])
    done = run(*command, files / "b.vmfb", *more)
    assert done.exit_code == 0, done.output
    assert "b=16 assumed; --dim b=" in done.stderr
    done = run(*command, files / "b.vmfb", *more, "--dim", "b=5")
    assert done.exit_code == 0
    assert "assumed" not in done.stderr


def test_input_values_determine_the_sizes_of_random_arguments(files):
    done = run("run", files / "b.vmfb", "--input=2x3xf32=1", "--random")
    assert done.exit_code == 0, done.output
    assert "assumed" not in done.stderr
    assert "2x3xf32" in done.output
