"""Test files have names of their own."""

from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.ir

TESTS = Path(__file__).parents[1]


def test_no_two_test_files_have_one_name():
    """Most folders of tests are no packages, so pytest imports a file by its name: the second would be the first."""
    counts = Counter(path.name for path in TESTS.rglob("test_*.py"))
    assert {name for name, count in counts.items() if count > 1} == set()
