"""A fixed part of ``make fuzz``: seconds of each kind."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.devices.cpu import device as cpu
from fuzz import bundles, calls, children, tensors
from fuzz.run import Progress

pytestmark = pytest.mark.cpu


def run(kind, count, seconds):
    """No case of a kind fails. In a process of its own: a child of one that has used XLA waits for XLA's threads."""
    command = [sys.executable, str(Path(__file__).with_name("run.py")), f"--{kind}={count}", f"--seconds={seconds}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{kind}: " in done.stdout
    assert f"{kind}: 0 " not in done.stdout


@pytest.mark.parametrize("count", [100, pytest.param(500, marks=pytest.mark.slow)])
def test_bundles(count):
    (variant,) = open_bundle(bundles.GOLDEN / "add.vmfb").manifest["variants"]
    if obstacle := cpu.obstacle(variant):
        pytest.skip(obstacle)
    run("bundles", count, 30)


@pytest.mark.parametrize("count", [100, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["modules", "bytecode", "blobs", "tensors"])
def test_inputs(kind, count):
    run(kind, count, 30)


def test_compiled():
    run("compiled", 60, 8)


def test_calls():
    run("calls", 300, 7)


def test_a_run_goes_on_where_the_last_one_ended(tmp_path):
    """A position in a file, by kind; another first number begins again."""
    command = [sys.executable, str(Path(__file__).with_name("run.py")), f"--resume={tmp_path}"]
    runs = (["--tensors=3"], 3), (["--tensors=5"], 5), (["--tensors=5"], 5), (["--tensors=2", "--first=0"], 2)
    for options, cases in runs:
        done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=300, check=True)
        assert done.stdout.startswith(f"tensors: {cases} in ")
        row = json.loads((tmp_path / "position.json").read_text())["tensors"]
        assert (row["next"], sum(row["outcomes"].values()), row["failures"]) == (cases, cases, [])


def test_a_failing_case_leaves_its_input(tmp_path):
    progress = Progress(str(tmp_path))
    path = progress.keep_input("tensors", tensors, 7)
    assert Path(path).read_bytes() == tensors.input_of(7)[0]
    assert Path(path).name == "tensors-7.safetensors"
    assert progress.keep_input("calls", calls, 7) == "python tests/fuzz/run.py --calls=1 --first=7"


def deaf():
    children.signal.signal(children.signal.SIGINT, children.signal.SIG_IGN)
    children.time.sleep(60)


def test_failures_are_seen():
    """An exception, an end of the process and cases without end, each with its number."""
    odd = {3: lambda: 1 // 0, 5: end, 7: lambda: children.time.sleep(60), 8: deaf}
    outcomes, failures = children.run(lambda n: odd[n]() if n in odd else "fine", range(10), patience=0.5)
    assert outcomes == {"fine": 6, "raises": 1, "ends its process with SIGTERM": 1, "hangs": 2}
    assert [text.split(":")[0] for text in failures] == ["case 3", "case 5", "case 7", "case 8"]


def test_a_case_that_waits_for_a_core_is_no_failure(monkeypatch):
    """Other processes may leave a case no core for longer than its patience."""
    monkeypatch.setattr(children, "_queued", lambda process: {process: children.time.monotonic()})
    slow = {1: lambda: children.time.sleep(1) or "slow"}
    outcomes, failures = children.run(lambda n: slow[n]() if n in slow else "fine", range(3), patience=0.2)
    assert (outcomes, failures) == ({"fine": 2, "slow": 1}, [])


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="needs /proc/self/schedstat")
def test_time_without_a_core_includes_child_processes():
    with subprocess.Popen(["sleep", "60"]) as process:
        found = children._queued(children.os.getpid())
        process.kill()
    assert {children.os.getpid(), process.pid} <= set(found)
    assert min(found.values()) >= 0


def end():
    children.os.kill(children.os.getpid(), children.signal.SIGTERM)


def end_elsewhere():
    with children.not_ours():
        end()


def stopped():
    try:
        children.time.sleep(60)
    except KeyboardInterrupt:
        return "stopped"


def test_what_is_no_failure():
    """A reference that crashes, and a case that takes a Ctrl-C for an answer."""
    odd = {1: end_elsewhere, 2: stopped}
    outcomes, failures = children.run(lambda n: odd[n]() if n in odd else "fine", range(4), patience=0.5)
    assert outcomes == {"fine": 2, "the reference ends its process with SIGTERM": 1, "stopped": 1}
    assert failures == []
