"""Thresholds of the runtime. Each has its unit, why it is there, and where its value is from."""

from __future__ import annotations

EAGER_BYTES = 4 << 20
"""unit: bytes of a segment
why: segments and files up to this are copied and compared with their sha256 at load; larger ones are mapped and shared
from: chosen, not measured
"""

FILE_CHECK_NANOSECONDS = 10_000_000
"""unit: nanoseconds
why: calls compare a mapped file with what it was at most so often: fstat takes 0.5 us
from: chosen; within so much a call may read what another process has written
"""

BUILTIN_DIGEST_BYTES = 256 << 10
"""unit: bytes of a sha256
why: up to so many CPython's own sha256 computes it: to load libcrypto takes 2.5 ms, its speed gains 2.2 ms a megabyte
from: measured: 151 us for 55 kB, hashlib 28 us
"""

PLANS = 256
"""unit: tuples of argument shapes
why: so many plans does a function remember; the oldest goes first
from: chosen: to make a plan takes 50 us and its memory is some kilobytes
"""

NOTICE_NANOSECONDS = 10_000_000
"""unit: nanoseconds
why: after so many without it Python has the word, for signals and cancellation; the clock ticks every 1 to 10 ms
from: the promise of 20 ms
"""

LEASED_BYTES = 1 << 20
"""unit: bytes of a result
why: the memory of these, and larger ones, is kept for later results: to keep it costs 0.6 us, new memory up to 400
from: measured: a loop that drops each result, for which the C library keeps memory too, loses 1 to 2 us of 22
"""

KEPT_RESULTS = 256 << 20
"""unit: bytes of results that are gone
why: so many are kept for later results at most; larger ones never
from: chosen: two results of 64 MB that replace each other, or 200 of a megabyte that go at the same time
"""

SIZE_CLASSES = 8
"""unit: sizes of blocks of results from one power of two to the next
why: results of about the same size take each other's blocks; an eighth more address space, whose pages nobody touches
from: reasoning
"""

DISPATCHERS = 4
"""unit: threads that run submissions
why: so many submissions run at a time at least, also where there are fewer cores: one may wait for a GPU, or never end
from: chosen; with more cores there is one for each
"""

MOST_DISPATCHERS = 32
"""unit: threads that run submissions
why: there is one for each core up to so many; more callers than this get no workers of the executor anyway
from: RUNS of aotc/kernels/limits.py
"""

LINGER_SECONDS = 100e-6
"""unit: seconds
why: a thread that was woken for nothing looks again after so long and is not woken before: to wake it takes 15 us
from: chosen; a submission that nobody waits for begins so much later at most
"""

DEADLINES = 1000
"""unit: deadlines
why: after so many more the clock forgets those of submissions that are done
from: chosen: some 200 KB
"""

EXIT_SECONDS = 1.0
"""unit: seconds
why: so long does the interpreter wait, when it ends, for calls of daemon threads; a library's function may take longer
from: chosen
"""

LOOP_SPIN_NANOSECONDS = 2_000_000
"""unit: nanoseconds
why: so long the host asks again and again whether a GPU's loop is done, afterwards now and then
from: chosen: to sleep takes 60 us, 3 % of this
"""

LOOP_LOOK_NANOSECONDS = 1_000_000
"""unit: nanoseconds
why: so often a GPU's loop looks in the host's memory whether it is to end, which takes a microsecond
from: the promise of 20 ms
"""

LOOP_SLEEP_SECONDS = 50e-6
"""unit: seconds
why: so often the host looks whether a long loop of a GPU is done
from: chosen
"""

MAX_BLOCKS = (1 << 31) - 1
"""unit: blocks of a grid in x
why: a launch of more fails in the driver; ours says which kernel it was
from: CUDA C++ Programming Guide, technical specifications per compute capability
"""

MAX_BLOCKS_ACROSS = (1 << 16) - 1
"""unit: blocks of a grid in y, and in z
why: as MAX_BLOCKS
from: CUDA C++ Programming Guide, technical specifications per compute capability
"""

MAX_CLUSTER = 8
"""unit: blocks of a cluster
why: as MAX_BLOCKS; more are not the same on every GPU that has clusters
from: CUDA C++ Programming Guide, thread block clusters
"""

