"""Fixtures of the tests of tools."""

import pytest

from aotc.lowering.program.owners import alternate_buffers


@pytest.fixture
def no_unrolling(monkeypatch):
    """Compile loops as the model has them, not several iterations as one."""
    monkeypatch.setattr(alternate_buffers, "ALTERNATION_PERIOD", 1)
