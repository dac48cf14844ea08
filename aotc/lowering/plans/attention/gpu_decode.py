"""Choose how a GPU divides attention of few queries (decoding), which is bound by reading keys and values.

On Hopper, a cluster of blocks shares the terms of a head. If there are too few heads for all multiprocessors, the terms
are split further into parts that other kernels combine (split-KV). On other GPUs, blocks of one warp do the same
without clusters. Plans are compared by a model that counts time in bytes that one multiprocessor could read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from aotc.ir.dims.algebra import product
from aotc.ir.loop.forms.tiling import DecodeAttention, MmaAttention, Tiling
from aotc.lowering.cost_model.work import UNKNOWN_TERMS, dim_or
from aotc.lowering.plans.attention.sizes import AttentionSizes
from aotc.lowering.threshold import BlockSize, Estimate, Limit
from aotc.targets import Target

FEW_QUERIES = Limit(
    16,
    "queries of one head, or of heads that share keys, at most, that one warp processes alone",
    "a tensor-core instruction of a warp has 16 rows, of a warpgroup 64",
)
FEW_SPREAD = Estimate(132, "blocks of decode attention that run at a time", "the multiprocessors of an H200")
CLUSTER_ROOM = Estimate(
    112,
    "blocks that a GPU runs at a time, one per multiprocessor, in clusters of more than two blocks",
    "cuOccupancyMaxActiveClusters on one H200: 120 in clusters of 4 or 8, but 102 in clusters of 6 and 105 in "
    "clusters of 7; other chips are divided differently",
)
FASTEST_SHARE = Estimate(
    280,
    "percent of an equal share of the memory bandwidth that a multiprocessor reads if few others read",
    "on an H200: 16 blocks read 1.39 TB/s, 32 2.63, 64 3.7, 128 4.17",
    benchmark="python -m benchmarks gpu few_queries",
)
WARPS_SHARE = Estimate(
    50,
    "percent of that share that one warp can process, as it multiplies and adds what it reads",
    "on an H200: two warps per block with f32 of 256 elements read 32 bytes per nanosecond",
    benchmark="python -m benchmarks gpu few_queries",
)
STAGE_OF_FEW = Limit(
    8192,
    "bytes of keys and values, at most, per warp and stage",
    "eight warps with three stages fill the shared memory of a multiprocessor",
)
STAGE_OF_ONE = Limit(
    16384,
    "bytes of keys and values, at most, per stage of a block of one warp",
    "on an H200, four such warps per multiprocessor read 2.7 TB/s, two with 32 KB each 1.7 to 2.4 TB/s",
)
BLOCK_START = Estimate(
    48 << 10,
    "bytes that a multiprocessor could read in the time that a block takes apart from reading",
    "1.5 us, and a multiprocessor of an H200 reads 32 bytes in a nanosecond",
)
CLUSTER_TIME = Estimate(
    16 << 10,
    "bytes that a multiprocessor could read while the blocks of a cluster combine their sums",
)
PARTS_TIME = Estimate(
    256 << 10,
    "bytes that a multiprocessor could read while two more kernels combine many parts",
    "on an H200, calls with 64 parts take 7 to 8 us more than their kernel",
)
FEW_PARTS_TIME = Estimate(
    160 << 10,
    "bytes that a multiprocessor could read while one more kernel combines a few parts",
    "on an H200, calls with 16 parts take 5 to 6 us more than their kernel",
)
PART_OF_TERMS = Estimate(
    64,
    "terms of a part for a block of one warp, at least",
    "on an H200, 12 heads of 1024 x 64 in f32: parts of 64 terms take 12.1 us, of 128 15.8 us, of 256 23.6 us",
)
PART_START = Estimate(
    64,
    "terms that a warp could process in the time that its part takes in addition to its terms",
    "on an H200, parts of 32 terms and of 64 take the same time",
)
PARTS_TOGETHER = Estimate(
    128,
    "terms that a warp could process while the parts are combined",
    "two more kernels; a warp processes 16 terms of 64 elements in a microsecond on an H200",
)
FEW_PARTS = Limit(16, "parts of the terms, at most, that a single kernel combines, one element after the other")
MOST_BLOCKS_OF_HEAD = BlockSize(8, "blocks of a cluster, at most", "CUDA C++ Programming Guide")


@dataclass(frozen=True, slots=True)
class KeySplit:
    """Division of the terms (keys) of a head among the blocks of a GPU.

    Attributes
    ----------
    tiling : Tiling
    part : int
        The terms of a part, or 0 if the blocks of one cluster process all terms.
    """

    tiling: Tiling
    part: int = 0


def plan_decode(sizes: AttentionSizes, target: Target) -> KeySplit | None:
    """Return the plan with the least modelled time, or None if no tiling fits the shared memory of ``target``."""
    tilings = [t for t in _decode_tilings(sizes) if sizes.shared_memory_bytes(t) <= target.shared_memory]
    if target.cpu != "sm_90a" or not tilings:
        alone = one_warp_tiling(sizes, target)
        return KeySplit(alone, _terms_per_part(sizes, alone, target)) if alone is not None else None
    plans = list(_decode_plans(sizes, tilings[0]))
    return min(plans, key=lambda plan: _decode_plan_time(sizes, plan))


def _decode_tilings(sizes: AttentionSizes) -> Iterator[Tiling]:
    """Yield the tilings, those with the most bytes in flight first."""
    line = sum(-(-n * sizes.size // 128) * 128 for n in (sizes.depth, sizes.width))
    terms = next((n for n in (64, 32) if STAGE_OF_FEW.holds(n * line)), 16)
    warps = 8 if STAGE_OF_FEW.holds(terms * line) else 4
    for count, stages in ((warps, 3), (warps, 2), (warps // 2, 3), (warps // 2, 2)):
        yield Tiling(DecodeAttention(), 16 * count, terms, stages)


def _decode_plans(sizes: AttentionSizes, tiling: Tiling) -> Iterator[KeySplit]:
    """Yield the plans of a tiling: all cluster sizes, with each useful number of split-KV parts."""
    heads, terms = product(sizes.batch), sizes.terms
    each = tiling.rows // 16 * tiling.cols
    most = -(-terms // each) if isinstance(terms, int) else MOST_BLOCKS_OF_HEAD.value
    for cluster in (1, 2, 4, 8):
        if cluster > min(MOST_BLOCKS_OF_HEAD.value, most):
            return
        own = replace(tiling, template=DecodeAttention(cluster))
        yield KeySplit(own)
        if not isinstance(heads, int) or not isinstance(terms, int) or not heads:
            continue
        for parts in range(2, min(-(-2 * FEW_SPREAD.value // (heads * cluster)), -(-most // cluster)) + 1):
            yield KeySplit(own, -(-terms // (parts * tiling.cols)) * tiling.cols)


def _decode_plan_time(sizes: AttentionSizes, plan: KeySplit) -> float:
    """Return the modelled time of a plan, as the bytes that a multiprocessor reads in that time."""
    heads, terms = (dim_or(n, UNKNOWN_TERMS.value) for n in (product(sizes.batch), sizes.terms))
    cluster, line = plan.tiling.cluster, (sizes.depth + sizes.width) * sizes.size
    part = plan.part or terms
    blocks = heads * -(-terms // part) * cluster
    room = FEW_SPREAD.value if cluster <= 2 else CLUSTER_ROOM.value
    each = plan.tiling.rows // 16 * plan.tiling.cols
    own = -(-part // (cluster * each)) * each * line
    whole, rest = divmod(blocks, room)
    fastest = min(FASTEST_SHARE.value, WARPS_SHARE.value * plan.tiling.rows // 16) / 100
    iterations = whole * _relative_read_time(room, fastest) + (_relative_read_time(rest, fastest) if rest else 0)
    more = CLUSTER_TIME.value if cluster > 1 else 0
    if plan.part:
        more += (FEW_PARTS_TIME if FEW_PARTS.holds(-(-terms // part)) else PARTS_TIME).value
    return iterations * own + -(-blocks // room) * BLOCK_START.value + more


def _relative_read_time(blocks: int, fastest: float) -> float:
    """Return the time in which ``blocks`` blocks read their bytes, relative to one block per multiprocessor.

    One bound is the memory bandwidth, the other is ``fastest``, the relative rate of one block. The time is the 4-norm
    of both, so it is a little longer than either bound where these are close.
    """
    return float(((blocks / FEW_SPREAD.value) ** 4 + fastest**-4) ** 0.25)


def one_warp_tiling(sizes: AttentionSizes, target: Target) -> Tiling | None:
    """Return the tiling of a block of one warp: more terms at a time if they have fewer bytes, and 3 or 2 stages.

    None if neither number of stages fits the shared memory of ``target``.
    """
    line = (sizes.depth + sizes.width) * sizes.size
    terms = next((n for n in (64, 32) if STAGE_OF_ONE.holds(n * line)), 16)
    tilings = (Tiling(MmaAttention(), 16, terms, stages) for stages in (3, 2))
    room = target.shared_memory
    return next((t for t in tilings if sizes.shared_memory_bytes(t) <= room), None)


def _terms_per_part(sizes: AttentionSizes, tiling: Tiling, target: Target) -> int:
    """Return the terms of a part for blocks of one warp, or 0 if the terms are not split.

    Parts consist of whole stages. Blocks run in waves, so one block more than the GPU holds can double the time.
    """
    heads, terms = product(sizes.batch), sizes.terms
    if not isinstance(heads, int) or not isinstance(terms, int) or not heads:
        return 0
    processor = target.multiprocessor
    room = FEW_SPREAD.value * (processor.shared // (sizes.shared_memory_bytes(tiling) + processor.reserved))

    def waves_of_part(part: int) -> int:
        return -(-heads * -(-terms // part) // room) * (part + PART_START.value)

    most = min(terms // PART_OF_TERMS.value, -(-2 * room // heads))
    lengths = {-(-terms // (parts * tiling.cols)) * tiling.cols for parts in range(2, most + 1)}
    best = min(sorted(lengths, reverse=True), key=waves_of_part, default=terms)
    return best if waves_of_part(best) + PARTS_TOGETHER.value < waves_of_part(terms) else 0


def split_kv_part_terms(sizes: AttentionSizes, target: Target) -> int:
    """Return the terms of a part if attention of few queries is split into parts that other kernels combine; else 0."""
    plan = plan_decode(sizes, target) if FEW_QUERIES.holds(sizes.rows) else None
    return plan.part if plan is not None else 0
