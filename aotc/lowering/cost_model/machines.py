"""Machine parameters of the cost model: one table for CPUs and one for GPUs.

``python -m benchmarks costs`` prints how well these parameters predict measured times. The sizes of caches and vectors
come from the target.
"""

from __future__ import annotations

from dataclasses import dataclass

from aotc.lowering.threshold import Estimate
from aotc.targets import Target

LAUNCH = Estimate(
    20,
    "nanoseconds of an empty kernel on a CPU",
    "from tiny elementwise kernels",
    benchmark="python -m benchmarks costs",
)
ITEM = Estimate(
    3,
    "nanoseconds of an empty grid item on a CPU",
    "from sums of short rows",
    benchmark="python -m benchmarks costs",
)
VECTOR_RATE = Estimate(
    5_000,
    "vector operations per microsecond of one core",
    "loads and stores count as operations",
    benchmark="python -m benchmarks costs",
)
SCALAR_RATE = Estimate(
    7_000,
    "scalar operations per microsecond of one core, in loops that are not vectorized",
    "gathers, loop bodies of sorts",
    benchmark="python -m benchmarks costs",
)
CHAINED_RATE = Estimate(
    1_000,
    "operations per microsecond of one core if each needs the result of the one before",
    "3 to 4 cycles each, the latency of an addition",
)
TILE_RATE = Estimate(
    200_000,
    "floating-point operations of f32 register tiles per microsecond of one core with vectors of 512 bits",
    "a Zen 5; a Zen 4 reaches 115 per nanosecond (decision 14)",
    benchmark="python -m benchmarks costs",
)
MATRIX_WORK = Estimate(
    8,
    "cost of one bf16 operation, or of two i8 operations, on a matrix unit, in hundredths of one operation of f32 "
    "tiles",
    "on a Sapphire Rapids, tdpbf16ps alone does 14.7 times the work of an f32 FMA, tdpbssd 29.3 times",
)
L2_BYTES = Estimate(200, "bytes per nanosecond from the second-level cache", benchmark="python -m benchmarks costs")
L3_BYTES = Estimate(90, "bytes per nanosecond from the last-level cache", benchmark="python -m benchmarks costs")
MEMORY_BYTES = Estimate(45, "bytes per nanosecond from memory", benchmark="python -m benchmarks costs")
L3_SIZE = Estimate(16 << 20, "bytes of the last-level cache that one core uses", "half of 32 MiB")
L1_RANDOM = Estimate(200, "picoseconds of an access to a random element in the first-level cache")
L2_RANDOM = Estimate(
    500,
    "picoseconds of an access to a random element in the second-level cache",
    benchmark="python -m benchmarks costs",
)
L3_RANDOM = Estimate(
    1000,
    "picoseconds of an access to a random element in the last-level cache",
    benchmark="python -m benchmarks costs",
)
MEMORY_RANDOM = Estimate(
    3000,
    "picoseconds of an access to a random element in memory",
    benchmark="python -m benchmarks costs",
)

GPU_LAUNCH = Estimate(2_500, "nanoseconds of an empty kernel in a recorded graph", "an H200")
GPU_ITEM = Estimate(0, "nanoseconds of an empty block", "hidden behind the other blocks")
GPU_RATE = Estimate(15_000_000, "scalar operations per microsecond of a whole GPU", "half the FP32 rate of an H200")
GPU_CHAINED = Estimate(
    200,
    "operations per microsecond of one thread if each needs the result of the one before",
    "5 ns each",
)
GPU_TILE_RATE = Estimate(
    36_000_000,
    "floating-point operations of f32 tiles per microsecond of a whole GPU",
    "docs/measurements.md: 36.7 TFLOP/s",
)
GPU_CACHE_BYTES = Estimate(5_500, "bytes per nanosecond from the second-level cache of a GPU", "an H200")
GPU_MEMORY_BYTES = Estimate(3_000, "bytes per nanosecond from the memory of a GPU", "an H200")
GPU_CACHE_SIZE = Estimate(32 << 20, "bytes of the second-level cache of a GPU", "an H200 has 50 MB, in two halves")
GPU_CACHE_RANDOM = Estimate(
    8,
    "picoseconds of an access to a random element in the cache of a GPU",
    "one sector per element",
)
GPU_RANDOM = Estimate(
    14,
    "picoseconds of an access to a random element in the memory of a GPU",
    "one sector per element",
)
GPU_LOADS = Estimate(32, "loads of one thread that are in flight at once")
GPU_THREADS = Estimate(132 * 512, "threads that keep a GPU busy", "a quarter of the threads that an H200 holds")


