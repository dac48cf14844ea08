"""Scalar ops and loops of the loop IR as native code, beside NumPy."""

import numpy as np
import pytest

pytest.importorskip("numba")

from support.scalar_kernels import agree, every_op, one_kernel, operands, run

from aotc.ir.opset.elementwise import apply
from aotc.targets import TARGETS
from aotc.vmfb.dtypes import to_numpy
from aotc.vmfb.machine import cpu_features

pytestmark = pytest.mark.cpu

DTYPE_NAMES = ("i1", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64", "f16", "bf16", "f32", "f64", "c64", "c128")
SHORT_INTEGERS = ("i2", "i4", "u2", "u4")
OLDER = [TARGETS[name] for name in ("cpu:x86-64-v2", "cpu:x86-64-v3")]  # what this machine can do beside its best
RUNNABLE = [None, *(t for t in OLDER if cpu_features().issuperset(t.features))]


@pytest.mark.parametrize("dtype", DTYPE_NAMES + SHORT_INTEGERS)
@pytest.mark.parametrize("target", RUNNABLE, ids=lambda t: t.name if t else "host")
def test_every_scalar_op(dtype, target):
    rows = list(every_op(dtype))
    a, b = operands(dtype, 2)
    outs = [np.zeros(len(a), to_numpy(result)) for _, result in rows]
    run(one_kernel(f"ops_{dtype}", dtype, rows, len(a)), [a, b, *outs], len(a), target=target)
    problems = []
    for (scalar, result), got in zip(rows, outs, strict=True):
        want = apply(scalar, [a, b][: scalar.arity], result)
        try:
            agree(scalar.name, dtype, got, want)
        except AssertionError as error:
            problems.append(f"{scalar.name}: {error}")
    assert not problems, "\n".join(problems)
