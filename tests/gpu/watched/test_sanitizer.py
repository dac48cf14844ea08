"""compute-sanitizer finds nothing in the kernels of any template or algorithm."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba_cuda")

from gpu.watched import copied_in_graph, sanitized

from aotc.vmfb.devices.cuda import driver

TOOL = shutil.which("compute-sanitizer", path=f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin")
WANTED = "compute-sanitizer is not here: it is a part of the CUDA toolkit (apt install cuda-sanitizer-13-0)"
REPOSITORY = Path(__file__).parents[3]

pytestmark = [
    pytest.mark.sanitizer,
    pytest.mark.skipif(not TOOL, reason=WANTED),
    pytest.mark.skipif(bool(driver.missing()), reason="no GPU"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("sanitized")
    for name in sanitized.cases():
        sanitized.write(made, name)
    return made


def watched(tool, *command):
    path = os.pathsep.join([str(REPOSITORY), *sys.path])
    return subprocess.run(
        [TOOL, "--tool", tool, "--error-exitcode", "86", sys.executable, *command],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_clean(tool, folder):
    """For initcheck without graphs, whose copies it may judge too early: see the next test."""
    found = watched(tool, sanitized.__file__, str(folder), *(["--apart"] if tool == "initcheck" else []))
    assert found.returncode == 0, found.stdout[-8000:] + found.stderr[-2000:]
    assert found.stdout.count(": right") == len(sanitized.cases())


@pytest.mark.parametrize("how", ["graph", "stream", "kernel"])
def test_initcheck_judges_what_a_graph_copies_too_early(how):
    """What is copied behind the kernel that writes it is right, also where the tool calls it unwritten.

    Of a graph of two branches it does in some runs, for all of the array or a part: it looks while that kernel runs.
    Even of the copy to the host, which is not a part of the graph (``kernel``). Without a graph it never does.
    """
    found = watched("initcheck", copied_in_graph.__file__, how)
    assert "right" in found.stdout
    if how == "stream":
        assert found.returncode == 0, found.stdout[-4000:]
