"""Profilers of others: py-spy sees kernels by name, and Perfetto itself reads our traces. Each needs its tool."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import aotc
from aotc_cli.main import app

pytestmark = pytest.mark.cpu

X = np.random.default_rng(0).standard_normal((512, 512)).astype("float32")
BUSY = """
import sys, time, numpy as np, aotc
module, x, end = aotc.load(sys.argv[1], threads=1), np.load(sys.argv[2]), time.monotonic() + 30
print("begun", flush=True)
while time.monotonic() < end:
    module.invoke("main", x)
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """A product, whose tiles are functions of their own, and loops that take longer."""
    path = tmp_path_factory.mktemp("profilers") / "m.vmfb"
    path.write_bytes(aotc.compile(lambda x: (jnp.sin(jnp.exp(jnp.cos(x * 3))).T, x @ X), X))
    np.save(path.with_name("x.npy"), X)
    return path


@pytest.fixture
def busy(bundle, tmp_path):
    """A process that calls the module all the time, with names for profilers."""
    environment = {**os.environ, "AOTC_PERF": str(tmp_path / "perf")}
    words = [sys.executable, "-c", BUSY, str(bundle), str(bundle.with_name("x.npy"))]
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "begun\n"
        yield process
        process.kill()


def spied(*words):
    """Run py-spy; return what it writes."""
    spy = shutil.which("py-spy")
    if spy is None:
        pytest.skip("it needs py-spy: pip install py-spy")
    done = subprocess.run([spy, *words], capture_output=True, text=True, timeout=60)
    if "ermission" in done.stderr:
        pytest.skip(f"py-spy may not look at processes here: {done.stderr[:200]}")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_py_spy_records_kernels_by_name(bundle, busy, tmp_path):
    names = {t.name for t in aotc.load(bundle)._executable.kernel_texts()}
    out = tmp_path / "stacks.txt"
    spied("record", "--native", "--duration=3", "--format=raw", f"--output={out}", f"--pid={busy.pid}")
    leaves = {line.rpartition(" ")[0].rpartition(";")[2].partition(" ")[0] for line in out.read_text().splitlines()}
    assert leaves & {n for n in names if "matmul" not in n}, leaves
    assert any(leaf.startswith("tile_f32") for leaf in leaves), leaves
    assert "LoadedModule.invoke" in out.read_text()


def test_py_spy_dumps_a_kernel_by_name(bundle, busy):
    names = {t.name for t in aotc.load(bundle)._executable.kernel_texts()}
    for _ in range(40):
        stack = spied("dump", "--native", f"--pid={busy.pid}")
        if found := re.search(r"^ +(\S+) \(aotc-\w+\.so\)", stack, re.MULTILINE):
            assert found[1] in names or found[1].startswith("tile_")
            return
    raise AssertionError(stack)


def test_perfetto_reads_a_trace(bundle, tmp_path):
    """Every slice and every step of the memory is in Perfetto's own tables, and it skipped none."""
    processor = pytest.importorskip("perfetto.trace_processor", reason="it needs perfetto: pip install perfetto")
    shell = os.environ.get("TRACE_PROCESSOR", "")
    if not Path(shell).is_file():
        pytest.skip("it needs Perfetto's program: TRACE_PROCESSOR=PATH, from https://get.perfetto.dev/trace_processor")
    out = tmp_path / "trace.json"
    done = CliRunner().invoke(app, ["profile", str(bundle), "-q", "--repeat=1", "--calls=2", "-o", str(out)])
    assert done.exit_code == 0, done.output
    events = json.loads(out.read_text())["traceEvents"]
    with processor.TraceProcessor(trace=str(out), config=processor.TraceProcessorConfig(bin_path=shell)) as read:
        slices = sorted((row.name, row.dur) for row in read.query("select name, dur from slice"))
        counters = [row.value for row in read.query("select value from counter order by ts")]
        lost = [row.name for row in read.query("select name from stats where severity = 'error' and value > 0")]
    wanted = sorted((e["name"], round(1000 * e["dur"])) for e in events if e["ph"] == "X")
    assert [name for name, _ in slices] == [name for name, _ in wanted]
    np.testing.assert_allclose([t for _, t in slices], [t for _, t in wanted], atol=2)
    assert counters == [e["args"]["bytes"] for e in events if e["ph"] == "C"]
    assert lost == []
