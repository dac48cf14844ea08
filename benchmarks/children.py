"""Processes that a suite starts: other engines, other states of aotc, fresh compilers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import timing

ROOT = Path(__file__).parents[1]


def module_command_line(module: str, *words: object) -> list[str]:
    """Return the command line of a module of this package."""
    return [sys.executable, "-m", module, *map(str, words)]


def environment(**variables: str) -> dict[str, str]:
    """Return this process's environment with the repository's root first in PYTHONPATH, and ``variables``."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])])
    return {**os.environ, "PYTHONPATH": path, **variables}


def suite(topic: str, name: str, *words: object) -> list[str]:
    """Return the command line of a suite, in smoke mode if this process runs in smoke mode."""
    return module_command_line("benchmarks", topic, name, *words, *["--smoke"] * timing.SMOKE)


def output(words: list[str], **variables: str) -> str:
    """Run a process and return its standard output.

    Raises
    ------
    RuntimeError
        If the process fails; the message is the decisive line of its standard error.
    """
    done = subprocess.run(words, capture_output=True, text=True, env=environment(**variables), check=False)
    if done.returncode:
        raise RuntimeError(failure_line(done.stderr))
    return done.stdout


def failure_line(text: str) -> str:
    """Return the decisive line of a failed process's output: the first with "error" in it, or the last."""
    lines = text.strip().splitlines() or ["no reason on standard error"]
    return next((line for line in lines if "error" in line.lower()), lines[-1])[:300]


def exchange_line(process: subprocess.Popen[str], text: Any = None) -> str:
    """Write a line to a process, unless ``text`` is None, and return the next line that it prints."""
    assert process.stdin
    assert process.stdout
    if text is not None:
        process.stdin.write(f"{text}\n")
        process.stdin.flush()
    return process.stdout.readline()
