"""``aotc profile --ranks``: what each rank does over time, and how long it waits for the others."""

import json
from itertools import pairwise

import jax
import numpy as np
import pytest
from support.small_sharded import arguments, assert_close, bundle, expected
from typer.testing import CliRunner

import aotc
from aotc.tools.profile_ranks import profile_ranks, ranks_profile
from aotc.vmfb.gang.rank_recording import RankRecording
from aotc.vmfb.profile.records import Dispatch, Part, Span
from aotc.vmfb.ranks.collective_log import CollectiveTime
from aotc.vmfb.ranks.collectives import Collective
from aotc.vmfb.ranks.layout import Mesh
from aotc_cli.main import app

pytestmark = pytest.mark.cpu

LINE = Mesh((("model", 3),))


def dispatch(start, ns):
    parts = [Part(0, 1, start, start + ns, 0)]
    return Dispatch("k0", "f at model.py:3", {}, start, ns, ns, 1, 1, [0], 8, 8, 1.0, 1.0, 0.5, parts)


def recording(begun, calls, dispatches, collectives):
    spans = [Span(f"@main, call {n}", start, ns) for n, (start, ns) in enumerate(calls)]
    rows = [CollectiveTime(c, 64, begun + start, begun + end) for c, start, end in collectives]
    return RankRecording(begun, "cpu:x86-64-v3", spans, [dispatch(*d) for d in dispatches], rows, 0)


def test_waiting_lasts_until_the_last_rank_has_begun():
    """Each recording begins at another time of the common clock."""
    c = Collective("all_reduce", 7, ((0, 1, 2),), place="model.py:5")
    found = ranks_profile(
        LINE, "main",
        [
            recording(1000, [(0, 1000)], [(100, 200)], [(c, 300, 900)]),
            recording(1100, [(0, 900)], [(100, 300)], [(c, 400, 820)]),
            recording(900, [(0, 1100)], [(100, 750)], [(c, 850, 1000)]),
        ],
    )  # fmt: skip
    # The ranks begin at 1300, 1500 and 1750 of the clock, and end at 1900, 1920 and 1900.
    assert [round(run.waited * 1e9) for run in found.collectives] == [450, 250, 0]
    assert [run.last_rank for run in found.collectives] == [2, 2, 2]
    assert [round(r.transfer * 1e9) for r in found.ranks] == [150, 170, 150]
    assert [round(r.kernels * 1e9) for r in found.ranks] == [200, 300, 750]
    assert [round(run.start * 1e9) for run in found.collectives] == [400, 600, 850]
    assert [r.place for r in found.ranks] == ["model 0", "model 1", "model 2"]


def test_iterations_are_paired_and_times_are_those_of_a_call():
    """A kernel that contains the collectives of a loop counts without them."""
    c = Collective("all_gather", 2, ((0, 1),))
    pairs = [(c, 10, 30), (c, 50, 60)], [(c, 20, 30), (c, 40, 60)]
    found = ranks_profile(
        Mesh((("a", 2),)), "main", [recording(0, [(0, 50), (50, 50)], [(0, 80)], rows) for rows in pairs]
    )
    assert [round(run.waited * 1e9) for run in found.collectives] == [10, 0, 0, 10]
    assert [(round(r.call * 1e9), round(r.kernels * 1e9)) for r in found.ranks] == [(50, 25), (50, 25)]
    assert found.calls == 2


@pytest.mark.parametrize(
    ("collective", "waits"),
    [
        (Collective("collective_permute", 0, pairs=((2, 0), (0, 1), (1, 2))), [80, 0, 0]),
        (Collective("collective_permute", 0, pairs=((1, 0),)), [30, 0, 0]),
        (Collective("collective_broadcast", 0, ((1, 0, 2),)), [30, 0, 0]),
        (Collective("all_to_all", 0), [80, 50, 0]),
        (Collective("all_reduce", 0, ((0, 1), (2,))), [30, 0, 0]),
    ],
)
def test_a_rank_waits_only_for_ranks_that_send_to_it(collective, waits):
    rows = [recording(0, [(0, 300)], [], [(collective, start, 200)]) for start in (10, 40, 90)]
    assert [round(run.waited * 1e9) for run in ranks_profile(LINE, "main", rows).collectives] == waits