MAX_SHARED = 227 << 10
"""unit: bytes of dynamic shared memory of a block
why: as MAX_THREADS; a GPU with less refuses the launch
from: CUDA C++ Programming Guide, technical specifications per compute capability
"""

MAX_THREADS = 1024
"""unit: threads of a block
why: as MAX_BLOCKS; a bundle that names more is refused at load
from: CUDA C++ Programming Guide, technical specifications per compute capability
"""

MOST_THREADS = 1024
"""unit: threads
why: no machine computes faster with more; a million asked for by mistake would take all its memory
from: chosen, not measured
"""

MOST_RANK = 64
"""unit: dimensions of a tensor
why: NumPy's arrays, which arguments, results and constants are, have no more
from: NumPy 2's NPY_MAXDIMS
"""

MOST_BYTES = 1 << 56
"""unit: bytes of a tensor
why: no machine addresses so many; sums of a hundred such sizes still fit 64 bits, in which kernels compute places
from: reasoning
"""

MAX_BYTES = 1 << 47
"""unit: bytes of a result or an arena
why: no process has so much address space; a program of fixed sizes that asks for more is broken
from: the user half of a 48-bit address space
"""

MAX_ITEMS = 1 << 48
"""unit: items of a grid
why: as MAX_BYTES; with MAX_GRAIN it keeps the executor's counters within 64 bits
from: each item writes a byte at least
"""

MAX_GRAIN = 1 << 48
"""unit: items that a worker claims at once
why: every worker may add it once more to a counter that is already behind the grid
from: 64 bits hold it for 2^14 workers
"""

LOGICAL_DEVICES = 62
"""unit: logical CPU devices of a process
why: so many are told apart when workers are divided; later ones are one with an earlier one
from: the bits of a word of the executor
"""

IDLE_BUFFERS = 4
"""unit: blocks of a GPU's memory, of one size
why: so many of arrays that are gone are kept for the next results: the driver is slower than a small kernel
from: chosen, not measured: a value and the one that replaces it, twice
"""

IDLE_BYTES = 256 << 20
"""unit: bytes of a GPU's memory
why: more blocks of one size are kept as well, if all that are kept have no more: a call may make many alike
from: chosen, as KEPT_RESULTS: to take memory of the driver waits for the GPU, which a call does not
"""

STREAMS = 3
"""unit: calls of one module that are on GPUs at a time, each on streams and in memory of its own
why: while one computes another copies, and a third is prepared; more wait, and take no dispatcher, which CPUs may need
from: chosen; a GPU has as many copy engines, and the process may have no more than four dispatchers
"""

RECORDED_PLANS = 64
"""unit: tuples of argument shapes, on one stream
why: for so many are there graphs at a time; those of the one that was not called for the longest time go
from: chosen, not measured: a graph of fifty kernels takes some 100 KB of the driver's memory
"""

WORKSPACE_GROWTH = 1.25
"""unit: times the working memory of a stream that was too small
why: shapes that grow bit by bit do not make new memory, and record all graphs again, in each call
from: chosen, not measured
"""

LARGEST_SHOWN = 4
"""unit: arrays
why: so many of a call for which a GPU has no memory are listed, the largest first
from: chosen
"""

RECORDED_ADDRESSES = 8
"""unit: sets of addresses of arrays on a GPU
why: for so many does a plan keep graphs, and MOVING more that others are put into
from: chosen, not measured: a loop that hands its results back uses two
"""

MOVING = 2
"""unit: sets of graphs of a plan
why: new addresses are put into these in turn: one may be changed while the GPU runs another
from: chosen, not measured
"""

SEEN_ADDRESSES = 64
"""unit: sets of addresses of arrays on a GPU
why: so many are remembered that came once: graphs are recorded for those that come again
from: chosen: a set is a tuple of integers
"""

STALE_CALLS = 64
"""unit: calls of a plan
why: graphs that were not used for so many go for those of other addresses; to record anew costs as much as ten calls
from: chosen, not measured
"""

COPIERS = 6
"""unit: threads that move the bytes of one array between page-locked memory and the array
why: one moves some 10 GB/s, and a GPU's link takes 55
from: benchmarks/device_arrays.py on an NVIDIA H200 with 16 cores: 47 GB/s up and 48 down for 256 MB
"""

