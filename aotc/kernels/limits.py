"""Thresholds that several modules of kernels, of the executor or of compiler processes read.

Those of formulas are in :mod:`aotc.kernels.formulas.limits`.
"""

from __future__ import annotations

# ---------------------------------------------------------------- the executor

# Nodes of a command buffer: the clock is read after so many, which are serial graphs and so of at most 6 us each;
# within 100 us. The clock takes 5 ns, a loop's turn of two small kernels 50 ns.
SMALL_TURNS = 16

# Turns of a waiting loop, of some 15 ns: the stop word is looked at, and the caller's clock, after so many. It costs a
# participant that has nothing else to do.
IDLE_TURNS = 64

# Calls: so many share the workers at a time; another has its own thread alone. Their callers alone are more threads
# than most machines have cores, and each takes 640 bytes.
RUNS = 32

# Parts of a participant's speed, of LAG_WHOLE: a claim has a 32nd of the grain at least, also when the system had taken
# the processor away meanwhile. A claim of 5 us then takes 0.16 us of it.
LAG_MOST = 992

# ---------------------------------------------------------------- compiler processes and threads

# Frames of the interpreter's stack in a compiler process: emission recurses over a kernel's expressions, and Python's
# own limit is 1,000.
WORKER_FRAMES = 20_000

# ---------------------------------------------------------------- loops

# Places that a turn of a loop counts in, each named by what it loads, for which LLVM is kept from unrolling it: the
# counts of a radix sort, whose turns are long; the code is a tenth smaller and takes the same time. benchmarks/ops.py,
# group sorting, beside the state before, 1 thread of a busy Zen 5.
COUNTED_PLACES = 4

# Bytes of a half of an AVX register: moves within it are cheap, those from one to the other dear, and LLVM looks long
# for better ones. Transforms of 64 points, vectors of 8 f32: 25 ms of code generation woven across halves, 9 apart.
HALF_REGISTER = 16
