"""``aotc tune``: choices of thresholds, their record, and the search for those that make a bundle faster."""

import json
import re
import sys
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import aotc
from aotc.diagnostics import AotcWarning, CompileError
from aotc.ir.dims.algebra import sym
from aotc.lowering.threshold import BlockSize, Limit, decided_by
from aotc.lowering.tuning import (
    SYMBOLIC,
    Choice,
    Decisions,
    choice_rows,
    choices_of,
    read_tuning_record,
    thresholds_by_name,
    tuning_record_text,
)
from aotc.targets import host_target
from aotc.tools import tune as tune_module
from aotc.tools import tune_trial
from aotc.tools.tune_trial import TrialProcess, TrialSetup, differing_result
from aotc_cli.main import app

pytestmark = pytest.mark.cpu

RNG = np.random.default_rng(0)
W, X = RNG.standard_normal((64, 96)).astype("float32"), RNG.standard_normal((24, 64)).astype("float32")
FEW_TILE = Choice("plans.cpu_tiles.TILE_ROWS", None, 2)


def layer(w, x):
    return jnp.tanh(x @ w).sum(0)


def record(*choices, **changed):
    return {
        "format": 1, "producer": "a test", "program": "", "target": host_target().name, "function": "main", "sizes": {},
        "machine": {}, "seconds": {"before": 1.0, "after": 0.5}, "choices": choice_rows(choices), **changed,
    }  # fmt: skip


@pytest.fixture(scope="module")
def bundle():
    return aotc.compile(layer, W, X)


def test_threshold_names_start_with_their_module():
    names = thresholds_by_name()
    assert isinstance(names["plans.matmul.THIN_ROWS"], Limit)
    assert isinstance(names["plans.cpu_tiles.TILE_ROWS"], BlockSize)


def test_decisions_are_recorded_and_override_thresholds():
    limit, block = (thresholds_by_name()[n] for n in ("plans.matmul.THIN_ROWS", "plans.cpu_tiles.TILE_ROWS"))
    own = limit.holds(3), block.value
    decisions = Decisions((Choice("plans.matmul.THIN_ROWS", 3, not own[0]), FEW_TILE))
    with decided_by(decisions):
        assert (limit.holds(3), limit.holds(10**9), limit.holds(sym("b")), block.value) == (not own[0], False, False, 2)
    assert (limit.holds(3), block.value) == own
    assert decisions.answers == {
        ("plans.matmul.THIN_ROWS", 3): not own[0], ("plans.matmul.THIN_ROWS", 10**9): False,
        ("plans.matmul.THIN_ROWS", SYMBOLIC): False, ("plans.cpu_tiles.TILE_ROWS", None): 2,
    }  # fmt: skip


def test_compile_with_a_tuning_record_applies_its_choices(bundle):
    tuned = aotc.compile(layer, W, X, tuning=record(FEW_TILE))
    assert tuned != bundle
    assert tuned == aotc.compile(layer, W, X, tuning=record(FEW_TILE), cache=False)
    np.testing.assert_allclose(tuned.load()(W, X), np.tanh(X @ W).sum(0), rtol=1e-4, atol=1e-4)
    assert aotc.upgrade(tuned) == tuned
    assert aotc.upgrade(tuned, tuning={}) == bundle


def test_a_record_for_another_target_has_no_effect_on_the_kernels(bundle):
    other = aotc.compile(layer, W, X, tuning=record(FEW_TILE, target="cpu:x86-64-v2"), source=False)
    assert other == aotc.compile(layer, W, X, source=False)


def test_tuning_records_round_trip_as_text():
    rows = (FEW_TILE, Choice("plans.matmul.THIN_ROWS", 8, False), Choice("plans.matmul.THIN_ROWS", SYMBOLIC, True))
    kept = record(*rows)
    assert read_tuning_record(tuning_record_text(kept)) == kept
    assert choices_of(kept) == rows
    assert read_tuning_record(tuning_record_text(record())) == record()


@pytest.mark.parametrize(
    ("wrong", "part"),
    [
        ({"format": 7}, "its format is 7"),
        ({"choices": [{"threshold": "x", "value": True}]}, "the value of x is True"),
        ({"choices": [{"threshold": "x", "value": 0}]}, "the value of x is 0"),
        ({"choices": [{"threshold": "x", "size": 3, "value": 5}]}, "the value of x is 5"),
        ({"choices": 3}, "choices"),
        ({"target": None}, "target"),
    ],
)
def test_a_damaged_record_is_refused(wrong, part):
    with pytest.raises(CompileError, match=f"this is not a tuning record: .*{part}"):
        aotc.compile(layer, W, X, tuning=record() | wrong)


