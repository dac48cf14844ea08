"""Shared fixtures: ``--update`` rewrites golden texts (the values are checked all the same)."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update", action="store_true", help="rewrite the expected text of golden cases")


@pytest.fixture
def update(request: pytest.FixtureRequest) -> bool:
    """Should golden files be rewritten?"""
    return bool(request.config.getoption("--update"))
