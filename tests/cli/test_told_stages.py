"""What compilation is at: progress over all stages, and times that add up."""

import re
import time
from itertools import pairwise

import jax.numpy as jnp
import numpy as np
import pytest

import aotc
from aotc import progress as stages
from aotc.options import Options
from aotc.pipeline import PASSES
from aotc_cli.shared.progress_bar import StageProgress, duration_text, seconds_left_in_stage, time_left_text

pytestmark = pytest.mark.cpu
X = np.ones((8, 8), np.float32)
LINE = re.compile(r" *(\d*) ([\w -]+?) +([\d.]+) ms")


def heard(**flags):
    """What a compilation tells, in order."""
    duration_text = []
    function = lambda x: jnp.sort(jnp.tanh(x @ x) * flags.get("jobs", 0), 1)
    aotc.compile(function, X, progress=lambda *row: duration_text.append(row), cache=False, **flags)
    return duration_text


@pytest.mark.parametrize("target", ["cpu:x86-64-v3", "cpu:x86-64-v3,cpu:x86-64-v4", "cpu:x86-64-v3,cuda:sm_90"])
def test_progress_increases_over_all_stages(target):
    rows, way = heard(target=target), StageProgress(target.count(",") + 1)
    parts = [way.update(*row) for row in rows]
    assert parts == sorted(parts)
    assert parts[0] == 0
    assert 0.9 < parts[-1] < 1  # what comes after the last report is not done yet
    assert max(b - a for a, b in pairwise(parts)) < 0.4
    names = list(dict.fromkeys(what for *_, what in rows))
    assert names[:3] == ["importing the compiler", "reading the model", "importing the model"]
    assert [n for n in names if n not in {p.name for p in PASSES}][3:] == [
        "lowering", "compiling kernels", "linking", "keeping the model", "writing the bundle", "checking the bundle"
    ]  # fmt: skip


def test_every_stage_has_a_progress_share():
    from aotc_cli.shared import progress_bar as progress

    told = {what for *_, what in heard(target="cpu:x86-64-v3")}
    assert told - {p.name for p in PASSES} == set(progress._SHARES) - {progress.PASSES}


def test_stage_times_add_up_to_the_total(capsys):
    begin = time.perf_counter()
    heard(timings=True, target="cpu:x86-64-v3", jobs=1)
    wall = time.perf_counter() - begin
    lines = [LINE.fullmatch(row) for row in capsys.readouterr().err.splitlines()]
    rows = [(m[2], float(m[3])) for m in lines if m]
    assert [n for n, _ in rows if n == "total"] == ["total"]
    assert sum(ms for name, ms in rows[:-1]) == pytest.approx(rows[-1][1], abs=0.06 * len(rows))
    assert rows[-1][1] / 1e3 == pytest.approx(wall, rel=0.1, abs=0.05)
    assert [m[1] for m in lines if m and m[1]] == [str(n + 1) for n in range(len(PASSES))]


def test_stages_of_one_name_and_nested_blocks_are_merged(capsys):
    options = Options(timings=True)
    with stages.timed_stages(True):
        stages.begin_stage(options, "a")
        with stages.timed_stages(True):
            stages.begin_stage(options, "a")
            stages.begin_stage(options, "b", 3, 4)
    names = [LINE.fullmatch(row)[2] for row in capsys.readouterr().err.splitlines()]
    assert names == [stages.FIRST, "a", "b", "total"]
    with stages.timed_stages(False):
        stages.begin_stage(options, "a")
    assert capsys.readouterr().err == ""


def test_a_failure_ends_the_last_stage(capsys):
    with pytest.raises(ZeroDivisionError), stages.timed_stages(True):
        raise ZeroDivisionError
    assert "total" in capsys.readouterr().err


def test_the_remaining_time_is_estimated():
    assert time_left_text(0.01, 100) == time_left_text(0.5, 0.1) == ""
    assert time_left_text(0.5, 7) == "about 7 s left"
    assert duration_text(600) == "about 10 min left"
    assert duration_text(1) == "about 1 s left"
    assert duration_text(0.9) == time_left_text(0.99, 30) == ""
    assert seconds_left_in_stage(2, 10, 4) == 0
    assert seconds_left_in_stage(4, 8, 4) == 8
