"""Thresholds that several modules of kernels, of the executor or of compiler processes read.

Thresholds of formulas are in :mod:`aotc.kernels.formulas.limits`.
"""

from __future__ import annotations

# ---------------------------------------------------------------- the executor

# Nodes of a command buffer between two readings of the clock. Small nodes are serial graphs of at most 6 us each, so
# that 16 of them stay below 100 us. Reading the clock takes 5 ns; a loop iteration of two small kernels takes 50 ns.
SMALL_TURNS = 16

# Iterations of a wait loop, of about 15 ns each, between two checks of the stop word and of the caller's clock. The
# checks cost only a participant that has no other work.
IDLE_TURNS = 64

# Calls that share the workers at the same time; any further call runs on its own thread alone. With 32 calls, the
# callers' threads alone outnumber the cores of most machines. Each call takes 640 bytes of the pool.
RUNS = 32

# Upper bound of a participant's lag, in parts of LAG_WHOLE. It guarantees claims of at least 1/32 of the grain, even
# after the operating system suspended the participant. A claim of 5 us then takes 0.16 us of work.
LAG_MOST = 992

# ---------------------------------------------------------------- compiler processes and threads

# Recursion limit of Python in a compiler process. Emission recurses over the expressions of a kernel, and Python's
# default limit is 1,000.
WORKER_FRAMES = 20_000

# ---------------------------------------------------------------- loops

# Histogram updates (stores at an index that was loaded) in one iteration of a loop, from which LLVM must not unroll it.
# It applies to the counting loops of a radix sort, whose iterations are long already: the code is a tenth smaller and
# equally fast. benchmarks/ops/latency.py, group sorting, against LLVM's own unrolling, 1 thread of a busy Zen 5.
COUNTED_PLACES = 4

# Bytes of a 128-bit lane of an AVX register. Shuffles within a lane are cheap; shuffles across lanes are expensive, and
# LLVM searches long for better ones. Transforms of 64 points, vectors of 8 f32: code generation takes 25 ms if elements
# are interleaved across lanes, 9 ms if within.
HALF_REGISTER = 16
