"""Which loops of a kernel ask whether to go on: those of a while, and heavy turns of an item that takes long."""

import pytest

pytest.importorskip("numba")

from aotc.ir.loop_parser import parse_kernel
from aotc.kernels.cpu.tile import emit_tile
from aotc.kernels.emit.body import emit_body
from aotc.kernels.limits import COUNTED_TURN, LONG_ITEM
from aotc.kernels.llvm_types import KernelModule
from aotc.targets import host

pytestmark = pytest.mark.cpu

NEST = """
def k(a0: "f32[{inner}]", /, o0: "f32[{inner}]", *, grid: "1"):
    for i in range(0, {outer}):
        for j in range(0, {inner}):
            o0[j] = a0[j]
"""
WHILE = """
def k(a0: "f32[]", /, o0: "f32[]", *, grid: "1"):
    o0[()] = a0[()]
    while True:
        if not o0[()] < f32(2.0):
            break
        o0[()] = sin(o0[()])
"""


def polls(text):
    """Return how many places of a kernel poll."""
    module = KernelModule("kernel", host())
    emit_body(module, "body", parse_kernel(text), host(), emit_tile)
    return str(module).count('"poll')


def test_a_while_polls():
    assert polls(WHILE) > 0


@pytest.mark.parametrize(
    ("outer", "inner", "counted"),
    [
        (LONG_ITEM // COUNTED_TURN, COUNTED_TURN, True),
        (LONG_ITEM // COUNTED_TURN - 1, COUNTED_TURN, False),
        (2 * LONG_ITEM // COUNTED_TURN, COUNTED_TURN - 1, False),
    ],
)
def test_heavy_turns_of_a_long_item_poll(outer, inner, counted):
    assert (polls(NEST.format(outer=outer, inner=inner)) > 0) == counted
