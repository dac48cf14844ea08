"""Instructions of Hopper: barriers that count bytes, copies of tiles by the tensor memory accelerator, warpgroups.

Shared memory is named by 32-bit addresses, a barrier by that of its 8 bytes. Those that wait for other threads, or let
them go on, have no meaning for a thread by itself.
"""

from __future__ import annotations

from typing import NoReturn

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from aotc.kernels.cuda.ptx import I32, I64, NOTHING, ptx

DYNAMIC_SHARED = "aotc_dynamic_shared"
SWIZZLE_BYTES = 1024
"""unit: bytes
why: a tile whose rows are swizzled over 128 bytes begins at a multiple of it
from: PTX ISA, tensor swizzling modes
"""


def _together(what: str) -> NoReturn:
    raise NotImplementedError(f"{what} means nothing for a thread by itself")


@ptx("mbarrier.init.shared::cta.b64 [$0], $1;", NOTHING, I32, I32)
def barrier_init(barrier, arrivals):
    """Make a barrier whose phase ends with so many arrivals."""
    _together("a barrier")


@ptx("fence.mbarrier_init.release.cluster;", NOTHING)
def barriers_made():
    """Let the tensor memory accelerator see the barriers that this thread made."""
    _together("a fence")


@ptx("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", NOTHING, I32, I32)
def barrier_expect(barrier, size):
    """Arrive; the phase ends after so many bytes were copied, too."""
    _together("a barrier")


@ptx("mbarrier.arrive.shared::cta.b64 _, [$0];", NOTHING, I32)
def barrier_arrive(barrier):
    """Arrive."""
    _together("a barrier")


@ptx(
    "{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1;\n"
    "@p bra done;\nbra again;\ndone:\n}",
    NOTHING, I32, I32,
)  # fmt: skip
def barrier_wait(barrier, parity):
    """Wait for the end of a phase: the first has parity 0, the next 1, the one after that 0."""
    _together("a barrier")


@ptx(
    "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [$0], [$1, {$3, $4}], [$2];",
    NOTHING, I32, I64, I32, I32, I32,
)  # fmt: skip
def copy_tile(to, tensor_map, barrier, column, row):
    """Begin to copy the box of a tensor map at ``row`` and ``column``; what is outside of the array is 0."""
    _together("a copy")


@ptx("wgmma.fence.sync.aligned;", NOTHING)
def products_fence():
    """Let the products that follow use the registers that were written."""
    _together("a warpgroup")


@ptx("wgmma.commit_group.sync.aligned;", NOTHING)
def products_commit():
    """Make a group of the products that were begun."""
    _together("a warpgroup")


def products_wait(left: int):
    """Return the instruction that waits until at most ``left`` groups of products are not done."""

    @ptx(f"wgmma.wait_group.sync.aligned {left};", NOTHING)
    def wait():
        _together("a warpgroup")

    return wait


def registers(change: str, count: int):
    """Return the instruction by which a warpgroup gives registers away (``dec``) or takes them (``inc``)."""

    @ptx(f"setmaxnreg.{change}.sync.aligned.u32 {count};", NOTHING)
    def change_registers():
        _together("a warpgroup")

    return change_registers


@ptx("div.s32 $0, $1, $2;", I32, I32, I32)
def quotient(a, b):
    """Return ``a / b`` rounded down, of numbers that are not negative."""
    return a // b


@intrinsic
def shared_base(typing_context):
    """Return where the dynamic shared memory of the block begins."""

    def generate(context, builder, signature, arguments):
        memory = ir.GlobalVariable(builder.module, ir.ArrayType(ir.IntType(8), 0), DYNAMIC_SHARED, addrspace=3)
        memory.align = SWIZZLE_BYTES
        return builder.ptrtoint(memory, ir.IntType(32))

    return types.int32(), generate


@intrinsic
def address(typing_context, pointer):
    """Return a pointer as a number."""

    def generate(context, builder, signature, arguments):
        return builder.ptrtoint(arguments[0], ir.IntType(64))

    return types.int64(pointer), generate
