"""Thresholds that several modules of the runtime read."""

from __future__ import annotations

# Bytes of a segment: segments and files up to this are copied and compared with their sha256 at load; larger ones are
# mapped and shared.
EAGER_BYTES = 4 << 20

# Tuples of argument shapes: so many plans does a function remember; the oldest goes first. To make a plan takes 50 us
# and its memory is some kilobytes.
PLANS = 256

# Nanoseconds: after so many without it Python has the word, for signals and cancellation; the clock ticks every 1 to 10
# ms. The promise of 20 ms.
NOTICE_NANOSECONDS = 10_000_000

# Bytes of results that are gone: so many are kept for later results at most; larger ones never. Two results of 64 MB
# that replace each other, or 200 of a megabyte that go at the same time.
KEPT_RESULTS = 256 << 20

# Threads that run submissions: so many submissions run at a time at least, also where there are fewer cores; one may
# wait for a GPU, or never end. With more cores there is one for each.
DISPATCHERS = 4

# Threads that run submissions: there is one for each core up to so many; more callers than this get no workers of the
# executor anyway. RUNS of aotc/kernels/limits.py.
MOST_DISPATCHERS = 32

# Seconds: so long does the interpreter wait, when it ends, for calls of daemon threads; a library's function may take
# longer.
EXIT_SECONDS = 1.0

# Dimensions of a tensor: NumPy's arrays, which arguments, results and constants are, have no more. NumPy 2's
# NPY_MAXDIMS.
MOST_RANK = 64

# Bytes of a tensor: no machine addresses so many; sums of a hundred such sizes still fit 64 bits, in which kernels
# compute places.
MOST_BYTES = 1 << 56

# Bytes of a result or an arena: no process has so much address space; a program of fixed sizes that asks for more is
# broken. The user half of a 48-bit address space.
MAX_BYTES = 1 << 47

# Calls of one module that are on GPUs at a time, each on streams and in memory of its own: while one computes another
# copies, and a third is prepared; more wait, and take no dispatcher, which CPUs may need. A GPU has as many copy
# engines, and the process may have no more than four dispatchers.
STREAMS = 3