@dataclass(frozen=True, slots=True)
class Level:
    """A level of memory: name, size in bytes, rate in bytes per nanosecond, and nanoseconds of a ``random`` access."""

    name: str
    size: float
    rate: float
    random: float


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates of one CPU core, or of a whole GPU, for a :class:`~aotc.lowering.cost_model.kernel_work.KernelWork`.

    Attributes
    ----------
    launch, item : float
        Nanoseconds of an empty kernel, and of an item of its grid.
    vector, scalar, chained, tile : float
        Operations per nanosecond: on vectors, on single elements, in dependence chains, in f32 tiles.
    vector_bytes : int
        The bytes of a vector; 1 on a GPU, whose threads process one element each.
    levels : tuple of Level
        The levels of memory, the nearest first. The last one is unlimited.
    threads : int
        The threads that keep the machine busy; with fewer, a part of it is idle.
    loads : int
        The loads of a thread that are in flight at once.
    """

    launch: float
    item: float
    vector: float
    scalar: float
    chained: float
    tile: float
    vector_bytes: int
    levels: tuple[Level, ...]
    threads: int = 1
    loads: int = 1

    def level_of(self, size: float) -> Level:
        """Return the smallest cache or memory level that can hold ``size`` bytes."""
        return next(level for level in self.levels if size <= level.size)


def machine_of(target: Target) -> Machine:
    """Return the machine parameters of a target."""
    return _MACHINES.get(target.kind, _cpu_core_parameters)(target)  # a CPU controls a mix of several kinds


def _cpu_core_parameters(t: Target) -> Machine:
    """Return the parameters of one core of a CPU; rates of tiles are in proportion to the width of vectors."""
    levels = (  # in the first-level cache, loads and stores cost no more than the operations that they count as
        Level("L1 cache", t.l1, float("inf"), L1_RANDOM.value / 1e3),
        Level("L2 cache", t.l2, L2_BYTES.value, L2_RANDOM.value / 1e3),
        Level("L3 cache", L3_SIZE.value, L3_BYTES.value, L3_RANDOM.value / 1e3),
        Level("memory", float("inf"), MEMORY_BYTES.value, MEMORY_RANDOM.value / 1e3),
    )
    vector, scalar, chained = (row.value / 1e3 for row in (VECTOR_RATE, SCALAR_RATE, CHAINED_RATE))
    tile = TILE_RATE.value / 1e3 * t.vector_bytes / 64
    return Machine(LAUNCH.value, ITEM.value, vector, scalar, chained, tile, t.vector_bytes, levels)


def _gpu_parameters(_: Target) -> Machine:
    """Return the parameters of a GPU from the table of measured rates."""
    levels = (
        Level("L2 cache", GPU_CACHE_SIZE.value, GPU_CACHE_BYTES.value, GPU_CACHE_RANDOM.value / 1e3),
        Level("memory", float("inf"), GPU_MEMORY_BYTES.value, GPU_RANDOM.value / 1e3),
    )
    rate, chained, tile = (row.value / 1e3 for row in (GPU_RATE, GPU_CHAINED, GPU_TILE_RATE))
    threads, loads = GPU_THREADS.value, GPU_LOADS.value
    return Machine(GPU_LAUNCH.value, GPU_ITEM.value, rate, rate, chained * threads, tile, 1, levels, threads, loads)


_MACHINES = {"cpu": _cpu_core_parameters, "cuda": _gpu_parameters}
