"""Every scalar op, conversion and combining store of every dtype as machine code for each GPU: what libNVVM takes."""

from functools import partial

import numpy as np
import pytest

pytest.importorskip("numba_cuda")

from gpu import gpu_kernels
from support.scalar_kernels import combiners, combining, converting, every_op, one_kernel, operands, sources_of
from vmfb.test_cuda import gpu

from aotc.ir.opset.elementwise import SCALARS, apply_scalar_op
from aotc.kernels.cuda.compile import compile_kernel, kernel_ptx
from aotc.targets import TARGETS
from aotc.vmfb.dtypes import DTYPES, kind_of, to_numpy

pytestmark = pytest.mark.cudasim

LENGTH = 64
PORTABLE, *CUBINS = sorted((t for t in TARGETS.values() if t.kind == "cuda"), key=lambda t: not t.portable)
QUICK = ("i1", "i4", "i8", "u16", "i64", "f8E4M3FN", "f16", "bf16", "f32", "f64", "c64")


def kernels_of(dtype):
    """Return the kernels of a dtype: its ops, its combining stores, the conversions to it."""
    rows, names = list(every_op(dtype)), combiners(dtype)
    found = [converting(dtype, sources_of(dtype), LENGTH)]
    found += [one_kernel("ops", dtype, rows, LENGTH)] if rows else []
    return found + ([combining("combined", dtype, names, LENGTH)] if names else [])


@pytest.mark.parametrize("dtype", [d if d in QUICK else pytest.param(d, marks=pytest.mark.slow) for d in DTYPES])
def test_text_of_every_scalar_op(dtype):
    """libNVVM is of one version; of the linker the newest would do what older ones refuse."""
    for kernel in kernels_of(dtype):
        text = kernel_ptx(kernel, PORTABLE)
        assert ".visible .entry" in text
        assert ".extern .func" not in text, kernel.name


@pytest.mark.slow
@pytest.mark.parametrize("target", CUBINS, ids=lambda t: t.cpu)
@pytest.mark.parametrize("dtype", DTYPES)
def test_machine_code_of_every_scalar_op(dtype, target):
    for kernel in kernels_of(dtype):
        assert compile_kernel(kernel, target).data[:4] == b"\x7fELF"


class TestOnAGpu:
    pytestmark = gpu

    @pytest.mark.parametrize("target", ["cuda:sm_90a", "cuda:compute_80"])
    @pytest.mark.parametrize("dtype", [d for d in DTYPES if combiners(d)])
    def test_combining_stores(self, dtype, target):
        """All that depends on no order of rounding has NumPy's values, and its NaN."""
        names = [fn for fn in combiners(dtype) if fn in ("max", "min") or kind_of(dtype) in "biu"]
        x = np.resize(operands(dtype, 1)[0], (LENGTH, 8))
        outs = [np.zeros(LENGTH, to_numpy(dtype)) for _ in names]
        run = partial(gpu_kernels.run, target=TARGETS[target])
        run(combining("combined", dtype, names, LENGTH), [x, *outs], LENGTH)
        for name, out in zip(names, outs):
            want = x[:, 0]
            for k in range(1, 8):
                want = apply_scalar_op(SCALARS[name], [want, x[:, k]], dtype)
            if DTYPES[dtype].kind == "f" and DTYPES[dtype].bits < 32:  # of whose NaN NumPy knows nothing
                out, want = out.astype(np.float32), want.astype(np.float32)
            np.testing.assert_array_equal(out, want, err_msg=name)