STAGED_BLOCK = 2 << 20
"""unit: bytes of a page-locked buffer
why: large enough that asking for a copy costs little beside it, and small enough that many are under way
from: chosen, not measured
"""

STAGED_BYTES = 4 << 20
"""unit: bytes of an array
why: smaller ones are copied by the driver: to wake a thread takes longer
from: benchmarks/device_arrays.py on an NVIDIA H200: 1 MB at 13 GB/s by the driver and 8 in blocks, 16 MB at 18 and 21
"""

# ---------------------------------------------------------------- profiles

ROUND_NANOSECONDS = 100_000
"""unit: nanoseconds of a round in which a kernel is run again and again
why: beside so much the call itself, of a microsecond, and the clock count for little
from: reasoning
"""

MOST_REPEATS = 256
"""unit: runs of a kernel in a round
why: each takes some words of a command buffer, which should stay in the first-level cache beside what the kernel reads
from: chosen, not measured
"""

MEASURED_NANOSECONDS = 2_000_000_000
"""unit: nanoseconds spent on one kernel
why: what runs so long is measured well enough by fewer rounds
from: chosen, not measured
"""

RECORDED_CLAIMS = 1 << 20
"""unit: claims of kernels' items in a recording
why: so many have room, 128 bytes each, which the system gives when they are written; later ones are counted alone
from: chosen: 128 MiB, some seconds of claims of microseconds
"""

CLOCK_SECONDS = 0.02
"""unit: seconds
why: so long is a recording at least, for between its ends the processor's clock is compared with the system's
from: reasoning: a comparison is right within 100 ns, so the rate within 1 in 100 000
"""

ROOF_SIDE = 1024
"""unit: rows and columns of the product that tells what a core can do
why: large enough for BLAS to be at its best, small enough to take some 20 ms
from: chosen, not measured
"""

ROOF_TURNS = 1 << 14
"""unit: turns of the loop of multiply-adds that tells what a core can do
why: some 50 us, which the system seldom interrupts
from: reasoning: 12 to 16 instructions a turn, two in a cycle
"""

ROOF_ROUNDS = 5
"""unit: rounds, of which the quickest counts
why: what other programs take is no property of the machine
from: chosen, not measured
"""

ROOF_LEAST_BYTES = 32 << 10
"""unit: bytes of the smallest copy that tells what memory can do
why: smaller ones measure the call
from: first-level caches have so many and more
"""

ROOF_MOST_BYTES = 128 << 20
"""unit: bytes of the largest copy that tells what memory can do
why: more than the caches of most processors for a core
from: chosen, not measured
"""

SURE_DEVIATIONS = 1.96
"""unit: standard deviations
why: so far from the middle of a normal distribution are 5 % of what it gives
from: mathematics
"""

STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""unit: standard deviations of a mean, for 1 to 10 degrees of freedom
why: so far from it are 5 % of the means of few rounds
from: tables of Student's distribution; for more the last one, which is wider than need be
"""

KEYS_SHOWN = 10
"""unit: keys of a pytree
why: so many that are missing or unknown does an error name, which is to fit on a screen
from: chosen
"""

FREE_CONTAINERS = 50_000
"""unit: maps, and lists, that msgpack data of any size may have
why: they take 12 MB, and no manifest of a small model has as many
from: sizes of Python's containers
"""

BYTES_PER_MAP = 16
"""unit: bytes of msgpack data for each further map
why: a map of a manifest names its keys, and an empty one of a single byte takes 64 bytes of memory
from: sizes of Python's containers
"""

BYTES_PER_LIST = 3
"""unit: bytes of msgpack data for each further list
why: the shortest instruction of a program is a list of two numbers; an empty list of a byte takes 64 bytes of memory
from: the encoding of programs
"""

PART_FIRST_PAUSE = 50e-6
"""unit: seconds between two looks whether one result of a call under way is whole, at first; each pause doubles
why: about what it takes to wake a thread
from: chosen
"""

PART_LONGEST_PAUSE = 1e-3
"""unit: seconds between two looks whether one result of a call under way is whole, at most
why: a thread that looks so often takes less than a hundredth of a core
from: chosen
"""
