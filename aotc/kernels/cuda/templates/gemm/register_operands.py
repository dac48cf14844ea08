"""Device functions of a TF32 matmul on Hopper whose first operand is contiguous along its rows.

wgmma reads f32 from shared memory only if it is contiguous along the contraction. So warps load their part of a stage
to registers and round it, while the products of the stage before run. A wgmma is asynchronous and still reads its
registers until it is waited for: the wait has them as operands, so that the compiler does not reuse them before.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba.cuda import types

from aotc.kernels.cuda.block import here
from aotc.kernels.cuda.ptx import F32 as FLOAT
from aotc.kernels.cuda.ptx import I32 as INT
from aotc.kernels.cuda.ptx import assembly, emitted
from aotc.kernels.cuda.templates.gemm.tiles import CHUNK, WarpgroupTiles
from aotc.kernels.cuda.templates.gemm.wgmma_steps import descriptor, tied
from aotc.kernels.cuda.templates.steps import TO_TF32, by_sides, operand_elements, own_elements
from aotc.kernels.llvm_types import F32, I32, I64, i32

_STEPS = CHUNK // (4 * 8)  # steps of a stage of f32: 8 terms each
_HELD = types.UniTuple(INT, 4 * _STEPS)


def _lane_bits(b: ir.IRBuilder, thread: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return the thread's warp and lane, and the lowest bit of the lane: whether its term is odd."""
    lane = b.and_(thread, i32(31))
    return b.and_(b.lshr(thread, i32(5)), i32(3)), lane, b.and_(lane, i32(1))


