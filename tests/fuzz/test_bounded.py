"""A fixed part of ``make fuzz``: seconds of each kind."""

import subprocess
import sys
from pathlib import Path

import pytest

from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.devices import cpu
from fuzz import bundles, children

pytestmark = pytest.mark.cpu


def run(kind, count, seconds):
    """No case of a kind fails. In a process of its own: a child of one that has used XLA waits for XLA's threads."""
    command = [sys.executable, str(Path(__file__).with_name("run.py")), f"--{kind}={count}", f"--seconds={seconds}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"{kind}: ")
    assert not done.stdout.startswith(f"{kind}: 0 ")


def test_bundles():
    (variant,) = open_bundle(bundles.GOLDEN / "add.vmfb").manifest["variants"]
    if obstacle := cpu.obstacle(variant):
        pytest.skip(obstacle)
    run("bundles", 2000, 10)


def test_modules():
    run("modules", 200, 12)


def test_calls():
    run("calls", 300, 8)


def test_failures_are_seen():
    """An exception, an end of the process and a case without end, each with its number."""
    odd = {3: lambda: 1 // 0, 5: lambda: children.os.abort(), 7: lambda: children.time.sleep(60)}
    outcomes, failures = children.run(lambda n: odd[n]() if n in odd else "fine", range(10), patience=1.0)
    assert outcomes == {"fine": 7, "raises": 1, "ends its process with SIGABRT": 1, "hangs": 1}
    assert [text.split(":")[0] for text in failures] == ["case 3", "case 5", "case 7"]
    assert children.run(lambda n: children.time.sleep(60), range(1), may_hang=lambda n: True, patience=1.0)[1] == []
