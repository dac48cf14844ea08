"""Kernels for every CPU: what they need of a C library, and that what an older one lacks is exact all the same."""

import ctypes
import math
from fractions import Fraction

import numpy as np
import pytest

pytest.importorskip("numba")

from llvmlite import ir
from support import emulated
from support.panels import pack_panels
from support.scalar_kernels import every_op, loaded, one_kernel, run

from aotc.ir.dims.algebra import sym
from aotc.ir.loop.forms.tile_forms import FORMS
from aotc.ir.loop.ir import Apply, Buffer, For, Kernel, Load, Store, Tile
from aotc.ir.loop.parser import parse_kernel
from aotc.kernels import back_end
from aotc.kernels.cpu import link
from aotc.kernels.cpu.compile import compile_kernel
from aotc.kernels.cpu.executor.compile import compile_executor
from aotc.kernels.formulas.llvm_algebra import Algebra
from aotc.kernels.formulas.llvm_values import ScalarValue
from aotc.kernels.llvm_types import F32, F64, I64, PTR, VOID, KernelModule
from aotc.targets import TARGETS
from aotc.vmfb.dtypes import DTYPES, size_of, to_numpy
from aotc.vmfb.host.machine import cpu_features

pytestmark = pytest.mark.cpu

CPUS = [t for t in TARGETS.values() if t.kind == "cpu"]
OLDEST = TARGETS["cpu:x86-64-v2"]
FEW = ("i8", "u64", "f8E5M2", "f16", "bf16", "f32", "f64", "c64")
QUICK = [pytest.param(TARGETS[name], FEW, id=name) for name in ("cpu:x86-64-v2", "cpu:aarch64")]
WHOLE = [pytest.param(t, tuple(DTYPES), id=f"{t.name}-all", marks=pytest.mark.slow) for t in CPUS]
LENGTH = 37  # a few vectors, and a rest
TILES = [(form, form) for form in ("f32", "f64", "bf16", "i8")]
TILES += [("f32_bf16", "f32"), ("f32_f16", "f32"), ("bf16", "f32"), ("i8", "u8")]

# A call of a library, through a pointer that the loader fills in, and memory whose size is known when it runs.
LIBRARY = """def calls(o0: "f64[3, 3]", o1: "i64[3]", o2: "f64[n]", *, n: "dim", grid: "1"):
    w0 = private("i64[]")
    w0[()] = index(3)
    w3 = private("i64[1]")
    call('dgetrf', w0[()], w0[()], o0[0, 0], w0[()], o1[0], w3[0])
    w4 = scratch("f64[n]")
    for q in range(0, n):
        w4[q] = index(q, "f64")
    for q in range(0, n):
        o2[q] = w4[n - q - 1]
"""

runs_here = pytest.mark.skipif(
    not cpu_features().issuperset(OLDEST.features), reason="this machine does not run kernels for x86-64-v2"
)


def conversions(dtype):
    """Return the kernel that converts ``dtype`` to every other."""
    i = (sym("i", 0, LENGTH),)
    a = Buffer("a", dtype, (LENGTH,))
    outs = tuple(Buffer(f"o{n}", d, (LENGTH,)) for n, d in enumerate(d for d in DTYPES if d != dtype))
    body = tuple(Store(out, i, Apply("convert", (Load(a, i),), out.dtype)) for out in outs)
    return Kernel(f"convert_{dtype}", (a,), outs, (), LENGTH, (For("i", 0, LENGTH, body, "parallel"),))


