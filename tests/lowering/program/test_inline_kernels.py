"""One kernel's body within another: every name that it uses is one that it makes, or one of its new memory."""

import numpy as np
import pytest

from aotc.ir.loop.ir import Kernel
from aotc.ir.loop.parser import parse_kernel
from aotc.ir.loop.printer import print_kernel
from aotc.ir.loop.run import run_kernel
from aotc.ir.loop.verify import verify_kernel
from aotc.lowering.program.while_kernels.inline_kernels import inline_kernel

pytestmark = pytest.mark.ir

TEXT = '''def k(a: "u32[64]", /, o: "u32[64]", *, grid: "1"):
    x = private("u32[64]")
    y = private("u32[64]")
    for t in thread(0, 64):
        x[t] = a[t]
    shuffle(y, x, mask=16)
    barrier()
    match(x, y, bits=2)
    for t in thread(0, 64):
        z = x[t] + y[t]
        o[t] = z
'''


def test_inlined_kernels_have_their_own_shuffle_registers():
    kernel = parse_kernel(TEXT)
    body = inline_kernel(kernel, {b.name: b for b in (*kernel.inputs, *kernel.outputs)}, "_7")
    inside = Kernel("k", kernel.inputs, kernel.outputs, (), 1, body)
    assert verify_kernel(inside) == []
    assert parse_kernel(print_kernel(inside)) == inside
    assert "shuffle(y_7, x_7, mask=16)" in print_kernel(inside)
    assert "match(x_7, y_7, bits=2)" in print_kernel(inside)
    words = np.random.default_rng(0).integers(0, 2**32, 64, dtype=np.uint32)
    results = [np.zeros(64, np.uint32) for _ in range(2)]
    for made, out in zip((kernel, inside), results):
        run_kernel(made, [words, out])
    np.testing.assert_array_equal(*results)
