"""The loop IR's text reads back to an equal kernel, and runs."""

from __future__ import annotations

import re
import struct

import numpy as np
import pytest
from support.growth import check_linear

from aotc.ir.dims.algebra import floordiv, minimum, mod, sym
from aotc.ir.loop import ir
from aotc.ir.loop.access import imported_functions
from aotc.ir.loop.forms.tile_forms import FORMS
from aotc.ir.loop.parser import parse_kernel
from aotc.ir.loop.printer import print_kernel
from aotc.ir.loop.run import run_kernel
from aotc.ir.loop.verify import verify_kernel
from aotc.vmfb.dtypes import DTYPES, to_numpy

pytestmark = pytest.mark.ir

TANH_SUM = """\
def k0(x: "f32[3, 8]", /, out: "f32[3]", *, grid: "3"):
    for i in parallel(0, 3):
        acc = private("f32[]")
        acc[()] = f32(0.0)
        for j in range(0, 8):
            acc[()] += tanh(x[i, j])
        out[i] = acc[()]
"""

KITCHEN_SINK = """\
def k1(x: "f32[b, 2*b + 1]", q: "i32[4]", /, out: "f32[b]", n: "c64[]", *, b: "dim(lo=1)", grid: "b", \
aliases: "[(0, 0)]", flops: "48*b", bytes: "12"):
    for i in parallel(0, b):
        t = scratch("f64[4, 16]")
        i0 = let(min(max(q[(i % 4)], i32(0)), i32(7)), extent=8)
        v = -(x[i, i0 + 1] * f32(2.0))
        n[()] = c64(inf, -0.0)
        if (v < f32(inf)) & (~is_finite(v)):
            out[i] = reduce_max(out[i], v)
        else:
            pass
            if select(i1(True), i1(False), i1(True)):
                barrier()
        while True:
            w = convert(x[i, 0], "f64")
            if not (w > f64(-1e-310)):
                break
            t[3, (i % 2) + 4*(i // 2)] *= w
        for j in unroll(0, b, 4, extent=b + 4):
            t[0, j] = convert(index(i*j - 3), "f64") + convert(index(j, "i32"), "f64")
        tile(t, x, x, rows=4, cols=16, out_base=0, out_row=16, a_base=3*i, a_row=2*b, b_base=i, \
levels=[(b, 1, 16), (3, b, 5)], form=TileForm(left='f64', right='f64', out='f64'))
""".replace("            pass\n", "")

LARGEST = """\
def k2(x: "i32[8]", y: "i32[8]", /, out: "i32[8]", *, grid: "8"):
    for i in parallel(0, 8):
        out[i] = max(x[i], y[i])
"""


def test_maximum_parses_as_a_plain_store():
    """Neither a reduction nor an atomic one, though its name is that of both."""
    (loop,) = parse_kernel(LARGEST).body
    (store,) = loop.body
    assert (store.reduce, store.atomic) == ("", False)


@pytest.mark.parametrize("text", [TANH_SUM, KITCHEN_SINK, LARGEST])
def test_kernels_parse_back_from_their_text(text):
    kernel = parse_kernel(text)
    assert print_kernel(kernel) == text
    assert parse_kernel(print_kernel(kernel)) == kernel


def _store(value, dtype):
    out = ir.Buffer("out", dtype, ())
    return ir.Kernel("k", (), (out,), (), 1, (ir.Store(out, (), value),))


@pytest.mark.parametrize("value", [0.0, -0.0, float("inf"), -float("inf"), 5e-324, -1.5e300, 0.1, 3])
@pytest.mark.parametrize("dtype", [d for d in DTYPES if DTYPES[d].kind == "f"])
def test_float_literals_round_trip_exactly(value, dtype):
    kernel = _store(ir.Const(value, dtype), dtype)
    back = parse_kernel(print_kernel(kernel))
    assert back == kernel
    assert repr(back.body[0].value.value) == repr(value)