def tile(form, a_dtype, target):
    """Return a kernel that is one register tile."""
    row = FORMS[form]
    cols = 2 * target.vector_bytes // size_of(row.out)
    a, b = Buffer("a", a_dtype, (4, 64)), Buffer("b", form.rpartition("_")[2], (64 * cols,))
    out = Buffer("out", row.out, (4, cols))
    product = Tile(4, cols, out, 0, cols, a, 0, 64, b, 0, ((64 // row.group, row.group, row.group * cols),), row)
    return Kernel(f"tile_{form}_{a_dtype}", (a, b), (out,), (), 1, (product,))


@pytest.mark.parametrize(("target", "dtypes"), [*QUICK, *WHOLE])
def test_kernels_need_nothing_that_a_bundle_does_not_have(target, dtypes):
    """Every scalar op on every type, every conversion, every tile, a library's function, memory, the executor."""
    kernels = [one_kernel(f"ops_{d}", d, list(every_op(d)), LENGTH) for d in dtypes]
    kernels += [conversions(d) for d in dtypes]
    tiles = [(form, a_dtype) for form, a_dtype in TILES if form != "f32_f16" or "f16" not in target.lacks]
    kernels += [tile(form, a_dtype, target) for form, a_dtype in tiles]
    objects = [compile_kernel(k, target) for k in (*kernels, parse_kernel(LIBRARY))]
    table = link.function_table_object([*(k.name for k in kernels), "calls"], target, ["dgetrf"])
    for data in (
        link.link_shared_library([*objects, table], target),
        link.link_shared_library([compile_executor(target)], target),
    ):
        assert link.undefined_symbols(data) <= link.ALLOWED_SYMBOLS | link.THREAD_SYMBOLS


@pytest.mark.emulated
@pytest.mark.parametrize(("form", "a_dtype"), TILES)
@pytest.mark.parametrize("target", emulated.MACHINES)
def test_tiles_under_qemu(form, a_dtype, target):
    if emulated.missing(target):
        pytest.skip(f"needs qemu: {emulated.missing(target)}")
    if form == "f32_f16" and "f16" in TARGETS[target].lacks:
        pytest.skip("has no instruction that widens f16")
    kernel = tile(form, a_dtype, TARGETS[target])
    cols = kernel.outputs[0].shape[1]
    r = np.random.default_rng(0)
    a, b = ((r.standard_normal(shape) * 20).astype("int8" if form == "i8" else "f4") for shape in ((4, 64), (64, cols)))
    a, b = abs(a) if a_dtype == "u8" else a, b.astype(to_numpy(form.rpartition("_")[2]))
    a, out = a.astype(to_numpy(a_dtype)), np.zeros((4, cols), to_numpy(FORMS[form].out))
    emulated.run_kernel(kernel, [a, pack_panels(b, cols, form), out], 1, TARGETS[target])
    np.testing.assert_allclose(out, a.astype("f8") @ b.astype("f8"), rtol=1e-4, atol=1e-2)


# --- the product and sum with one rounding, in software ---


def fma_kernels():
    """Return the library of ``fma32`` and ``fma64``: functions of three arrays, a fourth for results, and a length."""
    module = KernelModule("fma", OLDEST)
    module.data_layout = back_end.data_layout(OLDEST)
    for bits, kind in ((32, F32), (64, F64)):
        function = ir.Function(module, ir.FunctionType(VOID, [PTR] * 4 + [I64]), f"fma{bits}")
        b = ir.IRBuilder(function.append_basic_block())
        *arrays, length = function.args
        before, loop, after = b.block, b.append_basic_block(), b.append_basic_block()
        b.branch(loop)
        b.position_at_end(loop)
        n = b.phi(I64)
        *operands, place = [b.gep(a, [n], source_etype=kind) for a in arrays]
        values = [ScalarValue(b, b.load(p, typ=kind)) for p in operands]
        b.store(Algebra(b, bits).fma(*values).raw, place)
        following = b.add(n, ir.Constant(I64, 1))
        n.add_incoming(ir.Constant(I64, 0), before)
        n.add_incoming(following, loop)
        b.cbranch(b.icmp_signed("<", following, length), loop, after)
        b.position_at_end(after)
        b.ret_void()
    library = back_end.parse_assembly_for_target(str(module), OLDEST)
    library.verify()
    library.optimize()
    return loaded(link.link_shared_library([library.emit_native_object()], OLDEST))


def nearest(value, bits):
    """Round a fraction that is not 0 to a float, to nearest even."""
    digits, least = (24, -149) if bits == 32 else (53, -1074)
    size = abs(value)
    power = size.numerator.bit_length() - size.denominator.bit_length()
    power -= size < Fraction(2) ** power
    unit = Fraction(2) ** max(power - digits + 1, least)
    rounded = round(size / unit) * unit
    limit = Fraction(2) ** (128 if bits == 32 else 1024)
    found = math.inf if rounded >= limit else float(rounded)
    return -found if value < 0 else found


def exact_fma(row, bits):
    kind = np.float32 if bits == 32 else np.float64
    a, b, c = map(float, row)
    if not all(map(math.isfinite, (a, b, c))):
        wide = np.longdouble  # its range is so large that no finite product becomes infinite
        return float(wide(a) * wide(b) + wide(c))
    value = Fraction(a) * Fraction(b) + Fraction(c)
    return nearest(value, bits) if value else float(kind(a) * kind(b) + kind(c))


def awkward(bits, count, seed=0):
    """Return triples whose products and summands meet at every distance, with few and many digits, near all limits."""
    r = np.random.default_rng(seed)
    digits, top = (23, 254) if bits == 32 else (52, 2046)
    middle = top // 2
    a = r.integers(0, top + 1, count)
    near_one, far = 2 * middle - a + r.integers(-60, 60, count), r.integers(0, top + 1, count)
    limits = r.choice([0, 1, 2, middle, top - 1, top], count)
    b = np.clip(np.choose(r.integers(0, 3, count), [near_one, far, limits]), 0, top)
    meet = np.clip(a + b - middle + r.integers(-2 * digits - 10, 2 * digits + 10, count), 0, top)
    close = np.clip(a + b - middle + r.integers(-2, 3, count), 0, top)
    c = np.choose(r.integers(0, 4, count), [meet, close, far[::-1], limits[::-1]])
    columns = []
    for exponents in (a, b, c):
        full = r.integers(0, 1 << digits, count)
        few = full & ~((1 << r.integers(0, digits, count)) - 1)
        ends = r.choice([0, 1, 2, 3, (1 << digits) - 1, (1 << digits) - 2], count)
        mantissa = np.choose(r.integers(0, 3, count), [full, few, ends])
        words = (r.integers(0, 2, count) << (bits - 1)) | (exponents << digits) | mantissa
        columns.append(words.astype(f"u{bits // 8}").view(f"f{bits // 8}"))
    with np.errstate(all="ignore"):
        cancels = (r.integers(0, 4, count) == 0) & np.isfinite(columns[0] * columns[1])
        columns[2] = np.where(cancels, -(columns[0] * columns[1]), columns[2])
    return columns


@runs_here
@pytest.mark.parametrize("bits", [32, 64])
def test_fma_in_software_rounds_once(bits):
    kind = np.dtype(f"f{bits // 8}")
    edges = np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, np.finfo(kind).max, np.finfo(kind).tiny], kind)
    grid = [g.ravel() for g in np.meshgrid(edges, edges, edges)]
    columns = [np.concatenate(pair) for pair in zip(grid, awkward(bits, 30000))]
    got = np.empty_like(columns[0])
    call = getattr(fma_kernels(), f"fma{bits}")
    call(*[ctypes.c_void_p(x.ctypes.data) for x in (*columns, got)], ctypes.c_int64(len(got)))
    with np.errstate(all="ignore"):
        want = np.array([exact_fma(row, bits) for row in zip(*columns)], kind)
    same = (got == want) & (np.signbit(got) == np.signbit(want)) | np.isnan(got) & np.isnan(want)
    assert same.all(), [(*(float(x[n]).hex() for x in columns), got[n], want[n]) for n in np.flatnonzero(~same)[:5]]


# --- f16 in software ---


def f16_values():
    """Return f32: every f16, every midpoint of two, their neighbours, beyond the range, subnormal ones, NaN."""
    codes = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    finite = np.unique(codes[np.isfinite(codes)])
    middle = ((finite[1:].astype(np.float64) + finite[:-1]) / 2).astype(np.float32)
    around = [np.nextafter(middle, np.float32(way)) for way in (np.inf, -np.inf)]
    more = np.array([65519.9, 65520, 65536, 1e38, 2.0**-25, 2.0**-26, 1e-45, np.inf, 0.0], np.float32)
    payloads = np.array([0x7FC00000, 0x7FFFFFFF, 0x7F812345, 0xFFC02000], np.uint32).view(np.float32)
    return np.concatenate([codes, middle, *around, more, -more, payloads])


@runs_here
def test_f16_in_software_is_that_of_the_instructions():
    codes = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    for source, target_dtype, values in (("f32", "f16", f16_values()), ("f16", "f32", codes)):
        i = (sym("i", 0, values.size),)
        a, out = Buffer("a", source, values.shape), Buffer("out", target_dtype, values.shape)
        store = Store(out, i, Apply("convert", (Load(a, i),), target_dtype))
        kernel = Kernel("short", (a,), (out,), (), values.size, (For("i", 0, values.size, (store,), "parallel"),))
        found = [np.zeros(values.size, to_numpy(target_dtype)) for _ in range(2)]
        for target, got in zip((OLDEST, None), found):
            run(kernel, [values, got], values.size, target=target)
        with np.errstate(all="ignore"):
            want = values.astype(to_numpy(target_dtype))
        np.testing.assert_array_equal(found[0], want)
        if "f16c" in cpu_features():
            bits = [got.view(f"u{got.itemsize}") for got in found]
            np.testing.assert_array_equal(*bits)