def hold(tiles: WarpgroupTiles) -> Any:
    """Return the device function that loads a warp's 16 rows of a stage, given the address of the warpgroup's 64.

    For each 8 terms, lane l has terms l % 4 and l % 4 + 4 of row l / 4 and of the row 8 below. Lanes with odd terms
    load the later term first: this avoids bank conflicts within the warp.
    """

    def generate(context, builder, signature, arguments):
        b, (at, thread) = builder, arguments
        warp, lane, odd = _lane_bits(b, thread)
        term = b.or_(b.and_(lane, i32(3)), b.shl(odd, i32(2)))
        piece = b.or_(b.shl(b.and_(warp, i32(1)), i32(2)), b.lshr(lane, i32(4)))
        word = b.and_(b.lshr(lane, i32(2)), i32(3))
        place = b.add(b.mul(b.lshr(warp, i32(1)), i32(tiles.depth * CHUNK)), b.mul(term, i32(CHUNK)))
        place = b.add(b.add(place, b.shl(b.xor(piece, term), i32(4))), b.shl(word, i32(2)))
        swaps = b.icmp_unsigned("!=", odd, i32(0))
        places = [[b.add(at, b.xor(place, i32(576 * n + 32 * below))) for below in range(2)] for n in range(2)]
        found = []
        for step in range(_STEPS):
            loaded = [[_load(b, p, step * 8 * CHUNK) for p in row] for row in places]
            for n in range(2):
                found += [b.select(swaps, loaded[1 - n][below], loaded[n][below]) for below in range(2)]
        rounded = [assembly(b, TO_TF32, INT, [FLOAT], [v]) for v in found]
        return context.make_tuple(builder, signature.return_type, rounded)

    @emitted(lambda at, thread: _HELD(INT, INT), generate)
    def load(at, thread):
        rows, terms = _own_places()
        whole = operand_elements(tiles, int(at), True, rows + 16 * (int(thread) // 32 % 4))
        return whole[np.arange(len(rows)), terms]

    return load


def _load(b: ir.IRBuilder, place: ir.Value, offset: int) -> ir.Value:
    kind = ir.FunctionType(F32, [I32])
    return b.asm(kind, f"ld.shared.f32 $0, [$1+{offset}];", "=f,r,~{memory}", [place], side_effect=True)


def _own_places() -> tuple[np.ndarray, np.ndarray]:
    """Return the rows, within its warp's 16, and the terms of the calling thread's registers."""
    return _places(here().thread % 32)


def _places(lane: Any) -> tuple[np.ndarray, np.ndarray]:
    n = np.arange(4 * _STEPS)
    return lane // 4 + 8 * (n % 2), 8 * (n // 4) + lane % 4 + 4 * (n // 2 % 2)


def nothing() -> Any:
    """Return the device function that creates a warp's registers before its first stage."""

    def generate(context, builder, signature, arguments):
        return context.make_tuple(builder, signature.return_type, [i32(0)] * len(_HELD))

    @emitted(_HELD, generate)
    def empty():
        return np.zeros(len(_HELD), np.float32)

    return empty


def multiply_registers(tiles: WarpgroupTiles) -> Any:
    """Return the device function that issues the products of a stage: as :func:`wgmma_steps.multiply`.

    It gets the registers of :func:`hold` in place of the address of the first operand.
    """
    count = tiles.width // 2
    sums = ", ".join(f"${n}" for n in range(count))
    given = ", ".join(f"${2 * count + n}" for n in range(4))
    text = (
        f"{{\n.reg .pred p;\nsetp.ne.b32 p, ${2 * count + 5}, 0;\n"
        f"wgmma.mma_async.sync.aligned.m64n{tiles.width}k8.f32.tf32.tf32 {{{sums}}}, "
        f"{{{given}}}, ${2 * count + 4}, p, 1, 1;\n}}"
    )
    constraints = ",".join(["=f"] * count + [str(n) for n in range(count)] + ["r"] * 4 + ["l", "r"])
    kind = ir.FunctionType(ir.LiteralStructType([F32] * count), [F32] * count + [I32] * 4 + [I64, I32])
    kept = types.UniTuple(FLOAT, count)

    def generate(context, builder, signature, arguments):
        b = builder
        values = [b.extract_value(arguments[t], n) for t, size in enumerate((count, len(_HELD))) for n in range(size)]
        together = tied(b, "wgmma.fence.sync.aligned;", values)
        held, rows = together[:count], together[count:]
        place = b.lshr(arguments[2], i32(4))
        for n in range(_STEPS):
            other = descriptor(b, b.add(place, i32(2 * n)), 16)
            operands = [*held, *rows[4 * n : 4 * n + 4], other, i32(1) if n else arguments[3]]
            found = b.asm(kind, text, constraints, operands, side_effect=True)
            held = [b.extract_value(found, k) for k in range(count)]
        return context.make_tuple(builder, signature.return_type, held)

    @emitted(lambda *given: kept(kept, _HELD, INT, INT), generate)
    def steps(sums, rows, other, iteration):
        by_rows = by_sides(tiles, tiles.a_by_rows, tiles.b_by_rows)[1]

        def whole(every):
            held = np.zeros((16, tiles.depth), np.float32)
            held[_places(np.arange(32)[:, None])] = every
            return held @ operand_elements(tiles, int(other), by_rows, np.arange(tiles.width)).T

        with here().block.warpgroup() as once:
            every = here().block.exchange(rows)
            found = once((here().thread // 32, int(other)), partial(whole, every))[own_elements(tiles.width)]
        return sums + found if iteration else found

    return steps


def wait_for_products(tiles: WarpgroupTiles) -> Any:
    """Return the device function that waits for all products and returns the accumulators; it gets the operand, too."""
    count = tiles.width // 2
    kept = types.UniTuple(FLOAT, count)

    def generate(context, builder, signature, arguments):
        b = builder
        values = [b.extract_value(arguments[t], n) for t, size in enumerate((count, len(_HELD))) for n in range(size)]
        found = tied(b, "wgmma.wait_group.sync.aligned 0;", values)
        return context.make_tuple(builder, signature.return_type, found[:count])

    @emitted(lambda sums, rows: kept(kept, _HELD), generate)
    def wait(sums, rows):
        return sums

    return wait