def test_nan_and_complex_literals_round_trip():
    payload = struct.unpack("<d", struct.pack("<Q", 0xFFF8000000000123))[0]
    for value in (float("nan"), -float("nan"), payload):
        back = parse_kernel(print_kernel(_store(ir.Const(value, "f32"), "f32"))).body[0].value.value
        assert struct.pack("<d", back) == struct.pack("<d", value)
    kernel = _store(ir.Const(complex(-0.0, -float("inf")), "c64"), "c64")
    assert parse_kernel(print_kernel(kernel)) == kernel


def test_symbol_ranges_round_trip():
    i, j = sym("i", 0, 12), sym("j", 2, sym("b") * 3)
    x = ir.Buffer("x", "f32", (12, sym("b")))
    out = ir.Buffer("out", "f32", (4, 3))
    load = ir.Load(x, (i, minimum(j, 5) - 2))
    body = ir.For("j", 2, sym("b") * 3, (ir.Store(out, (floordiv(i, 3), mod(i, 3)), load, "min"),), step=2)
    kernel = ir.Kernel("k", (x,), (out,), ("b",), 12, (ir.For("i", 0, 12, (body,), "parallel"),))
    assert parse_kernel(print_kernel(kernel)) == kernel


def test_one_name_with_two_ranges_is_refused():
    out = ir.Buffer("out", "f32", (8,))
    body = tuple(ir.Store(out, (sym("i", 0, n),), ir.Const(0.0, "f32")) for n in (4, 8))
    with pytest.raises(ValueError, match="two ranges"):
        print_kernel(ir.Kernel("k", (), (out,), (), 8, (ir.For("i", 0, 8, body, "parallel"),)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "expected one function"),
        ("def f(:", "line 1"),
        ('def f(x: "f32[3]"):\n    pass', "no grid"),
        ('def f(x: "f32[3]", *, grid: "1"):\n    x[i] = f32(0.0)', "line 2: i is not"),
        ('def f(x: "f32[3]", *, grid: "1"):\n    x[0] = sin(y[0])', "line 2: not a buffer"),
        ('def f(x: "f32[3]", *, grid: "1"):\n    x[0] = convert(x[1])', "does not say its dtype"),
        ('def f(x: "f32[3]", *, grid: "1"):\n    import os', "not a statement"),
    ],
)
def test_parse_errors_state_the_line(text, message):
    with pytest.raises(ValueError, match=message):
        parse_kernel(text)


def test_parse_time_is_linear():
    def kernel(count):
        x, out = ir.Buffer("x", "f32", (4096,)), ir.Buffer("out", "f32", (4096,))
        i = sym("i", 0, 64)
        values = [ir.Apply("exp", (ir.Load(x, (i + k,)),), "f32") for k in range(count)]
        body = tuple(ir.Store(out, (i * 64 + k % 64,), value) for k, value in enumerate(values))
        return ir.Kernel("k", (x,), (out,), (), 64, (ir.For("i", 0, 64, body, "parallel"),))

    def there_and_back(kernel):
        assert parse_kernel(print_kernel(kernel)) == kernel

    check_linear(kernel, there_and_back, 500)


def test_kernels_run_from_their_text():
    x = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    out = np.zeros(3, np.float32)
    run_kernel(parse_kernel(TANH_SUM), [x, out])
    np.testing.assert_allclose(out, np.tanh(x.astype(np.float64)).sum(1), rtol=1e-5)
    part = np.zeros(3, np.float32)
    run_kernel(TANH_SUM, [x, part], begin=1, end=2)
    assert part[0] == part[2] == 0
    assert part[1] == out[1]


def test_names_of_ops_and_dtypes_may_be_variables():
    text = """\
def k(x: "i32[n, 4]", q: "u8[n]", /, out: "i32[n]", *, n: "dim", grid: "n"):
    for i4 in parallel(0, n):
        max = convert(q[i4], "i32")
        out[i4] = i32(-100)
        for i32 in range(0, 4):
            if x[i4, i32] < i32(7):
                out[i4] = reduce_max(out[i4], max + (x[i4, i32] * index(i32 - n, "i32")))
"""
    x, q = np.arange(12, dtype=np.int32).reshape(3, 4), np.array([250, 1, 2], np.uint8)
    out = np.zeros(3, np.int32)
    assert verify_kernel(parse_kernel(text)) == []
    run_kernel(text, [x, q, out], {"n": 3})
    values = np.where(x < 7, q[:, None].astype(np.int32) + x * (np.arange(4) - 3), -100)
    np.testing.assert_array_equal(out, values.max(1))


