"""Every op with `?` for sizes, called with sizes that fit and that do not, before guard pages: see ``dynamic_ops``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.checklist_all import CASES
from support.dynamic_ops import NOT_RUN

from aotc.frontend.importers.elementwise import CHLO, DIRECT

ROOT = Path(__file__).parents[1]
ALIKE = [n for n in CASES if n in DIRECT or n in CHLO or n.startswith("chlo.broadcast_")]  # one rule for all of them
OTHERS = [n for n in CASES if n not in ALIKE and n not in NOT_RUN]
FIXED = ["stablehlo.add", "chlo.broadcast_add", *(n for n in OTHERS if len(CASES[n]) < 20)]
PARTS = 4


def run(names, count, forms):
    """Run rows of the checklist in a process of their own, and return what it says is wrong."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "support" / "dynamic_ops.py"), str(count), forms, *names],
        env={**os.environ, "AOTC_GUARD": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT.parent)])},
        capture_output=True, text=True, timeout=3000, check=False,
    )  # fmt: skip
    last = "\n".join(done.stdout.splitlines()[-2:])
    assert done.returncode == 0, f"the process ended with {done.returncode} after:\n{last}\n{done.stderr[-2000:]}"
    head, _, wrong = done.stdout.partition("\nWRONG ")
    assert "DONE fits" in head
    assert "DONE refused" in head
    return wrong.partition("\n")[2].strip()


@pytest.mark.cpu
@pytest.mark.parametrize("part", range(PARTS))
def test_sizes_that_fit_and_that_do_not(part):
    wrong = run(FIXED[part::PARTS], 2, "one")
    assert not wrong, wrong


@pytest.mark.slow
@pytest.mark.cpu
@pytest.mark.parametrize("part", range(3 * PARTS))
def test_every_form_and_many_sizes(part):
    wrong = run([*ALIKE, *OTHERS][part :: 3 * PARTS], 12, "every")
    assert not wrong, wrong
