"""Bundles of earlier builds, kept in the tree, still load and give XLA's results."""

from pathlib import Path

import numpy as np
import pytest

from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.devices import cpu
from aotc.vmfb.module import load

pytestmark = pytest.mark.ir

FOLDER = Path(__file__).parents[1] / "golden_bundles"
PATHS = sorted(FOLDER.glob("*.vmfb"))


def test_there_are_golden_bundles():
    assert len(PATHS) >= 8
    assert {p.stem for p in PATHS} == {p.stem for p in FOLDER.glob("*.npz")}


@pytest.mark.parametrize("path", PATHS, ids=lambda p: p.stem)
def test_a_golden_bundle_runs(path):
    (variant,) = open_bundle(path).manifest["variants"]
    obstacle = cpu.obstacle(variant)
    if obstacle:
        pytest.skip(obstacle)
    module = load(path, verify=True)
    with np.load(path.with_suffix(".npz")) as held:
        arguments = [held[f"a{n}"] for n in range(len(module.main.signature.arguments))]
        wanted = [held[f"r{n}"] for n in range(len(module.main.signature.results))]
    for _ in range(2):
        for got, want in zip(module.invoke("main", *arguments), wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
