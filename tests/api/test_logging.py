"""The logger ``aotc``: stages, caches and loading; silent and without an import unless the program uses logging."""

import logging
import subprocess
import sys

import numpy as np
import pytest

import aotc
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.device import choose_variant

pytestmark = pytest.mark.cpu
X = np.ones((4, 3), np.float32)


def test_stages_kernels_and_loading_are_logged(caplog):
    with caplog.at_level(logging.DEBUG, "aotc"):
        data = aotc.compile(lambda x: x * 2.5 + 1, X, cache=False)
        module = aotc.load(data)
    text = caplog.text
    assert "pass 1 of " in text
    assert "kernels are in the cache" in text
    assert f"compiled for {data.targets[0]} in " in text
    assert f"<bytes>: loaded for cpu:0, target {data.targets[0]}, in " in text
    assert {record.levelno for record in caplog.records} == {logging.DEBUG, logging.INFO}
    caplog.clear()
    with caplog.at_level(logging.DEBUG, "aotc"):
        module(X)
    assert not caplog.records  # calls log nothing


def test_summaries_are_logged_at_info(caplog):
    with caplog.at_level(logging.INFO, "aotc"):
        aotc.load(aotc.compile(lambda x: x - 2, X, cache=False))
    assert [r.getMessage().partition(" ")[2].split()[0] for r in caplog.records] == ["model:", "loaded"]


def test_variants_that_do_not_run_here_are_logged(caplog, monkeypatch):
    data = aotc.compile(lambda x: x + 3, X, target="cpu:x86-64-v3,cuda:sm_90", cache=False)
    with caplog.at_level(logging.DEBUG, "aotc"):
        choose_variant(open_bundle(data), "cpu")
        caplog.clear()
        choose_variant(open_bundle(data), None)
    assert "cuda:sm_90" in caplog.text or not any("no use" in r.getMessage() for r in caplog.records)


def test_logging_is_silent_by_default(tmp_path):
    aotc.compile(lambda x: x + 1, X, output=tmp_path / "m.vmfb")
    code = (
        "import sys, numpy as np, aotc\n"
        f"aotc.load({str(tmp_path / 'm.vmfb')!r})(np.ones((4, 3), 'float32'))\n"
        "assert 'logging' not in sys.modules, 'imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
