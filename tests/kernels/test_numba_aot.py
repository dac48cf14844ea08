"""Python functions compiled by Numba to objects that need no Python."""

import numpy as np
import pytest

pytest.importorskip("numba")

import llvmlite.binding as llvm
from numba import njit, types

from aotc.kernels import back_end
from aotc.kernels import numba_aot as aot
from aotc.targets import TARGETS

V3 = TARGETS["cpu:x86-64-v3"]
F64 = types.CPointer(types.float64)

pytestmark = pytest.mark.cpu


@njit
def _clip(a, b):
    return min(a, b)


def _total(p, n):
    s = 0.0
    for i in range(_clip(n, 100)):
        s += p[i]
    return s


def module_for(target):
    module = aot.front_end("total", aot.Export(_total, types.float64, (F64, types.int64)), target)
    back_end.optimize(module, target)
    return module


def test_same_bytes_twice():
    assert back_end.emit_object(module_for(V3), V3) == back_end.emit_object(module_for(V3), V3)


def test_needs_nothing_of_python():
    module = module_for(V3)
    undefined = [f.name for f in module.functions if f.is_declaration and not f.name.startswith("llvm.")]
    assert undefined == []
    assert [f.name for f in module.functions if not f.is_declaration] == ["total"]


def test_other_machine():
    target = TARGETS["cpu:aarch64"]
    data = back_end.emit_object(module_for(target), target)
    assert data[:4] == b"\x7fELF"
    assert np.frombuffer(data[18:20], np.uint16)[0] == 183
    assert llvm.Target.from_triple(target.triple).name == "aarch64"
