"""Random programs at real sizes: a fixed part here, more by ``python tests/support/sizes/run.py``.

They run in a process of their own, each array between pages that no one may touch: a kernel that reads or writes beside
one ends it, and the last program named is the one.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.sizes import run
from support.sizes.draw import Draw, Program

pytestmark = pytest.mark.cpu
SCRIPT = Path(run.__file__)


def programs(*options):
    environment = {**os.environ, "AOTC_GUARD": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"ended with {done.returncode}\n{done.stdout}\n{done.stderr[-2000:]}"
    return done.stdout


LEVELS = ["2", *(pytest.param(level, marks=pytest.mark.slow) for level in "013")]


@pytest.mark.parametrize("level", LEVELS)
def test_random_programs_at_real_sizes_are_right(level):
    assert programs("--seed", "0", "--count", "36", "--level", level).endswith("36 programs, 0 wrong\n")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
def test_many_random_programs_at_real_sizes_are_right(seed):
    assert programs("--seed", str(seed), "--count", "240").endswith("240 programs, 0 wrong\n")


def test_random_programs_depend_only_on_the_seed():
    for number in range(len(run.FAMILIES)):
        one, other = run.draw(5, number), run.draw(5, number)
        assert one.text == other.text
        assert all(a.tobytes() == b.tobytes() for a, b in zip(one.arguments, other.arguments, strict=True))


def test_one_wrong_element_is_found():
    """The comparison is of the program with itself in float64: a program that sees its own type gives it away."""

    def function(x):
        return x.at[7].add(1e-3) if x.dtype == "float32" else x

    x = Draw(0).values(64)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        run.compare(Program("planted", function, [x], 64), level=2)
    run.compare(Program("as it is", lambda x: -x, [x], 64), level=2)
