"""``AOTC_GUARD=1``: what a kernel reads or writes beyond an array, it does in a page that stops it."""

import os
import signal
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.cpu, pytest.mark.skipif(sys.platform != "linux", reason="guard pages are made with mprotect")]

TEXT = """func.func @main(%x: tensor<1024xf32>) -> tensor<1024xf32> {
  %y = stablehlo.exponential %x : tensor<1024xf32>
  %r = stablehlo.reverse %y, dims = [0] : tensor<1024xf32>
  return %r : tensor<1024xf32>
}"""
SETUP = f"""
import numpy as np
import aotc
main = aotc.load(aotc.compile({TEXT.encode()!r}), threads=1)._functions["main"]
x = np.arange(1024, dtype=np.float32) / 1024
"""
RIGHT = """
out = np.zeros(1024, np.float32)
(found,) = main.run([x])
assert main.run([x], out=[out])[0] is out
np.testing.assert_allclose(found, np.exp(x)[::-1], rtol=1e-6)
np.testing.assert_array_equal(found, out)
assert main.call([x])[0].shape == (1024,)
print("right")
"""
# As if the kernels' entries said less than their code does; else the call would be refused.
UNPROVEN = """
from aotc.vmfb.safety.call_memory import CallMemory
CallMemory.check = CallMemory.result = lambda *_: None
"""
OVERREAD = f"""{UNPROVEN}
main.arguments[0].dims = (1023,)
main.run([x[:1023]])
print("unnoticed")
"""
OVERWRITE = f"""{UNPROVEN}
from aotc.vmfb.isa import BY_NAME
const = BY_NAME["const"].run
main._program = [(run, [ops[0], 1023] if run is const and ops[1] == 1024 else ops) for run, ops in main._program]
main.run([x])
print("unnoticed")
"""


def run(code, guard):
    environment = {**os.environ, "AOTC_GUARD": guard}
    return subprocess.run(
        [sys.executable, "-c", SETUP + code], capture_output=True, text=True, env=environment, timeout=300, check=False
    )


def test_right_programs_give_the_same():
    for guard in ("1", "0"):
        done = run(RIGHT, guard)
        assert done.stdout == "right\n", done.stderr


@pytest.mark.parametrize("code", [OVERREAD, OVERWRITE], ids=["read", "write"])
def test_an_element_beyond_an_array_is_a_fault(code):
    assert run(code, "1").returncode == -signal.SIGSEGV
