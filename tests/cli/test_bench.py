"""``aotc bench``: intervals, callers at a time, kernels of calls, JSON; rows that say something."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import aotc
from aotc.vmfb.profile.latency import average, measure_concurrently, quantile, times_by_kernel
from aotc_cli.main import app

pytestmark = pytest.mark.cpu
X = np.linspace(-1, 1, 64 * 64, dtype=np.float32).reshape(64, 64)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "m.vmfb"
    path.write_bytes(aotc.compile(lambda x: jnp.sort(x @ x, 1), X))
    return path


def bench(*words):
    return CliRunner().invoke(app, ["bench", *map(str, words), "--seconds=0.05", "--rounds=2"])


def test_json_has_every_number_and_its_interval(bundle):
    done = bench(bundle, "--json", "--per-dispatch", "--concurrency=1,3", f"--against={bundle}")
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert len(said["bundles"]) == 2
    for one in said["bundles"]:
        for value, low, high in one["latency"].values():
            assert 0 < low <= value <= high
        assert [row["callers"] for row in one["throughput"]] == [1, 3]
        assert all(row["calls_per_second"][0] > 0 for row in one["throughput"])
        assert one["import_and_load"] > one["first_call"] > 0
        assert {d["kernel"] for d in one["dispatches"]} == {t.name for t in kernels(bundle)}
        assert all(d["runs"] == 1 and d["roofline"] > 0 for d in one["dispatches"])
        assert sum(d["share"] for d in one["dispatches"]) == pytest.approx(1)
    value, low, high = said["ratio"]
    assert low <= value <= high


def kernels(bundle):
    return aotc.load(bundle)._executable.kernel_texts()


def test_tables_name_kernels_and_callers(bundle):
    done = bench(bundle, "--roofline", "--throughput")
    assert done.exit_code == 0, done.output
    assert "load, warm" not in done.output
    assert "1 caller, calls/s" in done.output
    assert "of the roofline of the threads at work" in done.output
    assert all(t.name in done.output for t in kernels(bundle))


@pytest.mark.parametrize("text", ["x", "0", "1,,2", "1,2000"])
def test_invalid_numbers_of_callers_are_refused(bundle, text):
    done = bench(bundle, f"--concurrency={text}")
    assert done.exit_code == 2
    assert "expected numbers from 1 to 1024" in " ".join(done.output.split())


def test_confidence_intervals_cover_95_percent():
    """Of many samples of a known distribution 95 % of the intervals hold the number."""
    random = np.random.default_rng(0)
    for share in (0.5, 0.9):
        hits = 0
        for _ in range(400):
            x = quantile(random.random(200).tolist(), share)
            assert x.low <= x.value <= x.high
            hits += x.low <= share <= x.high
        assert hits >= 0.93 * 400
    hits = 0
    for _ in range(1000):
        x = average(random.normal(3, 1, 5).tolist())
        hits += x.low <= 3 <= x.high
    assert 0.93 * 1000 <= hits <= 0.97 * 1000
    assert average([2.0]).high == float("inf")
    assert quantile([1.0], 0.99) == (1.0, 1.0, 1.0)


def test_callers_run_concurrently_and_failures_are_reported():
    import threading

    gate, calls = threading.Barrier(3), []

    def call():
        gate.wait(10)
        calls.append(1)

    rate, times = measure_concurrently(call, 3, 0.0)
    assert len(calls) == len(times) == 3
    assert rate > 0
    with pytest.raises(ZeroDivisionError):
        measure_concurrently(lambda: 1 / 0, 2, 0.0)


def test_bench_counts_kernels_per_call(bundle):
    module = aotc.load(bundle, threads=1)
    with module.profile() as recording:
        for _ in range(4):
            module.invoke("main", X)
    rows = times_by_kernel(recording.dispatches, 4)
    assert all(row.runs == 1 and row.threads == 1 for row in rows)
    assert [row.share for row in rows] == sorted((row.share for row in rows), reverse=True)
