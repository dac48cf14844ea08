"""The command line, run in the test's own process."""

import sys

import pytest

from aotc_cli import main as cli_main


@pytest.fixture
def command(monkeypatch, capsys):
    """Run a command; return its exit code and what it says."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["aotc", *words])
        with pytest.raises(SystemExit) as ended:
            cli_main.main()
        said = capsys.readouterr()
        return ended.value.code or 0, said.out + said.err

    return run
