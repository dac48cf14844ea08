"""Kernels of scalar ops for tests: every op on a dtype, its operands, its execution, and its required accuracy."""

import ctypes
import os

import numpy as np

from aotc.ir.dims.algebra import sym
from aotc.ir.loop.ir import Alloc, Apply, Buffer, For, Kernel, Load, Store
from aotc.ir.loop.scratch import scratch_bytes
from aotc.ir.opset import ACCUMULATED
from aotc.ir.opset.elementwise import SCALARS, apply_scalar_op, result_dtype
from aotc.kernels.cpu.compile import compile_kernel
from aotc.kernels.cpu.custom import MATH_SYMBOLS
from aotc.kernels.cpu.link import link_shared_library
from aotc.kernels.formulas.math import MAX_ULP
from aotc.targets import host_target
from aotc.vmfb.dtypes import DTYPES, kind_of, to_numpy


def run(kernel, arrays, grid, dims=(), begin=0, target=None, by=compile_kernel):
    """Compile ``kernel``, for this machine or ``target``, and call it on ``arrays``, outputs last.

    ``by`` is its compiler, which may use the C math library if it is not the default.
    """
    target = target or host_target()
    library = loaded(link_shared_library([by(kernel, target)], target, () if by is compile_kernel else MATH_SYMBOLS))
    pointers = (ctypes.c_void_p * len(arrays))(*[a.ctypes.data for a in arrays])
    numbers = (ctypes.c_int64 * max(len(dims), 1))(*dims)
    memory = np.zeros(scratch_bytes(kernel) + 64, np.uint8)
    scratch = ctypes.c_void_p(-(-memory.ctypes.data // 64) * 64)
    getattr(library, kernel.name)(pointers, numbers, ctypes.c_int64(begin), ctypes.c_int64(grid), scratch)


def loaded(data):
    """Load a shared library from memory."""
    handle = os.memfd_create("kernel")
    os.write(handle, data)
    return ctypes.CDLL(f"/proc/self/fd/{handle}")


def operands(dtype, count, seed=0):
    """Return ``count`` arrays of equal length with all pairs of the edge cases, and random values."""
    row, random = DTYPES[dtype], np.random.default_rng(seed)
    match row.kind:
        case "b":
            edges = np.array([False, True])
            extra = random.integers(0, 2, (count, 50)).astype(bool)
        case "i" | "u":
            low = -(1 << (row.bits - 1)) if row.kind == "i" else 0
            high = (1 << (row.bits - (row.kind == "i"))) - 1
            few = [low, low + 1, high - 1, high, 0, 1, 2, 3, min(row.bits, high), min(row.bits + 1, high)]
            edges = np.array(few + ([-1, -2] if row.kind == "i" else []), object)
            extra = random.integers(low, high, (count, 50), np.int64 if row.kind == "i" else np.uint64, endpoint=True)
        case "f":
            edges = np.array([0.0, -0.0, 1, -1, 0.5, 2, -3, 2.5, -2.5, 1e-3, 100, np.inf, -np.inf, np.nan])
            extra = random.normal(size=(count, 50)) * 3
        case _:
            parts = np.array([0.0, -0.0, 1, -0.5, 20.5, 1000, np.inf, -np.inf, np.nan])
            edges = np.array([1 + 1j, -1 + 2j, 2 + 3j, -0.5 - 2j, *[complex(x, y) for x in parts for y in parts]])
            extra = random.normal(size=(count, 50)) + 1j * random.normal(size=(count, 50))
    pairs = np.meshgrid(*[edges] * min(count, 2), indexing="ij")
    columns = [p.ravel() for p in pairs][:count]
    return [np.concatenate([c, e]).astype(to_numpy(dtype)) for c, e in zip(columns, extra)]


def every_op(dtype):
    """Return the scalar ops on ``dtype`` with their result dtype."""
    for scalar in SCALARS.values():
        if kind_of(dtype) not in scalar.kinds or scalar.name in ("convert", "select", "decay"):
            continue
        if scalar.result == "complex" and dtype not in ("f32", "f64"):
            continue
        yield scalar, result_dtype(scalar, (dtype,) * scalar.arity, None)


def one_kernel(name, dtype, rows, length):
    """Return a kernel with an output for each ``(op, result dtype)`` of ``rows``."""
    a, b = Buffer("a", dtype, (length,)), Buffer("b", dtype, (length,))
    i = (sym("i", 0, length),)
    outs = tuple(Buffer(f"o{n}", result, (length,)) for n, (_, result) in enumerate(rows))
    body = [
        Store(out, i, Apply(scalar.name, (Load(a, i), Load(b, i))[: scalar.arity], result))
        for out, (scalar, result) in zip(outs, rows, strict=True)
    ]
    return Kernel(name, (a, b), outs, (), length, (For("i", 0, length, tuple(body), "parallel"),))


def combining(name, dtype, functions, length):
    """Return a kernel with an output for each of ``functions``, by which a store combines eight elements into one."""
    a, item, k = Buffer("a", dtype, (length, 8)), sym("i", 0, length), sym("k", 1, 8)
    outs, body = [], []
    for n, fn in enumerate(functions):
        out, own = Buffer(f"o{n}", dtype, (length,)), Buffer(f"own{n}", dtype, (), "private")
        more = For("k", 1, 8, (Store(own, (), Load(a, (item, k)), fn),), "serial")
        body += [Alloc(own), Store(own, (), Load(a, (item, 0))), more, Store(out, (item,), Load(own, ()))]
        outs.append(out)
    return Kernel(name, (a,), tuple(outs), (), length, (For("i", 0, length, tuple(body), "parallel"),))


def combiners(dtype):
    """Return the functions by which a store may combine elements of ``dtype`` on any target.

    ``max_number`` occurs only in kernels for CPUs.
    """
    return [fn for fn in sorted(ACCUMULATED - {"max_number"}) if kind_of(dtype) in SCALARS[fn].kinds]


def sources_of(to):
    """Return the dtypes that can be converted to ``to``."""
    return [d for d in DTYPES if DTYPES[d].kind != "c" or DTYPES[to].kind == "c"]


def converting(to, sources, length):
    """Return a kernel with a conversion to ``to`` from each of the dtypes ``sources``."""
    i = (sym("i", 0, length),)
    ins = tuple(Buffer(f"a{n}", d, (length,)) for n, d in enumerate(sources))
    outs = tuple(Buffer(f"o{n}", to, (length,)) for n in range(len(ins)))
    stores = tuple(Store(o, i, Apply("convert", (Load(a, i),), to)) for a, o in zip(ins, outs))
    return Kernel(f"to_{to}", ins, outs, (), length, (For("i", 0, length, stores, "parallel"),))


def ulps(got, want):
    """Return the distance in units in the last place of ``want``; equal special values have distance 0."""
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    with np.errstate(all="ignore"):
        gap = np.abs(got.astype(np.float64) - want.astype(np.float64))
        unit = np.abs(np.spacing(want)).astype(np.float64)
        return np.where(same, 0, np.where(np.isfinite(got) & np.isfinite(want), gap / unit, np.inf))


def agree(name, dtype, got, want):
    """Assert that one op's results agree with the reference within the op's tolerance."""
    if got.dtype.kind == "c":
        agree_complex(name, got, want)
        return
    if got.dtype.kind in "biu":
        np.testing.assert_array_equal(got, want, err_msg=name)
        return
    if dtype in ("f16", "bf16"):
        got, want = got.astype(np.float32), want.astype(np.float32)
        unit = {"f16": 2.0**13, "bf16": 2.0**16}[dtype]
        assert np.nanmax(ulps(got, want)) <= unit, name
        return
    if SCALARS[name].approximates and dtype == "f32":
        assert ulps(got, want).max() <= SCALARS[name].tolerance, name
        return
    name = SCALARS[name].approximates or name
    slack = max(MAX_ULP.get(name, (0, 0))) + 2 if name in MAX_ULP or kind_of(dtype) == "c" else 0
    assert ulps(got, want).max() <= slack + 1, name


def agree_complex(name, got, want):
    """Assert that complex results agree relative to their larger part; next to NaN, infinity may have either sign."""
    if name == "pow":  # whose direction is that of a rounded phase, where it is large
        got, want = np.abs(got), np.abs(want)
    else:
        got, want = got.copy(), want.copy()
        for x in (got, want):
            nan = np.isnan(x)
            x.real[nan], x.imag[nan] = np.abs(x.real[nan]), np.abs(x.imag[nan])
    tolerance = 1e-5 if got.dtype in (np.complex64, np.float32) else 1e-12
    finite = np.isfinite(got) & np.isfinite(want)
    np.testing.assert_allclose(got[finite], want[finite], rtol=tolerance, atol=tolerance, err_msg=name)
    for part in (np.real, np.imag):
        ours, theirs = part(got)[~finite], part(want)[~finite]
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance, err_msg=name)


def log_gamma(x):
    """Return the logarithm of ``|gamma(x)|`` to the precision of a longdouble; infinity at poles."""
    return np.array([_log_gamma(float(v)) for v in x], np.longdouble)


def digamma(x):
    """Return the logarithmic derivative of gamma to the precision of a longdouble; NaN at poles."""
    return np.array([_digamma(float(v)) for v in x], np.longdouble)


def _digamma(x):
    import mpmath

    if not np.isfinite(x) or (x <= 0 and x == int(x)):
        return np.inf if x == np.inf else np.nan
    with mpmath.workdps(40):
        return np.longdouble(mpmath.nstr(mpmath.digamma(x) if x < 1e15 else mpmath.log(x), 25))


def _log_gamma(x):
    import mpmath

    if not np.isfinite(x) or (x <= 0 and x == int(x)):
        return np.nan if np.isnan(x) else np.inf
    with mpmath.workdps(40):
        return np.longdouble(mpmath.nstr(mpmath.loggamma(x).real, 25))


def check_every_op(dtype, run_kernel, plain=False):
    """Assert that each scalar op on ``dtype`` agrees with NumPy; ``run_kernel(kernel, arrays, grid)`` runs all of them.

    ``plain``: digamma is a sum in 64 bits, which loses digits near its zeros, and complex functions are for numbers of
    moderate size.
    """
    rows = list(every_op(dtype))
    a, b = operands(dtype, 2)
    if plain and kind_of(dtype) == "c":
        moderate = (abs(a) < 100) & (abs(b) < 100)
        a, b = a[moderate], b[moderate]
    outs = [np.zeros(len(a), to_numpy(result)) for _, result in rows]
    run_kernel(one_kernel(f"ops_{dtype}", dtype, rows, len(a)), [a, b, *outs], len(a))
    problems = []
    for (scalar, result), got in zip(rows, outs, strict=True):
        want = apply_scalar_op(scalar, [a, b][: scalar.arity], result)
        if scalar.name == "lgamma":  # SciPy's loses digits beside its negative zeros
            want = log_gamma(a).astype(want.dtype)
        if scalar.name == "digamma":  # SciPy's loses digits beside poles, the reflection in 64 bits beside zeros
            want = digamma(a).astype(want.dtype)
            if dtype == "f64":
                terms = np.finfo(np.float64).eps * (1 + np.log1p(np.abs(a)))
                want = np.where(((a < 0) | plain) & (np.abs(np.nan_to_num(got - want)) < 3 * terms), got, want)
        try:
            agree(scalar.name, dtype, got, want)
        except AssertionError as error:
            problems.append(f"{scalar.name}: {error}")
    assert not problems, "\n".join(problems)
