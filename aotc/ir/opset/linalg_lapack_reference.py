"""The reference of the op ``lapack``: it calls SciPy's LAPACK by the table, one matrix after the other."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np

from aotc.ir.dims.algebra import static
from aotc.ir.opset.linalg_lapack import NOT_FINITE, ROUTINES, Copied, Letter, Number, Problem, Read, Result, Update
from aotc.ir.opset.linalg_lapack import lapack_symbol as symbol_of
from aotc.ir.opset.spec import Arrays, Attrs, Types, static_sizes
from aotc.ir.tensor.ir import TensorType
from aotc.vmfb.dtypes import from_numpy, to_numpy


@cache
def _scipy_routine(name: str) -> Any:
    from scipy.linalg import cython_blas, cython_lapack

    table = cython_lapack.__pyx_capi__
    capsule = table[name] if name in table else cython_blas.__pyx_capi__[name]
    name_of = ctypes.pythonapi.PyCapsule_GetName
    name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return ctypes.CFUNCTYPE(None)(pointer(capsule, name_of(capsule)))


def call_scipy_lapack(name: str, arrays: list[np.ndarray]) -> None:
    """Call routine ``name`` of BLAS or LAPACK with contiguous arrays; int64 arrays are its integer arguments.

    SciPy's library has 32-bit integers, so int64 arrays are converted before and after the call.
    """
    narrow = [a.astype(np.int32) if a.dtype == np.int64 else a for a in arrays]
    _scipy_routine(name)(*(ctypes.c_void_p(a.ctypes.data) for a in narrow))
    for own, used in zip(arrays, narrow, strict=True):
        if used is not own and own.size:
            own[...] = used


def reference_lapack(arrays: Arrays, attrs: Attrs, regions: tuple, types: Types) -> list[np.ndarray]:
    """Compute a ``lapack`` op by SciPy's LAPACK, matrix by matrix."""
    row = ROUTINES[attrs["routine"]]
    results = [np.zeros(static_sizes(t), to_numpy(t.dtype)) for t in types]
    for n, operand in enumerate(row.updates):
        results[n] = arrays[operand].copy()
    rank = arrays[0].ndim - row.ranks[0]
    for at in np.ndindex(*arrays[0].shape[:rank]):
        _call_lapack_for_matrix(
            attrs, [a[at] for a in arrays], [r[at] if r.ndim > rank else r[(*at, None)] for r in results]
        )
    return results


def _call_lapack_for_matrix(attrs: Attrs, operands: list[np.ndarray], results: list[np.ndarray]) -> None:
    """Call the LAPACK routine for one matrix; it writes to the arrays ``results``."""
    row = ROUTINES[attrs["routine"]]
    types = tuple(TensorType(from_numpy(a.dtype), a.shape) for a in operands)
    problem = Problem(types, attrs["options"])
    if row.finite and not np.isfinite(operands[0]).all():
        results[-1][...] = NOT_FINITE
        return
    given: list[np.ndarray] = []
    back: list[tuple[np.ndarray, np.ndarray]] = []
    for argument in row.arguments(problem):
        match argument:
            case Letter(value):
                given.append(np.frombuffer(value.encode(), np.uint8))
            case Number(value):
                given.append(np.array([value], np.int64))
            case Read(k) | Copied(k):
                given.append(np.array(operands[k]))
            case Update(k, first):
                given.append(results[k].reshape(-1)[first:])
            case Result(k):
                given.append(results[k])
            case work:
                given.append(np.zeros((static(work.size),), to_numpy(work.dtype)))
        own = given[-1]
        if own.dtype == np.int32 or not own.flags.c_contiguous:
            given[-1] = np.ascontiguousarray(own, np.int64 if own.dtype == np.int32 else None)
            back.append((own, given[-1]))
    call_scipy_lapack(symbol_of(attrs["routine"], problem.dtype), given)
    for own, used in back:
        own[...] = used.reshape(own.shape)
