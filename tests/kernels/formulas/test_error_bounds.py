"""Elementwise functions on random numbers of every binade: within the bounds of ``docs/accuracy.md``."""

import pytest

pytest.importorskip("numba")
pytest.importorskip("mpmath")

from conformance.accuracy import PAGE, page
from conformance.sampled import measure, repeat

import aotc
from aotc.targets import TARGETS
from aotc.vmfb.host.machine import cpu_features

pytestmark = pytest.mark.cpu

OLDER = "cpu:x86-64-v2"  # without fused multiply-add
FEW = {"f32": 10, "f64": 8, "c64": 4, "c128": 4}
MANY = {"f32": 400, "f64": 60, "c64": 100, "c128": 50, "f16": 1, "bf16": 1}  # of 16 bits every number


def rows():
    for dtype, density in FEW.items():
        yield pytest.param(dtype, density, "cpu", id=f"{dtype}-few")
    for dtype, density in MANY.items():
        for target in ("cpu", OLDER):
            yield pytest.param(dtype, density, target, id=f"{dtype}-{target}", marks=pytest.mark.slow)


@pytest.mark.parametrize(("dtype", "density", "target"), list(rows()))
def test_errors_are_within_the_bounds(dtype, density, target):
    if target == OLDER and not cpu_features().issuperset(TARGETS[OLDER].features):
        pytest.skip(f"this CPU does not run {OLDER}")
    found = [row for arity in (1, 2) for row in measure(dtype, arity, density, target)]
    assert len(found) > 20
    beyond = [f"{row.name} of {row.where}: {row.error:.4g} ulp" for row in found if row.excess > 0]
    assert not beyond, "\n".join([*beyond, repeat()])


def test_the_page_has_the_bounds():
    assert PAGE.read_text() == page(), "run PYTHONPATH=tests python -m conformance.accuracy"


def test_an_op_does_not_depend_on_its_neighbours():
    """Of jaxlib's expansions only the op that needs one is given one: ``acos``, and not ``cosh`` beside it."""
    import numpy as np

    x = np.linspace(-9.5, 9.5, 1001, dtype=np.float32)
    kind = "tensor<1001xf32>"
    rows = [f"%{n} = chlo.{n} %x : {kind} -> {kind}" for n in ("cosh", "erf", "lgamma", "acos")]
    head, end = f"func.func @main(%x: {kind}) -> ({kind}, {kind}, {kind}) {{", f": {kind}, {kind}, {kind}\n}}"
    texts = ["\n".join([head, *chosen, f"return %cosh, %erf, %lgamma {end}"]) for chosen in (rows[:3], rows)]
    alone, beside = (aotc.load(aotc.compile(text)).invoke("main", x) for text in texts)
    for a, b in zip(alone, beside, strict=True):
        assert a.tobytes() == b.tobytes()
