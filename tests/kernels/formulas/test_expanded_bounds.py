"""Functions that are expanded into ops: within the bounds of ``docs/accuracy.md``, and every op has a bound there."""

import pytest

pytest.importorskip("numba")
pytest.importorskip("mpmath")

from conformance.edge_bounds import BOUNDS
from conformance.expanded import COMPLEX, DTYPES, EXPANDED, complex_excess, excess
from conformance.sampled import repeat
from jaxlib.mlir.dialects import chlo

from aotc.ir.opset import SCALARS
from aotc.targets import TARGETS
from aotc.vmfb.host.machine import cpu_features

pytestmark = pytest.mark.cpu

OLDER = "cpu:x86-64-v2"  # without fused multiply-add
# CHLO's ops without a bound, and why.
NO_BOUND = {
    "_asin_acos_kernel": "a part of jaxlib's expansions, which no frontend writes", "constant": "bits",
    "constant_like": "bits", "mulhi": "of integers", "ragged_dot": "a sum", "scan": "control flow", "top_k": "bits",
    **dict.fromkeys(("conj", "is_inf", "is_neg_inf", "is_pos_inf", "next_after"), "bits, not rounded"),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row", EXPANDED, ids=lambda row: row.name)
def test_errors_of_expanded_functions(row, dtype):
    found, where = excess(row, dtype, 60)
    assert found <= 1, f"{row.name} of {where}: {found:.3g} of the bound; {repeat()}"


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cpu", OLDER])
@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("row", EXPANDED, ids=lambda row: row.name)
def test_errors_of_expanded_functions_at_many_points(row, dtype, target):
    if target == OLDER and not cpu_features().issuperset(TARGETS[OLDER].features):
        pytest.skip(f"this CPU does not run {OLDER}")
    found, where = excess(row, dtype, 1000, target)
    assert found <= 1, f"{row.name} of {where}: {found:.3g} of the bound; {repeat()}"


@pytest.mark.parametrize("dtype", ["c64", "c128"])
@pytest.mark.parametrize("name", COMPLEX)
def test_errors_of_complex_functions_that_xla_does_not_have(name, dtype):
    found, where = complex_excess(name, dtype, 200)
    assert found <= 1, f"{name} of {where}: {found:.3g} of the bound; {repeat()}"


def is_exact(scalar):
    """Return True if the result of an op on floats is exact or rounded correctly, by the op table."""
    return scalar.tolerance == 0 or scalar.result == "bool"


def test_every_float_op_has_a_bound_for_every_dtype():
    missing = [
        f"{scalar.name} of {dtype}"
        for scalar in SCALARS.values()
        for kind, dtypes in (("f", DTYPES), ("c", ("c64", "c128")))
        for dtype in dtypes
        if kind in scalar.kinds and not scalar.of_loops and not is_exact(scalar) and (scalar.name, dtype) not in BOUNDS
    ]
    assert not missing


def test_every_op_of_chlo_has_a_bound_or_a_reason():
    known = {name for name, _ in BOUNDS} | {row.name for row in EXPANDED} | set(NO_BOUND)
    classes = [getattr(chlo, name) for name in dir(chlo) if name.endswith("Op")]
    names = {c.OPERATION_NAME.removeprefix("chlo.") for c in classes if hasattr(c, "OPERATION_NAME")}
    assert len(names) > 40
    assert not {n for n in names if not n.startswith("broadcast_")} - known
    assert not set(NO_BOUND) - names
