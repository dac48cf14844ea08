"""The benchmarks: every suite is listed, has options, and works in smoke mode; tables; the page of results."""

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from benchmarks import options, report, timing
from benchmarks.suites import TOPICS, application, listing, parse, suites

ROOT = Path(__file__).parents[2]
NAMES = [(topic, suite) for topic in TOPICS for suite in suites(topic)]
QUICK = [("ops", "ragged"), ("runtime", "calls"), ("runtime", "promises"), ("compile", "ratios")]
LIBRARIES = {"before_after": "flax", "engines": "flax", "zoo": "keras"}

SLOW = [names for names in NAMES if names not in QUICK and names[0] != "gpu"]


def smoke(topic, suite, *words):
    """Run a suite in smoke mode and return the rows of its tables."""
    command = [sys.executable, "-m", "benchmarks", topic, suite, "--smoke", "--format", "json", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, env={**os.environ})
    assert not done.returncode, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [row for row in rows if "note" not in row]


@pytest.mark.ir
def test_listing_names_every_suite_in_80_columns():
    lines = list(listing())
    assert not [line for line in lines if len(line) > 80]
    assert {(line.split()[0]) for line in lines if line.startswith("  ")} == {suite for _, suite in NAMES}
    for topic, facts in TOPICS.items():
        assert suites(topic)
        assert facts.default in suites(topic)


@pytest.mark.ir
def test_no_suite_line_is_cut_off():
    assert not [about for topic in TOPICS for about in suites(topic).values() if len(about) > 56]


@pytest.mark.ir
def test_command_line_selects_topic_suite_and_options():
    assert parse(["ops", "--only", "sort"]) == ("ops", "latency", ["--only", "sort"])
    assert parse(["ops", "ragged", "--rounds", "2"]) == ("ops", "ragged", ["--rounds", "2"])
    with pytest.raises(SystemExit, match="unknown topic 'op'"):
        parse(["op"])
    with pytest.raises(SystemExit, match="unknown suite 'rugged' of ops: expected one of attention"):
        parse(["ops", "rugged"])


@pytest.mark.cpu
def test_entry_lists_suites_without_arguments():
    done = subprocess.run([sys.executable, "-m", "benchmarks"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "\n".join(listing()) + "\n"


@pytest.mark.cpu
@pytest.mark.parametrize(("topic", "suite"), NAMES)
def test_every_suite_has_a_command_line_with_the_shared_options(topic, suite):
    command = typer.main.get_command(application(topic, suite))
    names = {name for parameter in command.params for name in parameter.opts}
    assert {"--smoke", "--format", "--record"} <= names


@pytest.mark.cpu
@pytest.mark.parametrize(("topic", "suite"), QUICK)
def test_suite_works_in_smoke_mode(topic, suite):
    assert smoke(topic, suite)


@pytest.mark.cpu
@pytest.mark.slow
@pytest.mark.parametrize(("topic", "suite"), SLOW)
def test_every_suite_without_a_gpu_works_in_smoke_mode(topic, suite):
    pytest.importorskip(LIBRARIES.get(suite, "jax"))
    assert smoke(topic, suite)


@pytest.mark.cpu
@pytest.mark.slow
def test_compile_benchmark_measures_each_stage():
    command = [sys.executable, "-m", "benchmarks", "compile", "--stages", "--smoke"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "lowering" in done.stdout
    assert "LLVM passes" in done.stdout


@pytest.mark.cuda
@pytest.mark.parametrize("suite", suites("gpu"))
def test_gpu_suite_works_in_smoke_mode(suite):
    assert smoke("gpu", suite)


@pytest.mark.ir
def test_selection_matches_text_and_patterns():
    assert options.select(["sort f32 [10]", "sort i32 [10]"], "f32 [10]") == ["sort f32 [10]"]
    assert options.select(["a1", "b2", "c3"], "a|c") == ["a1", "c3"]
    with pytest.raises(SystemExit, match="--only x: no case matches; expected a part of 'a'"):
        options.select(["a"], "x")


@pytest.mark.ir
def test_samples_are_interleaved_and_ratios_are_within_rounds():
    order, clock = [], iter(range(100))
    samples = {name: lambda name=name: order.append(name) or float(next(clock) + 1) for name in "ab"}
    times = timing.measured(samples, rounds=3)
    assert order == ["a", "b", "b", "a", "a", "b", "b", "a"]  # the first round warms up
    assert times.rounds == {"a": (4.0, 5.0, 8.0), "b": (3.0, 6.0, 7.0)}
    assert times.ratio("a", "b").median == pytest.approx(8 / 7)
    assert str(timing.spread([1.0, 2.0, 3.0])) == "2.00 ±0.50"


@pytest.mark.ir
def test_short_calls_are_timed_in_batches():
    calls = []
    took = timing.sample(lambda: calls.append(1), seconds=0.002)
    assert 0 < took < timing.BATCH_SECONDS
    assert len(calls) > 100


@pytest.mark.ir
def test_table_fits_80_columns_and_wraps_wide_rows(capsys):
    report.begin(report.Format.table)
    table = report.Table("case", report.us("aotc"), report.ratio("aotc/XLA"))
    table.add("short", 1.5e-6, timing.Ratio(0.5, 0.4, 0.6))
    table.add("long " * 20, 2e-3, 0.25)
    wide = report.Table("model", *(f"column {n}" for n in range(12)))
    wide.add("a", *range(12))
    lines = capsys.readouterr().out.splitlines()
    assert not [line for line in lines if len(line) > 80]
    assert lines[1].split() == ["short", "1.50", "0.50", "±0.10"]
    assert lines[3].split() == ["2,000", "0.25"]
    assert "column 11 11" in lines[-1]


@pytest.mark.ir
def test_record_has_data_in_units_and_no_paths(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["x", "ops", "--bundles", "/some/where/else", "--record", "name"])
    report.begin(report.Format.json)
    table = report.Table("case", report.us("aotc"), report.ratio("aotc/XLA"))
    table.add("a", 1.5e-6, timing.Ratio(0.5, 0.4, 0.6))
    table.mean("aotc/XLA")
    record = json.loads(report.write("name").read_text())
    assert record["command"] == "python -m benchmarks ops --bundles else"
    assert record["tables"][0]["rows"] == [{"case": "a", "aotc us": 1.5, "aotc/XLA": [0.5, 0.4, 0.6]}]
    assert record["notes"] == ["aotc/XLA: geometric mean 0.50 of 1 rows"]
    assert record["machine"]["versions"]["numpy"]
    assert isinstance(record["quiet"], bool)


@pytest.mark.ir
def test_the_results_page_is_up_to_date():
    spec = importlib.util.spec_from_file_location("make_results", ROOT / "docs/make_results.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs/results.md").read_text() == module.page(), "run python docs/make_results.py"
    assert (ROOT / "README.md").read_text() == module.readme(), "run python docs/make_results.py"


@pytest.mark.ir
def test_records_name_suites_and_no_paths():
    for path in (ROOT / "benchmarks/results").glob("*.json"):
        record = json.loads(path.read_text())
        topic, suite, _ = parse(shlex.split(record["command"])[3:])
        assert suite in suites(topic)
        assert "/work/" not in path.read_text()
        assert "/home/" not in path.read_text()
