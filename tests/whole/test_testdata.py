"""StableHLO's own test data of complex numbers: within 3 units in the last place, or nearer to mpmath than the data."""

import pytest

pytest.importorskip("numba")
pytest.importorskip("mpmath")

from conformance.testdata import FOLDER, measure

pytestmark = [pytest.mark.cpu]


@pytest.mark.parametrize("name", sorted(p.stem for p in FOLDER.glob("*.mlir")))
def test_results_are_the_data_or_nearer_to_the_exact_value(name):
    found = measure(FOLDER / f"{name}.mlir")
    assert not found.farther, found


def test_a_scan_of_products_is_the_data():
    assert measure(FOLDER / "cumprod_complex64_8_9.mlir").beyond == 0
