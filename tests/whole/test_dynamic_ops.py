"""Every op with `?` for sizes, called with sizes that fit and that do not, before guard pages: see ``dynamic_ops``."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from support.checklists.checklist_all import CASES
from support.dynamic_ops import NOT_RUN
from support.dynamic_ops import text_of as row_text
from support.sizes.dynamic_exports import EXPORTS, TEXTS, text_of

import aotc
from aotc.diagnostics import CompileError
from aotc.frontend.importer import import_model
from aotc.frontend.importers.elementwise import CHLO, COMPLEX_CHLO, DIRECT
from aotc.ir.opset import OPS
from aotc.ir.tensor.ir import walk

ROOT = Path(__file__).parents[1]
ALIKE = [n for n in CASES if n in DIRECT or n in CHLO or n.startswith("chlo.broadcast_")]  # one rule for all of them
OTHERS = [n for n in CASES if n not in ALIKE and n not in NOT_RUN]
FIXED = ["stablehlo.add", "chlo.broadcast_add", *(n for n in OTHERS if len(CASES[n]) < 20)]
PARTS, MANY_PARTS = 2, 12  # each a process that starts XLA and compilers


def run(script, *arguments):
    """Run programs in a process of their own, and return what it says is wrong."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "support" / script), *arguments],
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
def test_fitting_sizes_run_and_others_are_refused(part):
    wrong = run("dynamic_ops.py", "2", "one", *FIXED[part::PARTS])
    assert not wrong, wrong


@pytest.mark.slow
@pytest.mark.cpu
@pytest.mark.parametrize("part", range(MANY_PARTS))
def test_every_dynamic_form_matches_the_reference_for_many_sizes(part):
    wrong = run("dynamic_ops.py", "12", "every", *[*ALIKE, *OTHERS][part::MANY_PARTS])
    assert not wrong, wrong


SLOW = pytest.mark.slow
MORE = [*EXPORTS, *TEXTS]


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("part", "count"), [(slice(None), "4"), *(pytest.param(slice(p, None, 2), "100", marks=SLOW) for p in range(2))],
    ids=["all", "0-100", "1-100"],
)  # fmt: skip
def test_ops_without_a_table_row_match_the_reference(part, count):
    wrong = run("sizes/dynamic_exports.py", count, *MORE[part])
    assert not wrong, wrong


# Of no size, of sizes that are always known, or called elsewhere.
NOT_OF_UNKNOWN_SIZE = {
    "custom_call": "a function of the user's, which gets the sizes: it demands what it likes",
    "fail": "of checks in callbacks: a scalar",
    "transfer": "of devices, which the reference does not know: tests/lowering/test_devices.py, symbolic sizes",
}

_COMPLEX = "tensor<?xcomplex<f32>>"
_CALLS = "\n".join(f"%{ours} = {op} %x : {_COMPLEX} -> {_COMPLEX}" for op, ours in COMPLEX_CHLO.items())
_RESULTS = ", ".join(f"%{ours}" for ours in COMPLEX_CHLO.values())
_TYPES = ", ".join([_COMPLEX] * len(COMPLEX_CHLO))
INVERSES = f"func.func @main(%x: {_COMPLEX}) -> ({_TYPES}) {{\n{_CALLS}\nreturn {_RESULTS} : {_TYPES} }}"
"""The checklist has these functions on real numbers, for which they are expanded."""


@pytest.mark.parametrize("n", [0, 1, 7])
def test_complex_inverse_functions_of_symbolic_size_match(n):
    rng = np.random.default_rng(n)
    x = (rng.standard_normal(n) + 1j * rng.standard_normal(n)).astype("c8")
    for got, name in zip(aotc.load(aotc.compile(INVERSES))(x), COMPLEX_CHLO.values(), strict=True):
        np.testing.assert_allclose(got, getattr(np, f"arc{name[1:]}")(x.astype("c16")), rtol=1e-6, atol=1e-7)


@pytest.mark.ir
def test_every_op_of_the_table_is_called_with_unknown_sizes():
    seen = {op.name for module in imported() for f in module.functions.values() for op in walk(f.body)}
    made = {name for name, spec in OPS.items() if spec.added_by}  # their sizes are those of what an importer made
    assert set(OPS) - seen - made == set(NOT_OF_UNKNOWN_SIZE)


def imported():
    """Yield the programs that the tests here call: of each row of the checklist the first form, and all others."""
    for row in (row for name in ALIKE + OTHERS for row in CASES[name]):
        with suppress(CompileError):  # MLIR or aotc wants to know this size: there is nothing to call
            yield import_model(row_text(row, [n for n, a in enumerate(row[1]) if a.ndim], False).encode())
    yield from (import_model(text_of(name).encode()) for name in MORE)
    yield import_model(INVERSES.encode())
