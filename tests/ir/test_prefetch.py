"""``prefetch`` of the loop IR: text, verifier, meaning, instructions."""

import re

import numpy as np
import pytest

from aotc.ir.loop.access import accesses, may_overwrite
from aotc.ir.loop.ir import Prefetch, walk
from aotc.ir.loop.parser import parse_kernel
from aotc.ir.loop.printer import print_kernel
from aotc.ir.loop.run import run_kernel
from aotc.ir.loop.verify import verify_kernel
from aotc.targets import TARGETS, resolve_targets

TEXT = '''def k(a: "f32[64]", /, o: "f32[64]", *, grid: "1", aliases: "[(0, 0)]"):
    for i in range(0, 64):
        prefetch(a[min(63, i + 16)])
        o[i] = a[i] * f32(2.0)
'''


@pytest.mark.ir
def test_prefetch_round_trips_and_changes_no_result():
    kernel = parse_kernel(TEXT)
    assert verify_kernel(kernel) == []
    assert print_kernel(kernel) == TEXT
    assert [type(s) for s in walk(kernel.body)].count(Prefetch) == 1
    x, found = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    run_kernel(kernel, [x, found])
    np.testing.assert_array_equal(found, 2 * x)


@pytest.mark.ir
def test_prefetch_is_not_an_access():
    """So an output may take the memory of what is fetched ahead."""
    kernel = parse_kernel(TEXT)
    assert [a.write for a in accesses(kernel.body)] == [False, True]
    assert may_overwrite(accesses(kernel.body), kernel.inputs[0], kernel.outputs[0])


@pytest.mark.ir
def test_a_prefetch_out_of_bounds_is_refused():
    text = TEXT.replace("min(63, i + 16)", "i + 16")
    assert any("prefetch of a" in finding for finding in verify_kernel(parse_kernel(text)))
    with pytest.raises(IndexError):
        run_kernel(text, [np.zeros(64, np.float32)] * 2)


@pytest.mark.cpu
@pytest.mark.parametrize(("name", "pattern"), [("cpu:x86-64-v3", r"prefetcht0"), ("cpu:aarch64", r"prfm\s+pldl1keep")])
def test_prefetch_is_an_instruction_on_cpus(name, pattern):
    from aotc.kernels.cpu.compile import kernel_assembly

    assert re.search(pattern, kernel_assembly(parse_kernel(TEXT), TARGETS[name]))


@pytest.mark.cudasim
def test_prefetch_is_dropped_on_gpus():
    pytest.importorskip("numba_cuda")
    from aotc.kernels.cuda.compile import kernel_ptx

    assert "prefetch" not in kernel_ptx(parse_kernel(TEXT), resolve_targets("cuda:compute_80")[0])
