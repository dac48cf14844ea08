"""Type checkers find the errors of a small program: each line that ends in ``# error``, and no other."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import aotc

pytestmark = pytest.mark.cpu

PROGRAM = Path(__file__).parent / "typed_program" / "planted.txt"
ROOT = Path(aotc.__file__).parents[1]
PLANTED = [n for n, line in enumerate(PROGRAM.read_text().splitlines(), 1) if "# error" in line]
# What no signature of the surface needs is not read: it takes a minute.
CONFIG = """[mypy]
strict = True
[mypy-aotc.lowering.*,aotc.kernels.*,aotc.frontend.*,aotc.ir.*,aotc.source.*,jax.*,numba.*,llvmlite.*]
follow_imports = skip
[mypy-aotc.*]
ignore_errors = True
"""


@pytest.fixture
def program(tmp_path):
    (tmp_path / "planted.py").write_text(PROGRAM.read_text())
    return tmp_path


def test_the_program_has_ten_planted_errors():
    assert len(PLANTED) >= 10


def test_mypy_finds_exactly_the_planted_errors(program):
    pytest.importorskip("mypy")
    (program / "mypy.ini").write_text(CONFIG)
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "planted.py"]
    env = {**os.environ, "MYPYPATH": str(ROOT)}
    done = subprocess.run(command, cwd=program, env=env, capture_output=True, text=True)
    found = re.findall(r"^planted\.py:(\d+): error", done.stdout, re.M)
    assert [int(n) for n in found] == PLANTED, done.stdout + done.stderr


def test_pyright_finds_exactly_the_planted_errors(program):
    pytest.importorskip("basedpyright")
    config = {"extraPaths": [str(ROOT)], "typeCheckingMode": "standard", "include": ["planted.py"]}
    (program / "pyrightconfig.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(command, cwd=program, capture_output=True, text=True)
    rows = json.loads(done.stdout)["generalDiagnostics"]
    found = [row["range"]["start"]["line"] + 1 for row in rows if row["severity"] == "error"]
    assert found == PLANTED, done.stdout + done.stderr
