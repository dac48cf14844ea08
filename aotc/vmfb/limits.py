"""Thresholds that several modules of the runtime read."""

from __future__ import annotations

# Size of a bundle segment or file, in bytes. Up to this size it is copied into memory, and a segment's sha256 is
# verified at load. A larger one is memory-mapped, so that processes share its pages.
EAGER_BYTES = 4 << 20

# Plans that a function caches, one for each tuple of argument shapes; the oldest is evicted first. Making a plan takes
# 50 us, and a plan occupies a few kilobytes.
PLANS = 256

# Nanoseconds between two checks for signals and cancellation during a call. The clock ticks every 1 to 10 ms, and a
# call must react within 20 ms.
NOTICE_NANOSECONDS = 10_000_000

# Bytes of freed results that a pool caches for later results; a larger result is never cached. Room for two results of
# 64 MB that replace each other, or for 200 of 1 MB that are freed at the same time.
KEPT_RESULTS = 256 << 20

# Minimum number of dispatcher threads, which run submissions. It also applies to machines with fewer cores, because a
# submission may wait for a GPU or never end. With more cores there is one thread for each core.
DISPATCHERS = 4

# Maximum number of dispatcher threads; up to this there is one for each core. More concurrent callers than this get no
# workers of the executor anyway: the same number as RUNS in aotc/kernels/limits.py.
MOST_DISPATCHERS = 32

# Seconds that the interpreter waits at exit for calls of daemon threads. A library function that such a call runs may
# take longer; it is not waited for.
EXIT_SECONDS = 1.0

# Maximum rank of a tensor: NPY_MAXDIMS of NumPy 2. Arguments, results and constants are NumPy arrays.
MOST_RANK = 64

# Maximum size of a tensor in bytes. No machine has this much memory, and sums of a hundred such sizes still fit the 64
# bits in which kernels compute addresses.
MOST_BYTES = 1 << 56

# Maximum size of a result or an arena in bytes: the user half of a 48-bit address space. A program of static shapes
# that asks for more is malformed.
MAX_BYTES = 1 << 47

# Calls of one module that use GPUs at the same time, each with its own streams and memory: one computes, one copies and
# one is prepared. Further calls wait without occupying a dispatcher thread, which CPU calls may need. A GPU has no more
# copy engines than that, and the process may have only four dispatchers.
STREAMS = 3