def test_a_while_loop_and_a_let_in_an_index_run():
    text = """\
def k(x: "i64[8]", /, out: "i64[]", *, grid: "1"):
    at = private("i64[]")
    at[()] = i64(0)
    out[()] = i64(0)
    while True:
        here = let(min(at[()], i64(7)), extent=8)
        if not (x[here] > i64(0)):
            break
        out[()] += x[here]
        at[()] = at[()] + i64(1)
"""
    out = np.zeros((), np.int64)
    kernel = parse_kernel(text)
    assert print_kernel(kernel) == text
    assert verify_kernel(kernel) == []
    run_kernel(kernel, [np.array([3, 4, 5, 0, 9, 9, 9, 9]), out])
    assert out == 12


def test_tiles_compute_a_matmul():
    text = """\
def k(a: "f32[4, 6]", b: "f32[6, 16]", /, out: "f32[4, 16]", *, grid: "1"):
    tile(out, a, b, rows=4, cols=16, out_base=0, out_row=16, a_base=0, a_row=6, b_base=0, \
levels=[(2, 3, 48), (3, 1, 16)])
"""
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=(4, 6)).astype(np.float32), rng.normal(size=(6, 16)).astype(np.float32)
    out = np.ones((4, 16), np.float32)
    run_kernel(text, [a, b, out])
    np.testing.assert_allclose(out, a.astype(np.float64) @ b, rtol=1e-5, atol=1e-6)


def test_valid_kernels_verify():
    assert verify_kernel(parse_kernel(TANH_SUM)) == []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("range(0, 8)", "range(0, 9)", r"reaches beyond \[0, 8\)"),
        ("x[i, j]", "x[i]", "has 2 dims, the index has 1"),
        ("f32(0.0)", "f64(0.0)", "the value is f64, the buffer f32"),
        ("tanh(", "tanhh(", "unknown scalar op"),
        ("tanh(x[i, j])", "select(x[i, j], x[i, j], x[i, j])", "expected i1"),
        ("tanh(x[i, j])", "and_(x[i, j], x[i, j])", "not defined on f32"),
        ('grid: "3"', 'grid: "4"', "the grid is 4"),
        ("parallel(0, 3)", "range(0, 3)", "no parallel loop"),
        ("x[i, j]", "x[i, -1 - j]", "reaches beyond|never below"),
    ],
)
def test_the_verifier_finds_invalid_kernels(old, new, message):
    assert re.search(message, "\n".join(verify_kernel(parse_kernel(TANH_SUM.replace(old, new)))))


def test_indices_in_a_loop_without_iterations_are_not_checked():
    text = """\
def k(out: "f32[0, 2]", *, grid: "0"):
    for i in parallel(0, 0):
        for j in range(0, 2):
            out[0, j] = f32(1.0)
"""
    assert verify_kernel(parse_kernel(text)) == []
    found = verify_kernel(parse_kernel(text.replace("parallel(0, 0)", "parallel(0, 1)").replace('"0"', '"1"')))
    assert found == ["kernel k: store to out: index 0 of dim 0 is never below 0"]


def test_indices_under_a_false_condition_are_not_checked():
    text = """def k(a: "f32[1]", /, o: "f32[1]", *, grid: "1", flops: "1", bytes: "8"):
    for i in range(0, 1):
        o[0] = a[0]
        if index(i) > i64(0):
            o[0] = a[i + 1]
"""
    assert verify_kernel(parse_kernel(text)) == []
    assert "is never below 1" in verify_kernel(parse_kernel(text.replace("> i64(0)", ">= i64(0)")))[0]


