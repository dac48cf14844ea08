"""Traces as Chrome's format wants them, from the command line and from Python, of CPUs and of devices run by step."""

import json
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import aotc
from aotc.vmfb.profile.cost_record import read_record, record_problem
from aotc.vmfb.profile.perfetto import events_text, trace_events
from aotc.vmfb.profile.stepped import stepped_dispatches
from aotc_cli.main import app

pytestmark = pytest.mark.cpu
X = np.linspace(-1, 1, 128 * 128, dtype=np.float32).reshape(128, 128)
FACTS = {"loc", "threads", "items", "gflops", "gbs", "roofline", "ns", "bytes", "flops", "sizes", "dispatch"}
FACTS |= {"scope", "line"}


def check_trace(text):
    """The fields of the format (docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU)."""
    assert text.startswith('{"traceEvents"')  # by this Perfetto knows JSON
    trace = json.loads(text)
    assert trace["displayTimeUnit"] in ("ms", "ns")
    slices = {}
    for e in trace["traceEvents"]:
        assert isinstance(e["name"], str)
        assert isinstance(e["pid"], int)
        assert isinstance(e["tid"], int)
        assert isinstance(e["args"], dict)
        if e["ph"] == "C":
            assert e["args"]["bytes"] >= 0
            continue
        if e["ph"] == "M":
            assert e["name"] in ("process_name", "thread_name")
            assert isinstance(e["args"]["name"], str)
            continue
        assert e["ph"] == "X"
        assert e["ts"] >= 0
        assert e["dur"] >= 0
        slices.setdefault(e["tid"], []).append(e)
    for some in slices.values():
        assert all(a["ts"] <= b["ts"] for a, b in pairwise(some))
        around = []  # the slices that are open: each lies within the one around it
        for e in some:
            while around and around[-1] <= e["ts"] + 1e-6:
                around.pop()
            end = e["ts"] + e["dur"]
            assert not around or end <= around[-1] + 1e-6
            around.append(end)
    return trace, [e for some in slices.values() for e in some]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trace")
    function = lambda x: jnp.sort(jax.nn.softmax(x @ x, 1), 1)
    exported = jax.export.export(jax.jit(function))(X)
    (folder / "m.jaxexp").write_bytes(exported.serialize())
    (folder / "m.vmfb").write_bytes(aotc.compile(exported))
    (folder / "bare.vmfb").write_bytes(aotc.compile(exported, debug_info=False))
    return folder


def invoke(*words):
    return CliRunner().invoke(app, [str(w) for w in words])


def test_a_recording_is_saved_as_a_trace(files, tmp_path):
    module = aotc.load(files / "m.vmfb", threads=2)
    module.invoke("main", X)
    with module.profile() as recording:
        for n in range(3):
            with recording.span(f"call {n}"):
                module.invoke("main", X)
    recording.save(tmp_path / "t.json")
    _, slices = check_trace((tmp_path / "t.json").read_text())
    drawn = {e["args"]["dispatch"] for e in slices if e["cat"] == "dispatch"}
    assert drawn == set(range(len(recording.dispatches)))
    assert {e["name"] for e in slices if e["cat"] == "call"} == {"call 0", "call 1", "call 2", "module.profile"}
    for e in slices:
        if e["cat"] == "dispatch":
            assert set(e["args"]) >= FACTS
            same = recording.dispatches[e["args"]["dispatch"]]
            assert (e["name"], e["args"]["gflops"], e["args"]["loc"]) == (same.kernel, same.gflops, same.loc)


@pytest.mark.parametrize("model", ["m.vmfb", "m.jaxexp"])
def test_profile_writes_a_trace_that_is_a_record_too(files, tmp_path, model):
    out = tmp_path / "trace.json"
    done = invoke("profile", files / model, "--repeat=1", "--calls=2", "--threads=2", "-o", out)
    assert done.exit_code == 0, done.output
    assert "GFLOP/s" in done.output
    trace, slices = check_trace(out.read_text())
    kernels = [k["name"] for k in trace["kernels"]]
    seen = {e["args"]["dispatch"]: e["name"] for e in slices if e["cat"] == "dispatch"}
    assert sorted(seen.values()) == sorted(kernels * 2)
    record = read_record(out.read_text())
    assert record_problem(record) == ""
    assert "traceEvents" not in record
    done = invoke("compile", files / "m.jaxexp", "-o", tmp_path / "again.vmfb", f"--costs={out}")
    assert done.exit_code == 0, done.output


def test_profile_leaves_what_was_there_if_it_fails(files, tmp_path):
    out = tmp_path / "trace.json"
    out.write_text("mine")
    for words in (
        (files / "bare.vmfb", "-o", out), (files / "m.vmfb", "-o", out, "--input=2xf32=1,2"),
        (files / "m.vmfb", "-o", tmp_path / "no" / "trace.json"), (files / "none.vmfb", "-o", out),
    ):  # fmt: skip
        done = invoke("profile", *words)
        assert done.exit_code == 1
        assert out.read_text() == "mine"
    assert invoke("profile", files / "m.jaxexp", "--apply").exit_code == 2
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]


def test_a_call_by_steps_has_a_timeline(files):
    module = aotc.load(files / "m.vmfb", threads=1)
    made = stepped_dispatches(module.get_function("main"), [X])
    assert [d.kernel for d in made] == [t.name for t in module._executable.kernel_texts()]
    assert all(a.start + a.ns <= b.start for a, b in pairwise(made))
    check_trace(events_text(trace_events(made, (), "main")))


def test_copies_are_in_a_timeline_by_steps():
    module = aotc.load(aotc.compile(lambda x: (x, x + 1), X, opt_level=0), threads=1)
    made = stepped_dispatches(module.get_function("main"), [X])
    assert "copy" in {d.kernel for d in made}
    assert next(d for d in made if d.kernel == "copy").bytes == 2 * X.nbytes


def test_dispatches_that_take_turns_on_a_thread_do_not_overlap(files):
    """Tile by tile one kernel runs between claims of another: each stretch is a slice."""
    module = aotc.load(files / "m.vmfb", threads=1)
    made = stepped_dispatches(module.get_function("main"), [X])
    first, second = made[:2]
    parts = [(0, 1), (20, 30), (40, 50)], [(5, 15), (32, 38)]
    rows = [
        d._replace(parts=[d.parts[0]._replace(began=a, ended=b) for a, b in some])
        for d, some in zip((first, second), parts)
    ]
    _, slices = check_trace(events_text(trace_events(rows, (), "main")))
    assert [e["args"]["dispatch"] for e in slices] == [0, 1, 0, 1, 0]
