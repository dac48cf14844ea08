"""Every op that jaxlib's MLIR registers is imported, or refused by its name and line with a hint."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support import op_sweep

pytestmark = pytest.mark.ir

UNKNOWN = ("scf", "cf", "func", "ub", "sdy")
"""Dialects of which few ops are valid without a region or a symbol."""


@pytest.mark.parametrize("dialect", op_sweep.DIALECTS)
def test_each_op_is_imported_or_refused_by_name(dialect):
    command = [sys.executable, op_sweep.__file__, dialect]
    child = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    lines = [json.loads(line) for line in child.stdout.splitlines()]
    assert child.returncode == 0, f"{lines[-1] if lines else ''}\n{child.stderr[-2000:]}"
    rows = {row["op"]: row["outcomes"] for row in lines if "op" in row}
    assert rows
    wrong = {op: outcomes for op, outcomes in rows.items() if not outcomes.keys() <= {"imported", "refused"}}
    assert not wrong
    tried = [op for op, outcomes in rows.items() if outcomes]
    assert len(tried) > len(rows) // 3 or dialect in UNKNOWN, f"{len(tried)} of {len(rows)} ops have a valid form"
