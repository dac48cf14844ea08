"""``aotc bench --ranks``: the latency of a gang, and that of the slowest rank."""

import json

import pytest
from support.small_sharded import bundle

import aotc

pytestmark = pytest.mark.cpu


def test_bench_of_a_gang_reports_its_slowest_rank():
    found = aotc.bench(bytes(bundle(2)), seconds=0.1, rounds=2, ranks=2)
    (one,) = found.bundles
    assert one.calls > 1
    assert 0 < one.slowest_rank["p50"].value <= one.latency["p50"].value
    assert "p50 of the slowest rank" in str(found)
    assert one.memory_after_load > 1 << 20


def test_bench_of_a_gang_measures_only_latency():
    with pytest.raises(aotc.CallError, match="of a gang only the latency is measured"):
        aotc.bench(bytes(bundle(2)), ranks=2, per_dispatch=True)


def test_bench_prints_the_slowest_rank_as_json(tmp_path):
    from typer.testing import CliRunner

    from aotc_cli.main import app

    bundle(2).save(tmp_path / "model.vmfb")
    words = ["bench", str(tmp_path / "model.vmfb"), "--ranks=2", "--seconds=0.1", "--rounds=1", "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["bundles"][0]["slowest_rank"]["p90"]
    done = CliRunner().invoke(app, [*words, "--device=cpu"])
    assert done.exit_code == 2
    assert "it is for a bundle of one device" in done.output