def test_the_verifier_finds_undefined_names():
    x, out = ir.Buffer("x", "f32", (8,)), ir.Buffer("out", "f32", ())
    load = ir.Apply("add", (ir.Load(x, (sym("q"),)), ir.Var("v", "f32")), "f32")
    found = "\n".join(verify_kernel(ir.Kernel("k", (), (out,), (), 1, (ir.Store(out, (), load),))))
    for message in ("buffer x is not defined", "q is not defined", "scalar v is not defined"):
        assert message in found


LIBRARY_CALL = """\
def k2(a: "f64[2, n, n]", /, out: "f64[2, n, n]", places: "i64[2, n]", status: "i64[2]", *, n: "dim", grid: "2"):
    for p in parallel(0, 2):
        size = private("i64[]")
        size[()] = index(n)
        copy = scratch("f64[n, n]")
        for i in range(0, n):
            for j in range(0, n):
                copy[i, j] = a[p, i, j]
        call('dgetrf', size[()], size[()], copy[0, 0], size[()], places[p, 0], status[p])
        for i in range(0, n):
            for j in range(0, n):
                out[p, i, j] = copy[i, j]
"""


def test_a_library_call_reads_back_and_runs():
    from scipy.linalg import lu_factor

    kernel = parse_kernel(LIBRARY_CALL)
    assert print_kernel(kernel) == LIBRARY_CALL
    assert verify_kernel(kernel) == []
    assert imported_functions(kernel) == ("dgetrf",)
    a = np.random.default_rng(0).standard_normal((2, 4, 4))
    out, places, status = np.zeros_like(a), np.zeros((2, 4), "int64"), np.ones(2, "int64")
    run_kernel(kernel, [a, out, places, status], {"n": 4})
    for p in range(2):
        want, swaps = lu_factor(a[p].T)
        np.testing.assert_allclose(out[p].T, want, rtol=1e-12)
        np.testing.assert_array_equal(places[p], swaps + 1)
    assert status.tolist() == [0, 0]


def test_the_verifier_finds_invalid_library_calls():
    broken = LIBRARY_CALL.replace("places[p, 0]", "places[p]").replace("status[p])", "status[q])")
    broken = broken.replace("        copy = ", "        q = index(0)\n        copy = ")
    found = verify_kernel(parse_kernel(broken))
    assert found == ["kernel k2: call of dgetrf: places has 2 dims, the index has 1"]
    with pytest.raises(ValueError, match="not an element of a buffer"):
        parse_kernel(LIBRARY_CALL.replace("places[p, 0]", "places"))


@pytest.mark.parametrize(("form", "dtype", "out", "group"), [("bf16", "bf16", "f32", 2), ("i8", "i8", "i32", 4)])
@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_tiles_compute_a_matmul(form, dtype, out, group, transposed):
    """The left side by rows, or by columns, whose stride the text has to say: two kernels of one text are one."""
    rows, cols, k = 3, 8, 8
    a_row, step = (1, rows) if transposed else (k, 1)
    a = ir.Buffer("a", dtype, (k, rows) if transposed else (rows, k))
    b, o = ir.Buffer("b", dtype, (k // group, cols * group)), ir.Buffer("o", out, (rows, cols))
    levels = ((k // group, step * group, cols * group),)
    tile = ir.Tile(rows, cols, o, 0, cols, a, 0, a_row, b, 0, levels, FORMS[form], a_inner=step)
    kernel = ir.Kernel("k", (a, b), (o,), (), 1, (tile,))
    assert parse_kernel(print_kernel(kernel)) == kernel
    rng = np.random.default_rng(0)
    left, right = (rng.integers(-3, 4, shape).astype("f4") for shape in ((rows, k), (k, cols)))
    packed = right.reshape(k // group, group, cols).swapaxes(1, 2).reshape(b.shape)
    found = np.zeros(o.shape, to_numpy(out))
    run_kernel(
        kernel, [(left.T if transposed else left).astype(to_numpy(dtype)), packed.astype(to_numpy(dtype)), found]
    )
    np.testing.assert_array_equal(found, left @ right)
