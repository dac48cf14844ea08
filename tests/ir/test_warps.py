"""``match`` and ``warp_barrier`` of the loop IR: text, verifier, meaning, instructions."""

import numpy as np
import pytest

from aotc.ir.loop.parser import parse_kernel
from aotc.ir.loop.printer import print_kernel
from aotc.ir.loop.run import run_kernel
from aotc.ir.loop.verify import verify_kernel
from aotc.targets import resolve_targets

TEXT = '''def k(a: "u32[64]", /, o: "u32[64]", *, grid: "1"):
    x = private("u32[64]")
    y = private("u32[64]")
    for t in thread(0, 64):
        x[t] = a[t]
    match(y, x, bits=3)
    warp_barrier()
    for t in thread(0, 64):
        o[t] = y[t]
'''


@pytest.mark.ir
def test_match_finds_lanes_with_equal_bits():
    kernel = parse_kernel(TEXT)
    assert verify_kernel(kernel) == []
    assert parse_kernel(print_kernel(kernel)) == kernel
    assert "    match(y, x, bits=3)\n    warp_barrier()\n" in print_kernel(kernel)
    words = np.random.default_rng(0).integers(0, 2**32, 64, dtype=np.uint32)
    found = np.zeros(64, np.uint32)
    run_kernel(kernel, [words, found])
    for t in range(64):
        warp = range(t // 32 * 32, t // 32 * 32 + 32)
        assert found[t] == sum(1 << (s % 32) for s in warp if words[s] % 8 == words[t] % 8)


@pytest.mark.ir
@pytest.mark.parametrize(
    ("old", "new"),
    [("bits=3", "bits=33"), ('y = private("u32[64]', 'y = private("u32[32]'), ('x = private("u32', 'x = shared("u32')],
)
def test_the_verifier_finds_invalid_matches(old, new):
    assert any("match" in finding for finding in verify_kernel(parse_kernel(TEXT.replace(old, new))))


@pytest.mark.cudasim
def test_match_compiles_to_ballots():
    pytest.importorskip("numba_cuda")
    from aotc.kernels.cuda.compile import kernel_ptx

    text = kernel_ptx(parse_kernel(TEXT), resolve_targets("cuda:compute_80")[0])
    assert text.count("vote.sync.ballot.b32") == 3
    assert "bar.warp.sync" in text
