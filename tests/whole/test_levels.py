"""O0 to O3 agree on the conformance suite: a fixed part of the cases, all of them with ``-m "slow or not slow"``."""

import zlib

import pytest

pytest.importorskip("numba")
pytest.importorskip("absl")

from conformance import functions, harnesses
from conformance.case import NotRun
from conformance.levels import disagreement

pytestmark = [pytest.mark.cpu]


def in_the_part(name):
    """Choose by a checksum of the name: the same cases everywhere, spread over all groups."""
    return zlib.crc32(name.encode()) % 100 == 7


def parameters():
    cases = [*harnesses.cases(), *functions.cases()]
    return [pytest.param(c, id=c.name, marks=[] if in_the_part(c.name) else pytest.mark.slow) for c in cases]


@pytest.mark.parametrize("case", parameters())
def test_all_optimization_levels_agree(case):
    if case.skip:
        pytest.skip(f"jax: {case.skip}")
    try:
        assert not (problem := disagreement(case)), problem
    except NotRun as reason:
        pytest.skip(str(reason))
