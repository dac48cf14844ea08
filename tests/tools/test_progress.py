"""What a ``progress`` callback raises: the caller's own exception leaves every tool as it is, and nothing stays."""

import os

import numpy as np
import pytest

pytest.importorskip("numba")

import aotc
from aotc.frontend.mlir import fetch
from aotc.kernels.jobs.pool import POOL
from aotc.options import Options
from aotc.tools.check import Checker
from aotc.tools.lint import lint

pytestmark = pytest.mark.cpu

TEXT = """func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  %y = stablehlo.sine %x : tensor<4xf32>
  return %y : tensor<4xf32>
}"""


def check(text, **flags):
    Checker(fetch(text), Options(**flags)).check([np.ones(4, np.float32)], bisect=True)


TOOLS = {"compile": aotc.compile, "lint": lint, "check": check}
WHERE = {name: ["inline", "fuse", "compiling kernels"][: 2 if name == "lint" else 3] for name in TOOLS}


def failing(error, where):
    def progress(done, total, what):
        if what == where:
            try:
                raise ZeroDivisionError
            except ZeroDivisionError as cause:
                raise error from cause

    return progress


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("error", [KeyError("mine"), OSError(28, "no room", "f"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize(("tool", "where"), [(tool, where) for tool in WHERE for where in WHERE[tool]])
def test_exceptions_of_a_progress_callback_propagate(tool, where, error, jobs, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(type(error)) as caught:
        TOOLS[tool](TEXT, progress=failing(error, where), cache=False, jobs=jobs)
    assert caught.value is error
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert error.__context__ is error.__cause__
    assert list(tmp_path.iterdir()) == []
    assert aotc.compile(TEXT, cache=False, jobs=jobs)  # the compiler processes are still in order
    assert len(POOL._idle) <= max(2, len(os.sched_getaffinity(0)))


def test_a_progress_callback_may_compile():
    """What fails in there is the callback's to handle."""
    seen = []

    def progress(done, total, what):
        if not seen:
            seen.append(what)
            with pytest.raises(KeyError):
                aotc.compile(TEXT, progress=failing(KeyError("inner"), "inline"), cache=False)

    assert aotc.compile(TEXT, progress=progress, cache=False)
    assert seen
