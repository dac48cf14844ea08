"""Every scalar op on every dtype, on the GPU: what libNVVM and the linker make of them."""

from functools import partial

import numpy as np
import pytest
from gpu import gpu_kernels
from support.scalar_kernels import check_every_op, converting, every_op, operands, sources_of
from vmfb.test_cuda import gpu

from aotc.ir.opset.elementwise_scalars import convert
from aotc.targets import TARGETS
from aotc.vmfb.dtypes import DTYPES, to_numpy

pytestmark = gpu

GPUS = [TARGETS["cuda:sm_90a"], TARGETS["cuda:compute_80"]]


@pytest.mark.parametrize("target", GPUS, ids=lambda t: t.cpu)
@pytest.mark.parametrize("dtype", [d for d in DTYPES if list(every_op(d))])
def test_every_scalar_op(dtype, target):
    check_every_op(dtype, partial(gpu_kernels.run, target=target))


@pytest.mark.parametrize("target", GPUS, ids=lambda t: t.cpu)
@pytest.mark.parametrize("to", DTYPES)
def test_every_conversion(to, target):
    sources, length = sources_of(to), 64
    arrays = [np.resize(operands(d, 1)[0], length) for d in sources]
    outs = [np.zeros(length, to_numpy(to)) for _ in arrays]
    gpu_kernels.run(converting(to, sources, length), [*arrays, *outs], length, target)
    for source, x, got in zip(sources, arrays, outs):
        want = convert(x, to)
        if DTYPES[to].kind == "f" and DTYPES[to].bits < 32:  # of whose NaN NumPy knows nothing
            got, want = got.astype(np.float32), want.astype(np.float32)
        np.testing.assert_array_equal(got, want, err_msg=source)
