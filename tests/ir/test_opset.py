"""The op table as a whole: documented, complete, and refusing what its rules forbid."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from aotc.ir.opset import NAN_KEEPING, OPS, SCALARS, RuleError
from aotc.ir.opset.elementwise import apply_scalar_op
from aotc.ir.opset.spec import cast_array
from aotc.ir.tensor.ir import TensorType
from aotc.vmfb.dtypes import DTYPES, to_numpy
from aotc.vmfb.float_formats import SMALL_FLOATS

pytestmark = pytest.mark.ir
DOCUMENT = Path(__file__).parents[2] / "docs" / "tensor_ir.md"


def test_every_documented_attribute_exists():
    rows = re.findall(r"^\| `(\w+)`[^|]*\|[^|]*\| (.*) \|$", DOCUMENT.read_text(), re.M)
    documented = {name: set(re.findall(r"`(\w+)`", attrs)) for name, attrs in rows if name in OPS}
    assert len(documented) > 25
    for name, attrs in documented.items():
        assert set(OPS[name].attrs) <= attrs, name


@pytest.mark.parametrize("name", [n for n, s in SCALARS.items() if "f" in s.kinds and s.result in ("same", "real")])
def test_ops_marked_as_keeping_nan_propagate_nan(name):
    row, others = SCALARS[name], np.array([0, 1, -2, np.inf, -np.inf, np.nan], "f4")
    nan = np.full_like(others, np.nan)
    places = [(nan,)] if row.arity == 1 else [(nan, others), (others, nan)]
    with np.errstate(all="ignore"):
        keeps = all(np.isnan(apply_scalar_op(row, list(operands), "f32")).all() for operands in places)
    assert keeps == (name in NAN_KEEPING)


@pytest.mark.parametrize("name", sorted(SCALARS.keys() & OPS))
def test_scalar_ops_accept_only_their_documented_dtypes(name):
    scalar = SCALARS[name]
    for row in DTYPES.values():
        operands = [TensorType(row.name, (2,))] * scalar.arity
        if name == "select":
            operands[0] = TensorType("i1", (2,))
        given = (TensorType("f32", (2,)),) if scalar.result == "given" else ()
        allowed = row.kind in scalar.kinds and (scalar.result != "complex" or row.name in ("f32", "f64"))
        if not allowed:
            with pytest.raises(RuleError, match=name):
                OPS[name].infer(tuple(operands), {}, (), given)
            continue
        (result,) = OPS[name].infer(tuple(operands), {}, (), given)
        arrays = [np.ones(2).astype(to_numpy(t.dtype)) for t in operands]
        (found,) = OPS[name].reference(arrays, {}, (), (result,))
        assert found.dtype == to_numpy(result.dtype)
        assert found.shape == (2,)


@pytest.mark.parametrize("name", sorted(SCALARS.keys() & OPS))
def test_scalar_ops_refuse_different_shapes_and_counts(name):
    scalar = SCALARS[name]
    t = TensorType("f32", (2,))
    with pytest.raises(RuleError, match="takes"):
        OPS[name].infer((t,) * (scalar.arity + 1), {}, (), ())
    if scalar.arity > 1:
        with pytest.raises(RuleError, match="shapes differ"):
            OPS[name].infer((TensorType("f32", (3,)), *(t,) * (scalar.arity - 1)), {}, (), ())


@pytest.mark.parametrize(
    ("name", "operands", "attrs", "message"),
    [
        ("transpose", [(2, 3)], {"perm": (0, 0)}, "not a permutation"),
        ("slice", [(4,)], {"start": (0,), "limit": (5,), "stride": (1,)}, "0:5 of"),
        ("concatenate", [(2, 3), (2, 4)], {"dim": 0}, "does not join"),
        ("reverse", [(2,)], {"dims": (1,)}, "bad dims"),
        (
            "dot_general",
            [(2, 3), (4, 5)],
            {"lhs_batch": (), "rhs_batch": (), "lhs_contract": (1,), "rhs_contract": (0,)},
            "differ",
        ),
        ("dynamic_slice", [(2, 3)], {"sizes": (1, 1)}, "needs 2 start indices"),
        ("top_k", [(3,)], {"k": 4}, "k = 4"),
        ("fft", [(3,)], {"kind": "FFT", "length": (3,)}, "FFT of f32"),
        ("cholesky", [(3, 2)], {"lower": True}, "not square"),
        ("case", [()], {}, "expected i32"),
    ],
)
def test_type_rules_state_the_error(name, operands, attrs, message):
    with pytest.raises(RuleError, match=re.escape(message)):
        OPS[name].infer(tuple(TensorType("f32", s) for s in operands), attrs, (), ())


def test_threefry_and_philox_match_the_published_vectors():
    """The vectors published with Random123 for Threefry-2x32, 20 rounds."""
    from aotc.ir.opset.random import philox, threefry

    zero = np.zeros(1, np.uint32)
    assert [int(x[0]) for x in threefry((0, 0), zero, zero)] == [0x6B200159, 0x99BA4EFE]
    ones = np.full(1, 0xFFFFFFFF, np.uint32)
    assert [int(x[0]) for x in threefry((0xFFFFFFFF, 0xFFFFFFFF), ones, ones)] == [0x1CB996FC, 0xBB002BE7]
    assert [int(x[0]) for x in philox((0, 0), [zero] * 4)] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize("dtype", SMALL_FLOATS)
def test_small_floats_are_computed_in_f32(dtype):
    """f8E5M2 too, which NumPy counts among its own floats: -1.75 and 0.5 more is not a number of it."""
    x = np.arange(1 << DTYPES[dtype].bits, dtype=np.uint8).view(to_numpy(dtype))
    wide = x.astype(np.float32)
    for name in ("round_afz", "exp", "sqrt", "logistic"):
        got, want = (
            apply_scalar_op(SCALARS[name], [x], dtype),
            cast_array(apply_scalar_op(SCALARS[name], [wide], "f32"), dtype),
        )
        np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32), err_msg=name)
