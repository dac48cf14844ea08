"""Matmuls and convolutions as plain loops: any dtype, grouped and depthwise convolutions, tiny sizes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product as taps_of

from aotc.ir.dims.algebra import Dim, product, static, sym
from aotc.ir.loop.ir import Apply, For, Kernel, Scalar, Stmt
from aotc.lowering.analysis.contractions import sum_dtype
from aotc.lowering.analysis.index_maps import Index, delinearize
from aotc.lowering.elements.builder import RegionBuilder, grid_item, store_results
from aotc.lowering.elements.contract_elements import contraction_element, conv_term, rounded_sum, zero_scalar
from aotc.lowering.elements.elements import provide_scalar
from aotc.lowering.plans.contract_loops import DepthwisePlan, ElementLoopsPlan
from aotc.lowering.regions.loop.any_loops import loops_of_plan


def lower_element_loops(b: RegionBuilder, plan: ElementLoopsPlan) -> Kernel:
    """Lower a matmul or convolution to scalar loops, one result element at a time."""
    e = b.elements()
    emit = contraction_element(b, e, plan.is_unrolled, plan.from_zero)
    return _matmul_loop_kernel(b, *loops_of_plan(b, e, plan.loops, emit))


def _matmul_loop_kernel(b: RegionBuilder, grid: Dim, body: tuple[Stmt, ...]) -> Kernel:
    """Assemble the kernel, with one multiplication and one addition for each term of each result element."""
    left, right = (v.type.shape for v in b.root.operands[:2])
    terms = product(right[:-1]) if b.root.name == "conv" else product(left[-1:])  # weights of a result channel
    return b.kernel(grid, body, product(b.shape) * 2 * terms)


def lower_depthwise(b: RegionBuilder, plan: DepthwisePlan) -> Kernel:
    """Lower to loops in which a vector of channels moves along a row of pixels, several pixels at a time.

    Each weight, and each input pixel, is loaded once for these pixels; few weights stay in registers. ::

        for p in parallel(0, rows):
            for v in range(0, channels // 16):
                for i2 in range(0, pixels // 7):
                    for i3 in range(0, 16):      # one vector
                        ...                      # 7 pixels
    """
    *rows, pixels, channels = b.shape
    grid, iterations = product(rows), pixels // plan.pixels
    first = sym("i", 0, iterations) * plan.pixels if iterations != 1 else 0
    vector, channel = sym("v", 0, channels // plan.lanes), sym("c", 0, plan.lanes)
    row = delinearize(grid_item(grid), rows)
    places = [(*row, first + n, vector * plan.lanes + channel) for n in range(plan.pixels)]
    along = For("i", 0, iterations, (For("c", 0, plan.lanes, tuple(_depthwise_results_at(b, places, plan.from_zero))),))
    body: tuple[Stmt, ...] = (For("v", 0, channels // plan.lanes, (along,)),)
    return _matmul_loop_kernel(b, grid, body if grid == 1 else (For("p", 0, grid, body, "parallel"),))


def _depthwise_results_at(b: RegionBuilder, places: Sequence[Index], from_zero: bool) -> list[Stmt]:
    """Return the results at ``places`` term by term, so that loads common to two results are done once."""
    e, op, dtype = b.elements(), b.root, sum_dtype(b.root)
    block = e.new_block()
    terms = [conv_term(e, op, at) for at in places]
    sums: list[Scalar] = [zero_scalar(dtype)] * len(places) if from_zero else []
    for tap in taps_of(*(range(static(n)) for n in op.operands[1].type.shape[:-1])):
        values = [term(tap) for term in terms]
        added = [Apply("add", pair, dtype) for pair in zip(sums, values, strict=True)] if sums else values
        sums = [e.bind(x) for x in added]
    for at, total in zip(places, sums, strict=True):
        e.anchor(op.result, provide_scalar(rounded_sum(op, total)))
        store_results(b, e, at)
    return block