def test_waiting_is_never_longer_than_the_collective():
    """Clocks of processors differ a little."""
    c = Collective("all_gather", 0, ((0, 1, 2),))
    rows = [recording(0, [(0, 300)], [], [(c, start, end)]) for start, end in ((0, 20), (50, 60), (10, 60))]
    assert [round(run.waited * 1e9) for run in ranks_profile(LINE, "main", rows).collectives] == [20, 0, 40]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("profile") / "model.vmfb"
    bundle(4).save(path)
    return path


def test_a_gang_gives_right_results_after_profiling(model):
    with aotc.gang(model) as module:
        values = jax.tree.leaves(arguments())
        found = profile_ranks(module, "main", values, 2)
        assert_close(module.main(*arguments()), expected(*arguments()))
    assert found.calls == 2
    assert [r.place for r in found.ranks] == [f"data {a}, model {b}" for a in range(2) for b in range(2)]
    assert len(found.collectives) == 4 * 2 * 2  # ranks, calls, sums over `model` and over `data`
    first, second = found.collectives[:2]
    assert (first.op, first.axes, first.bytes, first.sent) == ("all_reduce", "model", 4 * 16 * 4, 4 * 16 * 4)
    assert (second.axes, second.bytes) == ("data", 16 * 4)
    assert first.line.endswith("small_sharded.py:18")
    for r in found.ranks:
        assert r.kernels > 0
        assert r.transfer > 0
        assert r.kernels + r.transfer + r.waiting <= r.call


def test_collectives_in_a_loop_are_each_a_slice(model):
    found = aotc.profile(model, ranks=4, function="spin", inputs=[np.ones((8, 4), "f4"), np.int32(5)], calls=2)
    assert len(found.collectives) == 4 * 2 * 5
    assert {run.number for run in found.collectives} == {found.collectives[0].number}
    _, collectives, _ = found.document().blocks
    assert [row[:5] for row in collectives.rows] == [("2", "all_reduce", "model", "16 B", "5")]


def test_a_trace_has_a_process_for_each_rank(model, tmp_path):
    words = ["profile", str(model), "--ranks=4", "--function=main", "-o", str(tmp_path / "t.json")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    words = " ".join(done.output.split())
    assert "rank place call kernels transfer waiting" in words
    assert "3 calls of @main for cpu" in words
    assert "mesh data=2 x model=2" in words
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {n + 1: f"aotc: rank {n} (data {n // 2}, model {n % 2})" for n in range(4)}
    for process in names:
        own = [e for e in events if e["pid"] == process and e["ph"] == "X"]
        assert sum(e["cat"] == "call" for e in own) == 3
        assert any(e["cat"] == "dispatch" for e in own)
        outer = [e for e in own if e["cat"] == "collective"]
        assert len(outer) == 6
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in pairwise(outer))
        for e in outer:
            inner = [x for x in own if x["tid"] == e["tid"] and x is not e and e["ts"] <= x["ts"] < e["ts"] + e["dur"]]
            assert [x["name"] for x in inner] in (["waiting", "transfer"], ["transfer"])
            assert sum(x["dur"] for x in inner) == pytest.approx(e["dur"])
            facts = e["args"]
            assert facts["op"] == "all_reduce"
            assert facts["axes"] in ("model", "data")
            assert facts["bytes"] > 0
            assert facts["line"].startswith("/")
            assert facts["waiting_ns"] + facts["transfer_ns"] == pytest.approx(1e3 * e["dur"])


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--save"], "it is for a bundle of one device"), (["--by=scope"], "it is for a bundle of one device"),
        (["--device=cpu"], "it is for a bundle of one device"), (["-o", "t.vmfb"], "with --ranks it is a .json trace"),
    ],
)  # fmt: skip
def test_options_for_one_device_are_refused(model, words, problem):
    done = CliRunner().invoke(app, ["profile", str(model), "--ranks=4", *words])
    assert done.exit_code == 2
    assert problem in done.output


def test_wrong_numbers_of_calls_or_ranks_are_refused(model):
    with pytest.raises(aotc.CallError, match="calls must be a positive integer"):
        aotc.profile(model, ranks=4, function="main", calls=0)
    with pytest.raises(aotc.BundleError, match="for 4 ranks"):
        aotc.profile(model, ranks=2, function="main")
