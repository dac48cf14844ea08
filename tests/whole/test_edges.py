"""Elementwise ops on edge values: within the bounds of ``tests/conformance/edge_bounds.py`` from exact results.

``pytest -m conformance`` runs every op on every dtype; without the marker a fixed tenth runs. The table of all errors,
with XLA's, is ``docs/edges.md``.
"""

import zlib

import pytest

pytest.importorskip("numba")
pytest.importorskip("mpmath")

from conformance.edges import bound_of, cases, measure

pytestmark = [pytest.mark.cpu]


def parameters():
    part, whole = [pytest.mark.conformance], [pytest.mark.conformance, pytest.mark.slow]
    chosen = lambda name: zlib.crc32(name.encode()) % 10 == 0
    return [pytest.param(c, id=c.name, marks=part if chosen(c.name) else whole) for c in cases()]


@pytest.mark.parametrize("case", parameters())
def test_edge_values(case, request, record_property):
    found = measure(case, request.config.getoption("--target"))
    record_property("group", f"edges.{case.operation.name}")
    record_property("worst", found.own)
    problem = f"{case.name} of {found.where} is {found.got}, expected {found.want}: {found.own:.4g} ulp"
    assert found.own <= bound_of(case).ulp, f"{problem}; {found.count} such"
