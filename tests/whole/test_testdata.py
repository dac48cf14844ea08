"""StableHLO's own test data: within 3 units in the last place or nearer to mpmath; sums within two roundings."""

import pytest

pytest.importorskip("numba")
pytest.importorskip("mpmath")

from conformance.testdata import FOLDER, measure, measure_sum, sum_of

pytestmark = [pytest.mark.cpu]


@pytest.mark.parametrize("name", sorted(p.stem for p in FOLDER.glob("*.mlir") if not sum_of(p)))
def test_results_equal_the_stored_data_or_are_more_accurate(name):
    found = measure(FOLDER / f"{name}.mlir")
    assert not found.farther, found


def test_a_scan_of_products_equals_the_stored_data():
    assert measure(FOLDER / "cumprod_complex64_8_9.mlir").beyond == 0


@pytest.mark.parametrize("name", sorted(p.stem for p in FOLDER.glob("*.mlir") if sum_of(p)))
def test_sums_are_as_accurate_as_the_stored_data(name):
    """The order differs: the data adds one by one, aotc in chunks. Where a sum cancels they share no digit."""
    own, data = measure_sum(FOLDER / f"{name}.mlir")
    assert own <= 2
    assert data <= 2
