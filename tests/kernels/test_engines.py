"""The engine in which tests run LLVM IR."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="reads this machine's maps"),
]
ROOT = Path(__file__).parents[2]
FAR = '''
import ctypes
from pathlib import Path

from benchmarks.engines import load_module

PAGE, APART, FIRST_OF_LIBRARIES = 4096, 3 << 30, 0x7000_0000_0000
PRIVATE_UNRESERVED, FIXED = 0x22 | 0x4000, 0x100000
C = ctypes.CDLL(None)
C.mmap.restype = ctypes.c_void_p
C.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]

def regions():
    words = (line.split() for line in Path("/proc/self/maps").read_text().splitlines())
    ends = [[int(x, 16) for x in w[0].split("-")] for w in words if "[" not in w[-1]]
    return [tuple(x) for x in ends if x[0] > FIRST_OF_LIBRARIES]

def reserve(first, size):
    C.mmap(first, size, 0, PRIVATE_UNRESERVED | FIXED, -1, 0)

TEXT = """
define void @run(ptr %p) {
  %x = load <4 x float>, ptr %p, align 4
  %y = fadd <4 x float> %x, <float 1.0, float 2.0, float 3.0, float 4.0>
  store <4 x float> %y, ptr %p, align 4
  ret void
}
"""
load_module(TEXT)  # allocates what LLVM needs once
before = regions()
for (_, end), (first, _) in zip(before, before[1:]):
    if first > end:
        reserve(end, first - end)
reserve(before[0][0] - PAGE - APART, APART)  # one page is left for the first section
engine = load_module(TEXT)
array = (ctypes.c_float * 4)(*range(4))
address = engine.get_function_address("run")
assert before[0][0] - PAGE <= address < before[0][0], "the code is not in the page that was left"
assert any(last < before[0][0] - APART for _, last in set(regions()) - set(before))
ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)(ctypes.addressof(array))
print(*array)
'''


def test_sections_may_be_far_apart():
    """The code takes the only page that is free for 3 GiB; its constants are beyond them."""
    found = subprocess.run([sys.executable, "-c", FAR], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert (found.stdout, found.returncode) == ("1.0 3.0 5.0 7.0\n", 0), found.stderr[-2000:]