def test_a_record_of_another_version_warns_about_unknown_thresholds():
    with pytest.warns(AotcWarning, match="no threshold plans.gone.OLD_ROWS"):
        aotc.compile(layer, W, X, tuning=record(Choice("plans.gone.OLD_ROWS", 3, True)), cache=False)


def test_an_untrusted_bundle_is_compiled_without_its_record():
    tuned = aotc.compile(layer, W, X, tuning=record(FEW_TILE))
    module = aotc.load(tuned, untrusted=True)
    np.testing.assert_allclose(module(W, X), np.tanh(X @ W).sum(0), rtol=1e-4, atol=1e-4)


def test_the_search_undoes_a_bad_choice(monkeypatch):
    """Tiles of one row make this matmul several times slower: the search finds larger ones.

    Candidates about tiles come first here, as the budget is small.
    """
    order = tune_module._Search._shuffled
    monkeypatch.setattr(
        tune_module._Search, "_shuffled",
        lambda search, choices: sorted(order(search, choices), key=lambda c: "cpu_tiles" not in c.threshold),
    )  # fmt: skip
    monkeypatch.setattr(tune_module, "LOWERING_SHARE", 0.05)
    x = RNG.standard_normal((240, 64)).astype("float32")
    slow = aotc.compile(layer, W, x, tuning=record(Choice("plans.cpu_tiles.TILE_ROWS", None, 1)))
    result = aotc.tune(slow, budget=12, threads=1)
    assert result.ratio[2] < 1, result
    assert {c.threshold: c.value for c in result.choices}["plans.cpu_tiles.TILE_ROWS"] > 1
    assert result.after < result.before
    np.testing.assert_allclose(result.bundle.load()(W, x), np.tanh(x @ W).sum(0), rtol=1e-4, atol=1e-3)
    assert aotc.upgrade(slow, tuning=result.record).load()(W, x).shape == (96,)
    assert re.search(r"after: \d+\.\d\dx faster \[\d+\.\d\dx, \d+\.\d\dx\]", str(result))
    assert "of the time" not in str(result)


def test_candidates_with_wrong_results_or_failures_are_rejected(bundle, monkeypatch, tmp_path):
    """Each candidate computes another function here, or its process ends."""
    wrong = aotc.compile(lambda w, x: layer(w, x) + 1, W, X, source=False)
    monkeypatch.setattr(tune_module._Search, "_compile", lambda *_: bytes(wrong))
    result = aotc.tune(bundle, budget=2, threads=1)
    assert {t.outcome for t in result.trials} >= {"wrong results"}
    assert result.bundle == bundle
    assert result.choices == ()


@pytest.fixture
def trials(bundle, tmp_path):
    """A trial process for the bundle, and the path of the bundle."""
    path = tmp_path / "m.vmfb"
    bundle.save(path)
    np.savez(tmp_path / "arguments.npz", W, X)
    np.savez(tmp_path / "expected.npz", bundle.load()(W, X))
    files = (str(tmp_path / "arguments.npz"), str(tmp_path / "expected.npz"))
    process = TrialProcess(TrialSetup("main", *files, ["float32"] * 2, ["float32"], None, 1), str(tmp_path / "log"))
    yield process, str(path)
    process.close()


def test_a_trial_process_runs_many_trials(trials):
    process, path = trials
    assert 0.5 < process.run(path, path)["ratio"] < 2
    child = process._child
    assert 0.5 < process.run(path, path)["ratio"] < 2
    assert process._child is child


def test_a_trial_that_crashes_or_does_not_end_is_a_failure(trials, monkeypatch):
    """The next trial has a new process."""
    process, path = trials
    for code, why in (("import os; os._exit(3)", "exit status 3"), ("raise ValueError('it broke')", "it broke"),
                      ("import time; time.sleep(60)", "it took more than 0.5 s")):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(tune_trial, "python_command", lambda *_, code=code: [sys.executable, "-c", code])
            assert why in process.run(path, path, seconds=0.5 if "sleep" in code else 30)["failed"]
        assert process._child is None
    assert process.run(path, path)["ratio"] > 0


def test_a_missing_candidate_is_a_failure(trials):
    process, path = trials
    assert "none.vmfb" in process.run("none.vmfb", path)["failed"]
    assert process.run(path, path)["ratio"] > 0


