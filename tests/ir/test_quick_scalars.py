"""What the interpreter of the loop IR does on scalars in less time is what the op table does on arrays."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from aotc.ir.loop import run as loop_run
from aotc.ir.opset import SCALARS, elementwise
from aotc.ir.opset.elementwise_quick import quick_precision
from aotc.vmfb.dtypes import DTYPES, kind_of, to_numpy

pytestmark = pytest.mark.ir
NAMES = [name for name, row in DTYPES.items() if row.bits in (1, 8, 16, 32, 64, 128)]
WHOLE = (0, 1, 2, 3, 7, 100, 127, 128, 255, 2**15, 2**24 + 1, 2**31, 2**53 + 1, 2**62 + 12345, -1, -2, -128, -(2**31))
WHOLE = (*WHOLE, -(2**63))
REAL = (0.0, -0.0, 1.0, -1.5, 1e-42, 6e-8, 3.14159265, -255.5, 65520.0, 1e30, -3e38, np.inf, -np.inf, np.nan, -np.nan)


def values_of(name):
    kind = to_numpy(name)
    with np.errstate(all="ignore"):
        given = np.array(WHOLE if kind_of(name) in "iu" else (0, 1) if kind_of(name) == "b" else REAL)
        return list((given + 1j * given[::-1] / 3 if kind_of(name) == "c" else given).astype(kind))


def same(found, want):
    found, want = np.asarray(found), np.asarray(want).reshape(())
    assert found.dtype == want.dtype
    assert found.tobytes() == want.tobytes() or (found != found and want != want)


def cases(row):
    for name in NAMES:
        if kind_of(name) in row.kinds:
            values = values_of(name)
            if row.name == "select":
                yield from ((name, (np.bool_(n % 2), a, b)) for n, (a, b) in enumerate(itertools.pairwise(values)))
            else:
                yield from ((name, given) for given in itertools.product(values, repeat=row.arity))


@pytest.mark.parametrize("name", [name for name, row in SCALARS.items() if row.result != "given"])
def test_fast_scalar_functions_match_the_op_table(name):
    row = SCALARS[name]
    function = loop_run._interpreter_functions(0, None, None)[name]
    with np.errstate(all="ignore"):
        for dtype, given in cases(row):
            if row.result == "complex" and dtype not in ("f32", "f64"):
                continue
            result = elementwise.result_dtype(row, (dtype,) * row.arity, None)
            same(function(*given), elementwise.apply_scalar_op(row, [*map(np.asarray, given)], result))


@pytest.mark.parametrize("target", NAMES)
def test_fast_conversions_match_the_op_table(target):
    function = loop_run._interpreter_functions(0, None, None)["convert"]
    with np.errstate(all="ignore"):
        for source in NAMES:
            for x in values_of(source):
                same(function(x, target), elementwise.apply_scalar_op(SCALARS["convert"], [np.asarray(x)], target))


def test_fast_index_comparisons_match_the_op_table():
    functions = loop_run._interpreter_functions(0, None, None)
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        for a, b in ((1, 2), (2, 2), (3, 2)):
            same(functions[name](a, b), SCALARS[name].reference(np.int64(a), np.int64(b)))


@pytest.mark.parametrize("bits", [(8, 10), (8, 7), (8, 23), (11, 3), (5, 10)])
def test_fast_reduce_precision_matches_the_op_table(bits):
    function = loop_run._interpreter_functions(0, None, None)["reduce_precision"]
    rng = np.random.default_rng(0)
    chosen = list(rng.integers(0, 2**32, 300, np.uint32).view(np.float32))
    with np.errstate(all="ignore"):
        for name in ("f32", "f64", "f16", "bf16"):
            for x in (*values_of(name), *(chosen if name == "f32" else ())):
                same(function(x, *bits), elementwise.with_fewer_bits(np.asarray(x), *bits))
    assert (quick_precision(np.float32(1.0), *bits) is None) == (bits[0] < 8 or bits[1] == 23)


@pytest.mark.parametrize("dtype", ["i8", "i32", "i64", "u32", "f32", "f64"])
def test_fast_index_conversions_match_numpy(dtype):
    index = loop_run._interpreter_functions(0, None, None)["index"]
    with np.errstate(all="ignore"):
        for value in WHOLE:
            same(index(value, dtype), np.array(value, np.int64).astype(to_numpy(dtype)))
