"""Every case of jax's test harnesses, and a call of each public function, beside XLA on the CPU.

``pytest -m conformance`` runs all of it (``-n 2`` to use two processes) and writes ``docs/conformance.md``;
without the marker a fixed twentieth runs. ``--target cuda:sm_90`` runs them on a GPU and writes
``docs/conformance_cuda.md``. A case that XLA itself does not run is skipped with what it said.
"""

import zlib

import pytest

pytest.importorskip("numba")
pytest.importorskip("absl")

from conformance import functions, harnesses
from conformance.case import NotRun, run

pytestmark = [pytest.mark.cpu]


def is_in_the_sample(name):
    """Choose by a checksum of the name: the same twentieth everywhere, spread over all groups."""
    return zlib.crc32(name.encode()) % 20 == 0


def parameters(cases):
    part, whole = [pytest.mark.conformance], [pytest.mark.conformance, pytest.mark.slow]
    return [pytest.param(c, id=c.name, marks=part if is_in_the_sample(c.name) else whole) for c in cases]


@pytest.fixture
def agree(request, record_property):
    """Compare one case on the target that the command line names."""

    def compare(case):
        record_property("group", case.label)
        if case.skip:
            pytest.skip(f"jax: {case.skip}")
        try:
            verdict = run(case, request.config.getoption("--target"))
        except NotRun as reason:
            pytest.skip(str(reason))
        record_property("worst", verdict.worst)
        assert not verdict.problem, verdict.problem

    return compare


@pytest.mark.parametrize("case", parameters(harnesses.cases()))
def test_harness(case, agree):
    agree(case)


@pytest.mark.parametrize("case", parameters(functions.cases()))
def test_function(case, agree):
    agree(case)