def test_an_interrupt_ends_the_search_with_what_it_has_found(bundle, monkeypatch):
    run_trial, trials = tune_module._Search._run_trial, []

    def interrupted(search, process, candidate):
        if len(trials) == 2:
            raise KeyboardInterrupt
        trials.append(run_trial(search, process, candidate))
        return trials[-1]

    monkeypatch.setattr(tune_module._Search, "_run_trial", interrupted)
    result = aotc.tune(bundle, budget=60, threads=1)
    assert [t for t in result.trials if t.outcome != "same code"] == trials
    assert result.untried > 0
    assert "left" in str(result)


def test_an_interrupt_in_a_trial_ends_its_process(trials, monkeypatch):
    process, path = trials

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tune_trial, "select", SimpleNamespace(select=interrupt))
        with pytest.raises(KeyboardInterrupt):
            process.run(path, path)
    assert process._child is None
    assert process.run(path, path)["ratio"] > 0


def test_models_with_ops_unknown_to_xla_are_compared_with_the_reference():
    """A traced function has ``chlo.square``."""
    result = aotc.tune(aotc.compile(lambda x: jnp.square(x).sum(0), X), inputs=[X], budget=2, threads=1)
    np.testing.assert_allclose(result.bundle.load()(X), (X * X).sum(0), rtol=1e-5)
    assert result.trials


def test_tuned_results_are_compared_by_their_dtype():
    want = [np.float32([1, 2]), np.int32([3])]
    assert differing_result([np.float32([1, 2.00001]), np.int32([3])], want) == ""
    assert "result 0 is 2.1" in differing_result([np.float32([1, 2.1]), np.int32([3])], want)
    assert "result 1 is 4" in differing_result([np.float32([1, 2]), np.int32([4])], want)


def test_invalid_tune_arguments_are_refused(bundle):
    with pytest.raises(aotc.ArgumentError, match=r"(?s)budgt.*budget"):
        aotc.tune(bundle, budgt=3)
    for budget in (0, -1, True, "60", float("nan"), float("inf")):
        with pytest.raises(aotc.ArgumentValueError, match="budget is"):
            aotc.tune(bundle, budget=budget)
    with pytest.raises(aotc.BundleError, match="no source"):
        aotc.tune(aotc.compile(layer, W, X, source=False))
    with pytest.raises(aotc.CallError, match="nothere"):
        aotc.tune(bundle, function="nothere")


def test_tune_command_writes_the_bundle_and_the_record(bundle, tmp_path):
    bundle.save(tmp_path / "m.vmfb")
    out, kept = tmp_path / "t.vmfb", tmp_path / "t.json"
    done = CliRunner().invoke(
        app, ["tune", str(tmp_path / "m.vmfb"), "-o", str(out), f"--record={kept}", "--budget=2", "--threads=1"]
    )
    assert done.exit_code == 0, done.output
    assert "tried" in done.output
    assert json.loads(kept.read_text())["target"] == host_target().name
    np.testing.assert_allclose(aotc.load(out)(W, X), np.tanh(X @ W).sum(0), rtol=1e-4, atol=1e-4)
    (tmp_path / "m.mlir").write_bytes(bundle.source)
    again = CliRunner().invoke(app, ["compile", str(tmp_path / "m.mlir"), "-o", str(out), f"--tuning={kept}", "-q"])
    assert again.exit_code == 0, again.output
    (tmp_path / "broken.json").write_text("{")
    for name, text in (("m.vmfb", "the bundle was not tuned"), ("broken.json", "not a tuning record: it is not JSON"),
                       ("none.json", "cannot read the tuning record")):  # fmt: skip
        wrong = CliRunner().invoke(app, ["compile", str(tmp_path / "m.mlir"), "-o", "x", f"--tuning={tmp_path / name}"])
        assert text in str(wrong.exception)


def test_a_record_that_cannot_be_written_is_refused_before_the_search(bundle, tmp_path, monkeypatch):
    bundle.save(tmp_path / "m.vmfb")
    monkeypatch.setattr(aotc, "tune", lambda *_, **__: pytest.fail("the search began"))
    record = tmp_path / "nodir" / "t.json"
    done = CliRunner().invoke(
        app, ["tune", str(tmp_path / "m.vmfb"), "-o", str(tmp_path / "t.vmfb"), f"--record={record}"]
    )
    assert isinstance(done.exception, aotc.CompileError), done.output
    assert f"there is no folder {record.parent}" in str(done.exception)
    assert "--record" in str(done.exception)
