"""Plans of matmuls and convolutions as plain loops: any dtype, grouped and depthwise convolutions, tiny sizes."""

from __future__ import annotations

from dataclasses import dataclass

from aotc.ir.dims.algebra import product, static
from aotc.lowering.analysis.anchors import single_axis
from aotc.lowering.analysis.contractions import contraction_terms, sum_dtype
from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.elements.contract_elements import contraction_element
from aotc.lowering.plans.loops import LOOP_PLANNERS, AnyLoopPlan
from aotc.lowering.plans.matmul import UNROLLED_TERMS
from aotc.lowering.plans.region_plan import RegionPlan
from aotc.lowering.threshold import BlockSize
from aotc.vmfb.abi import ALIGNMENT
from aotc.vmfb.dtypes import kind_of, size_of


@dataclass(frozen=True, slots=True)
class ElementLoopsPlan(RegionPlan):
    """Plan that computes one element of the result at a time.

    Attributes
    ----------
    is_unrolled : bool
        Are the terms of a sum written out, so that the loop around them vectorises?
    from_zero : bool
        Does a written-out sum begin with 0, like sums of CPU tiles, and not with its first term?
    loops : LoopPlan, TransposedLoopPlan, ThreadLoopPlan or GpuTransposePlan
        The loops over the elements.
    """

    is_unrolled: bool
    from_zero: bool
    loops: AnyLoopPlan


@dataclass(frozen=True, slots=True)
class DepthwisePlan(RegionPlan):
    """Plan of a depthwise convolution: a vector of channels moves along a row of pixels.

    Attributes
    ----------
    lanes : int
        Channels of a vector.
    pixels : int
        Neighbouring pixels at a time, a divisor of their number.
    from_zero : bool
        As in :class:`ElementLoopsPlan`.
    """

    lanes: int
    pixels: int
    from_zero: bool


def plan_contract_loops(b: RegionBuilder) -> DepthwisePlan | ElementLoopsPlan:
    """Choose the loops of a small matmul or convolution that is computed without tiles.

    On a CPU, float sums that are written out begin with 0.0 and add each product by an FMA, as tiles do.
    ``x0 * y0 + x1 * y1`` differs: LLVM may round either product, and -0.0 would stay -0.0.
    """
    from_zero = b.target.kind == "cpu" and kind_of(sum_dtype(b.root)) in "fc"
    if _is_depthwise(b):
        return DepthwisePlan(_contract_loop_lanes(b), _pixels_at_once(b), from_zero)
    unrolled = UNROLLED_TERMS.holds(contraction_terms(b.root))
    element = contraction_element(b, b.trial_elements(), unrolled, from_zero)
    return ElementLoopsPlan(unrolled, from_zero, LOOP_PLANNERS[b.target.kind](b, element))


def _contract_loop_lanes(b: RegionBuilder) -> int:
    return ALIGNMENT // size_of(sum_dtype(b.root))


def _is_depthwise(b: RegionBuilder) -> bool:
    """Return True for a depthwise convolution on a CPU with whole vectors of channels, and pixels as results."""
    op = b.root
    if op.name != "conv" or b.target.kind != "cpu" or b.shape != op.result.type.shape or any(b.transposed):
        return False
    channels = op.result.type.shape[-1]
    single_channel = op.attrs["feature_groups"] == channels == op.operands[0].type.shape[-1]
    few = UNROLLED_TERMS.holds(product(op.operands[1].type.shape[:-1]))
    return (
        single_channel
        and few
        and channels % _contract_loop_lanes(b) == 0
        and all(single_axis(s) is not None for s in b.anchors.space[-2:])
    )


HELD_WEIGHTS = BlockSize(
    25,
    "filter taps of a channel that stay in registers along a row, given 32 registers",
    "AVX-512, time of 8 pixels at once relative to one at a time: 9 and 25 taps 0.86 to 1.05, 31 taps 0.61, 49 taps "
    "0.5 to 0.58",
)
BESIDE_PIXELS = BlockSize(
    8,
    "pixels of a row that a depthwise convolution with more taps than HELD_WEIGHTS computes at once",
    "as HELD_WEIGHTS, with 49 taps: 2 pixels 0.75 to 0.83, 4 pixels 0.65 to 0.78, 7 pixels 0.52 to 0.58, 8 pixels 0.5 "
    "to 0.58",
)


def _pixels_at_once(b: RegionBuilder) -> int:
    """Return the number of pixels of a row computed together: a divisor of their number, or 1 with few weights."""
    pixels, taps = b.shape[-2], static(product(b.root.operands[1].type.shape[:-1]))
    if not isinstance(pixels, int) or taps <= b.target.registers * HELD_WEIGHTS.value // 32:
        return 1
    most = min(BESIDE_PIXELS.value, (b.target.registers - 2) // 2)
    return next(n for n in range(most, 0, -1) if pixels % n == 0)
