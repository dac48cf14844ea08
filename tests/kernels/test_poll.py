"""Which loops of a kernel count their work, so that it asks now and then whether to go on."""

import pytest

from aotc.ir.loop.parser import parse_kernel
from aotc.kernels.emit.poll import _IterationWork

pytestmark = pytest.mark.ir

HEADER = 'def k(a: "f32[n]", /, o: "f32[n]", *, n: "dim", grid: "n", flops: "n", bytes: "8*n"):'
WORK = """for i in range(0, 2000):
    o[p] = exp(a[p]) * a[p]"""


def counted(loop, inner=WORK, dim="dim"):
    body = "\n".join(f"            {line}" for line in inner.splitlines())
    head = HEADER.replace('"dim"', f'"{dim}"')
    kernel = parse_kernel(f"{head}\n    for p in parallel(0, n):\n        {loop}\n{body}\n")
    return len(_IterationWork(kernel).counted)


@pytest.mark.parametrize(
    ("loop", "found"),
    [
        ("for t in range(0, n):", 1),
        ("for t in range(0, 1000):", 1),
        ("for t in range(0, 8):", 0),
        ("for t in range(8*p, min(n, 8*p + 8)):", 0),
        ("for t in range(8*p, min(8*p + 1000, n)):", 1),
        ("for t in range(0, min(n, 8)):", 0),
    ],
)
def test_a_loop_of_few_turns_does_not_count(loop, found):
    assert counted(loop) == found


@pytest.mark.parametrize(("extent", "found"), [(9, 0), (1000, 1)])
def test_a_dim_of_a_known_range_has_no_more_turns(extent, found):
    assert counted("for t in range(0, n):", dim=f"dim(lo=1, extent={extent})") == found
