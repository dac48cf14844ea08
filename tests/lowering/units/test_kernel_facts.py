"""Facts are found once for kernels that differ in their names alone."""

from dataclasses import replace

import pytest

from aotc.ir.loop.parser import parse_kernel
from aotc.lowering.cost_model.kernel_facts import FactsOfKernels

pytestmark = pytest.mark.ir

TEXT = """
def k(a: "f32[4]", /, o: "f32[4]", *, grid: "4", flops: "0", bytes: "0"):
    for p in parallel(0, 4):
        o[p] = a[p]
"""


def test_facts_of_equal_kernels_are_computed_once():
    looked_at = []

    def find(kernel, group=1):
        looked_at.append((kernel.name, group))
        return len(looked_at)

    facts, kernel = FactsOfKernels(find), parse_kernel(TEXT)
    assert facts.facts_of(kernel) == facts.facts_of(replace(kernel, name="other")) == 1
    assert facts.facts_of(kernel, 2) == 2
    assert facts.facts_of(replace(kernel, grid=3)) == 3
    assert facts.facts_of(replace(kernel, body=())) == 4
    assert looked_at == [("k", 1), ("k", 2), ("k", 1), ("k", 1)]
