"""Thresholds of kernels, of the executor and of the compiler processes. Each has its unit, why, and where it is from.

Those of formulas are in :mod:`aotc.kernels.formulas.limits`.
"""

from __future__ import annotations

# ---------------------------------------------------------------- the executor

SPINS = 4000
"""unit: turns of a worker's waiting loop, of some 15 ns
why: after so many without work, about 60 us, a worker sleeps; a next call may be near, and waking costs 50 us
from: chosen by these times; where they were measured is not recorded
"""

YIELD_AFTER = 2000
"""unit: turns of a waiting loop
why: after so many a waiting thread gives its processor to others: there may be more threads than cores
from: chosen, not measured; half of SPINS
"""

ACTIVE_SPINS = 20 * SPINS
"""unit: turns of a worker's waiting loop
why: as SPINS while a run is active: its next graph is nearer than the next call
from: chosen, not measured
"""

# ---------------------------------------------------------------- tiles

UNROLL = 4
"""unit: iterations of a tile's innermost level
why: so many are written one after the other, the rest of the extent is a second loop
from: chosen, not measured
"""

PREFETCH_ROWS = 1
"""unit: rows of a tile
why: with so few a tile waits for memory alone and prefetches b; with more it only pays for the instructions
from: measured: with 2 or 4 rows prefetching costs an AMD core 9 to 24 %
"""

PREFETCH_BYTES = 8192
"""unit: bytes ahead in b
why: so far is prefetched; it covers the memory's latency at the rate that one row reads at
from: measured: took an Intel core from 20 to 29 GB/s; costs an AMD one 3 to 10 %
"""

# ---------------------------------------------------------------- CUDA

FLAT_THREADS = 128
"""unit: threads of a block, each with an item of its own
why: several warps hide each other's latency; a small grid still spreads over all multiprocessors
from: chosen, not measured
"""

# ---------------------------------------------------------------- compiler processes

MOST_JOBS = 8
"""unit: processes
why: no more by default however many cores there are: each one loads LLVM and Numba, and kernels are few
from: chosen, not measured
"""

LONGEST_TEXT = 1 << 20
"""unit: characters of a kernel's text
why: what is no kernel counts as one so long: it is started first, for the executor takes longest
from: chosen; larger than any text
"""

WORKER_FRAMES = 20_000
"""unit: frames of the interpreter's stack in a compiler process
why: emission recurses over a kernel's expressions, and Python's own limit is 1,000
from: chosen, not measured
"""

# ---------------------------------------------------------------- the cache directory

LIMIT_MB = 4096
"""unit: megabytes of the folder
why: beyond, the kernels and bundles go that were not read for the longest time; AOTC_CACHE_LIMIT_MB sets another
from: chosen, not measured; some ten models with their weights
"""

SWEEP_SHARE = 64
"""unit: parts of the limit
why: the folder is looked through after so small a part was written, not after every compilation
from: 20,000 entries took 0.37 s on a busy machine
"""

SWEEP_SECONDS = 600
"""unit: seconds
why: the folder is looked through after so long too, for the sake of many processes that write little each
from: chosen, not measured
"""
