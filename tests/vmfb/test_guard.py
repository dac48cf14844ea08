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
from aotc.vmfb.verify.call_memory import CallMemory
CallMemory.check_submission = CallMemory.allocate_result = lambda *_: None
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


BLOCKS = """func.func @main(%n: tensor<i32>) -> (tensor<i32>, tensor<1024xf32>) {
  %s = stablehlo.reshape %n : (tensor<i32>) -> tensor<1xi32>
  %i = stablehlo.dynamic_iota %s, dim = 0 : (tensor<1xi32>) -> tensor<?xi32>
  %j = "stablehlo.sort"(%i) <{dimension = 0 : i64}> ({
    ^bb0(%a: tensor<i32>, %b: tensor<i32>):
      %g = stablehlo.compare GT, %a, %b : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %g : tensor<i1>
  }) : (tensor<?xi32>) -> tensor<?xi32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %m = stablehlo.reduce(%j init: %zero) applies stablehlo.maximum across dimensions = [0]
    : (tensor<?xi32>, tensor<i32>) -> tensor<i32>
  %c = stablehlo.constant dense<"CONSTANT"> : tensor<1024xf32>
  %d = stablehlo.constant dense<"DIFFERENT"> : tensor<1024xf32>
  %e = stablehlo.reverse %c, dims = [0] : tensor<1024xf32>
  %f = stablehlo.broadcast_in_dim %m, dims = [] : (tensor<i32>) -> tensor<1024xi32>
  %k = stablehlo.convert %f : (tensor<1024xi32>) -> tensor<1024xf32>
  %x = stablehlo.multiply %c, %k : tensor<1024xf32>
  %y = stablehlo.power %d, %x : tensor<1024xf32>
  return %m, %y : tensor<i32>, tensor<1024xf32>
}""".replace("CONSTANT", "0x" + bytes(range(1, 65)).hex() * 64).replace("DIFFERENT", "0x" + bytes(64).hex() * 64)
# One more line of elements than there are; the constants begin a line too late.
BESIDE = """
from aotc.vmfb.devices.cpu.session import CpuSession
submit = CpuSession.submit

def planted(self, number, parameters):
    if PLACE == "arena":
        parameters = [p + 16 if p == 5000 else p for p in parameters]
    if PLACE == "constants":
        self._slots[4] += 64
    submit(self, number, parameters)

CpuSession.submit = planted
main = aotc.load(aotc.compile(BLOCKS, guard=APART), threads=1)._functions["main"]
main.run([np.int32(5000)])
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


@pytest.mark.parametrize(("place", "apart", "code"), [
    ("nowhere", True, 0), ("arena", False, 0), ("arena", True, -signal.SIGSEGV),
    ("constants", False, 0), ("constants", True, -signal.SIGSEGV),
])  # fmt: skip
def test_blocks_within_the_arena_and_the_constants_lie_apart(place, apart, code):
    known = f"PLACE, APART, BLOCKS = {place!r}, {apart}, {BLOCKS.encode()!r}\n"
    done = run(UNPROVEN + known + BESIDE, "1")
    assert (done.returncode, done.stdout) == (code, "" if code else "unnoticed\n"), done.stderr
