"""Scalar ops and loops of the loop IR as native code, beside NumPy."""

from functools import partial

import pytest

pytest.importorskip("numba")

from support import emulated
from support.scalar_kernels import check_every_op, run

from aotc.targets import TARGETS
from aotc.vmfb.dtypes import DTYPES
from aotc.vmfb.host.machine import cpu_features

pytestmark = pytest.mark.cpu

DTYPE_NAMES = ("i1", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64", "f16", "bf16", "f32", "f64", "c64", "c128")
SHORT = ("i2", "i4", "u2", "u4", "f8E5M2")
OLDER = [TARGETS[name] for name in ("cpu:x86-64-v2", "cpu:x86-64-v3")]  # what this machine can do beside its best
RUNNABLE = [None, *(t for t in OLDER if cpu_features().issuperset(t.features))]


@pytest.mark.parametrize("dtype", DTYPE_NAMES + SHORT)
@pytest.mark.parametrize("target", RUNNABLE, ids=lambda t: t.name if t else "host")
def test_every_scalar_op(dtype, target):
    check_every_op(dtype, partial(run, target=target))


@pytest.mark.emulated
@pytest.mark.parametrize("dtype", [*DTYPES])
@pytest.mark.parametrize("target", emulated.MACHINES)
def test_every_scalar_op_under_qemu(dtype, target):
    if emulated.missing(target):
        pytest.skip(f"needs qemu: {emulated.missing(target)}")
    check_every_op(dtype, partial(emulated.run_kernel, target=TARGETS[target]))
