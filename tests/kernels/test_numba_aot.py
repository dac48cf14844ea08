"""Python functions compiled by Numba to objects that need no Python."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest

pytest.importorskip("numba")

import llvmlite.binding as llvm
from numba import njit, types

from aotc.kernels import numba_aot as aot
from aotc.targets import TARGETS

V3 = TARGETS["cpu:x86-64-v3"]
F64 = types.CPointer(types.float64)

pytestmark = [pytest.mark.cpu, pytest.mark.own_process]


@njit
def _clip(a, b):
    return min(a, b)


def _total(p, n):
    s = 0.0
    for i in range(_clip(n, 100)):
        s += p[i]
    return s


def library_for(target):
    library = aot.compile_by_numba_front_end("total", aot.Export(_total, types.float64, (F64, types.int64)), target)
    library.optimize()
    return library


def test_same_bytes_twice():
    assert library_for(V3).emit_native_object() == library_for(V3).emit_native_object()


def test_two_threads_compile_functions_that_call_the_same_one():
    """Another thread has compiled the called function: LLVM cannot link modules of two contexts."""
    alone = library_for(V3).emit_native_object()
    together = Barrier(2)

    def compile_total(_):
        together.wait()
        return library_for(V3).emit_native_object()

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(compile_total, range(2))) == [alone, alone]


def test_needs_nothing_of_python():
    library = library_for(V3)
    assert library.imports() == set()
    assert [f.name for f in library.module.functions if not f.is_declaration] == ["total"]


def test_other_machine():
    target = TARGETS["cpu:aarch64"]
    data = library_for(target).emit_native_object()
    assert data[:4] == b"\x7fELF"
    assert np.frombuffer(data[18:20], np.uint16)[0] == 183
    assert llvm.Target.from_triple(target.triple).name == "aarch64"
