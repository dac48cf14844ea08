"""Tests with the marker ``own_process`` run in a child, and their outcomes are those of the child."""

import os
from pathlib import Path

import pytest
from support import own_process

pytestmark = pytest.mark.ir


@pytest.mark.own_process
def test_the_child_is_another_process():
    assert own_process.REPORTS in os.environ


def test_others_run_here():
    assert own_process.REPORTS not in os.environ


def test_a_failure_and_a_test_that_does_not_end_are_failures_here(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(own_process.__file__).parents[1]), prepend=os.pathsep)
    (tmp_path / "test_some.py").write_text(
        "import os\ndef test_good(): pass\ndef test_bad(): assert 0, 'why'\ndef test_gone(): os._exit(3)\n"
    )
    (tmp_path / "conftest.py").write_text("from support.own_process import pytest_runtest_logreport\n")
    found = own_process._run([f"test_some.py::test_{name}" for name in ("good", "bad", "gone")], tmp_path)
    assert {node.partition("test_")[2]: outcome for node, (outcome, _) in found.items()} == {
        "some.py::test_good": "passed", "some.py::test_bad": "failed", "some.py::test_gone": "failed",
    }  # fmt: skip
    assert "why" in found["test_some.py::test_bad"][1]
    assert "ended with 3" in found["test_some.py::test_gone"][1]
