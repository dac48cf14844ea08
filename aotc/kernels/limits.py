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

HOST_SHARE = 50
"""unit: times as long as the host's last word took
why: so long does the next one wait: where Python's other threads compute, its lock comes after 5 ms each time
from: chosen, so that at most a fiftieth of the time is spent waiting for the lock (benchmarks/beside_threads.py)
"""

LONGEST_SILENCE = 250_000_000
"""unit: nanoseconds
why: the next word waits no longer, in a later call too: where threads are many, one may come late, and Ctrl-C waits
from: HOST_SHARE times the 5 ms after which CPython's threads hand over its lock
"""

SMALL_TURNS = 16
"""unit: nodes of a command buffer
why: the clock is read after so many, which are serial graphs and so of at most 6 us each: within 100 us
from: the clock takes 5 ns, a loop's turn of two small kernels 50 ns
"""

IDLE_TURNS = 64
"""unit: turns of a waiting loop, of some 15 ns
why: the stop word is looked at, and the caller's clock, after so many
from: chosen; it costs a participant that has nothing else to do
"""

RUNS = 32
"""unit: calls
why: so many share the workers at a time; another has its own thread alone
from: chosen: their callers alone are more threads than most machines have cores, and each takes 640 bytes
"""

SHARE_UNITS = 720720
"""unit: parts of a thread
why: shares of calls in a device's threads are counted in these; up to 16 calls have exactly equal ones
from: the least common multiple of 1 to 16
"""

KEEP_SECONDS = 2
"""unit: seconds
why: a worker that no run of the last 2 to 4 seconds wanted ends; to start one takes some 30 us
from: chosen, not measured
"""

RETRY_SECONDS = 1
"""unit: seconds
why: a system that refused a thread is not asked for another before, as each refusal takes microseconds
from: chosen, not measured
"""

LAG_WHOLE = 1024
"""unit: parts of a participant's speed
why: how far it lags behind the fastest is counted in these: 0 is as fast, 921 a tenth as fast
from: chosen; a power of two
"""

LAG_FREE = 512
"""unit: parts of a participant's speed, of LAG_WHOLE
why: who has half of the speed of the fastest claims as much at once: two threads of a core, or noise, change nothing
from: chosen: the last claim then takes twice as long as others' do
"""

LAG_MOST = 992
"""unit: parts of a participant's speed, of LAG_WHOLE
why: a claim has a 32nd of the grain at least, also when the system had taken the processor away meanwhile
from: chosen: a claim of 5 us then takes 0.16 us of it
"""

SHUFFLE_PAUSES = 2000
"""unit: turns of some 15 ns
why: so long does a participant wait at most, now and then, in a trial that shuffles: as long as some small kernels
from: chosen
"""

SHUFFLE_YIELDS = 4
"""unit: calls of sched_yield
why: as SHUFFLE_PAUSES; others run meanwhile where there are more threads than cores
from: chosen
"""

# ---------------------------------------------------------------- kernels that may run long

POLL_OPERATIONS = 20_000
"""unit: scalar operations
why: after so many a kernel that may run long asks whether to go on: 3 us of vector code, 100 us of slow functions
from: the promise of 100 us; a poll takes 10 ns
"""

LONG_ITEM = 1_000_000
"""unit: scalar operations of an item of the grid
why: with so many a kernel may run long without a while: beyond 0.1 to 1 ms
from: chosen; an item of a grid that was split for several threads has less
"""

COUNTED_TURN = 2_000
"""unit: scalar operations of a turn of a loop without a while
why: with fewer, counting turns would cost time, and stop LLVM from vectorizing
from: chosen; there is a loop around it that has as many
"""

UNKNOWN_EXTENT = 1_000
"""unit: turns of a loop whose extent is symbolic
why: what the number of its operations is estimated from
from: chosen
"""

# ---------------------------------------------------------------- tiles

UNROLL = 4
"""unit: iterations of a tile's innermost level
why: so many at most are written one after the other, the rest of the extent is a second loop
from: chosen, not measured
"""

UNROLLED_TILE = 16
"""unit: vectors of a tile's result
why: of more the innermost level is written once: so many products hide the loop's instructions, LLVM takes half as long
from: 18 to 28 vectors of f32, AVX-512: 0.99 to 1.01 of the time of four iterations a turn; 12, AVX2: up to 2.0, spills
"""

PREFETCH_ROWS = 1
"""unit: rows of a tile
why: with so few a tile waits for memory alone and prefetches b; with more it only pays for the instructions
from: measured: with 2 or 4 rows prefetching costs an AMD core 9 to 24 %
"""

SCALED_PREFETCH_ROWS = 32
"""unit: rows of a tile whose weights have few bits
why: as PREFETCH_ROWS; a step reads so few bytes that the processor itself begins too late, whatever the rows
from: a core of Zen 5: 1 x 4096 x 4096 of i8 as without, 4 rows 0.64 ms (1.1 without), 8 1.2 ms (2.5), 14 2.3 ms (3.2)
"""

APART_PREFETCH_ROWS = 4
"""unit: rows of a tile whose steps of b lie apart, as values of attention do
why: as PREFETCH_ROWS; a step is a part of a row in memory, so that the processor itself does not see what comes next
from: a core of Zen 5, 4 queries of 16384 keys of 128 in bf16: 5.0 ms without, 3.4 with
"""

PREFETCH_BYTES = 8192
"""unit: bytes ahead in b
why: so far is prefetched; it covers the memory's latency at the rate that one row reads at
from: measured: took an Intel core from 20 to 29 GB/s; costs an AMD one 3 to 10 %
"""

ZIPPED_PREFETCH_BYTES = 16384
"""unit: bytes ahead in b
why: so far a tile fetches values of few queries whose terms lie apart, as FETCHED_KEYS does
from: as FETCHED_KEYS; a core of Zen 5, 4 queries of 8 heads of 128: fetched before the tile 0.52 of reading, by it 0.6
"""

# ---------------------------------------------------------------- CUDA

FLAT_THREADS = 128
"""unit: threads of a block, each with an item of its own
why: several warps hide each other's latency; a small grid still spreads over all multiprocessors
from: chosen, not measured
"""

WRITING_THREADS = 256
"""unit: threads of a block of a large grid that reads little, each with an item of its own
why: a block is soon done, and multiprocessors take on no more of them in a time
from: an H200: writes of 64 and 256 MB by vectors take 15.9 and 58.5 us, 20.8 and 80.2 by blocks of 128, copies as long
"""

GATHERING_THREADS = 1024
"""unit: threads of a block of a large grid that reads anywhere in rows, each with an item of its own
why: those of a row are then on one multiprocessor, whose cache brings the row once
from: an H200: ``take_along_axis`` of 4096 x 4096 f32 takes 55 us, by blocks of 128 85
"""

GATHERED_ROW = 64 << 10
"""unit: bytes of a row that blocks of so many threads are for
why: the first-level cache of a multiprocessor has at least 128 KiB, of which a block may have a half
from: chosen, not measured beyond 16 KiB
"""

WRITING_ITEMS = 1 << 18
"""unit: items of a grid that is large
why: all multiprocessors have several blocks of it
from: chosen, not measured
"""

WRITING_SHARE = 4
"""unit: times the bytes read that a kernel writes, at least, which reads little
why: loads take longer than a block takes to begin
from: chosen, not measured
"""

PATIENCE_SECONDS = 20
"""unit: seconds
why: so long does a thread of a simulated block wait for others, which then never come
from: chosen: a simulated tile takes some tenths of a second
"""

# ---------------------------------------------------------------- compiler processes and threads

MOST_JOBS = 8
"""unit: processes and threads
why: no more by default however many cores there are: processes load LLVM and Numba, threads wait for Python's lock
from: chosen; 2, 4, 8 threads take 0.56, 0.42, 0.31 of the time of one (60 kernels)
"""

OWN_TEXT = 40_000
"""unit: characters of a kernel's text
why: a longer one is not compiled in the caller's process, where an interrupt waits for LLVM's answer
from: none of 800 kernels of 71 programs took more than 0.3 s; those of more than 3000 took 5 to 53 us a character
"""

THREAD_TEXT = 500
"""unit: characters of the kernels' texts but the longest one's, which others could compile in the meantime
why: another thread helps for each, but one in any case: it waits for Python at times
from: 20 programs of 40 to 230 ms on two cores; 2000, 1000, 500, 250: wall 1, 0.88, 0.81, 0.81, processor 1 to 1.02
"""

MOST_EMITTED = 32
"""unit: kernels
why: so many may be LLVM's assembly, ten times as long as a kernel's text, before one more is made of its object
from: chosen: with two threads half of a network's kernels wait at times, 10 to 30; fewer leave Python's lock to chance
"""

SHORT_TURN = 0.0003
"""unit: seconds
why: a thread that wants Python's lock asks for it after so long while kernels are compiled; Python's own is 5 ms
from: four programs on two cores, 5 ms, 1 ms, 0.3 ms: wall 1, 0.98, 0.96, processor 1, 1.01, 1.01; less gains nothing
"""

THREAD_STACK = 16 << 20
"""unit: bytes
why: LLVM recurses over what a kernel is made of, and a system may give threads less than processes
from: twice what most systems give to a process; memory that is not touched costs nothing
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

LANES = (2, 4, 8, 16)
"""unit: lanes of a vector
why: of so many LLVM makes vectors of loops: functions for rare arguments have a form for each number
from: 8 doubles in the widest registers, and loops whose other values are half as wide
"""

# ---------------------------------------------------------------- loops

UNROLLED_TURNS = 100
"""unit: turns of a loop along its arrays, or that combines each with the same number, that LLVM is kept from unrolling
why: it unrolls loops of 300 instructions before it looks for vectors; of longer loops it makes vectors
from: ns of f32, AVX-512: sums of rows of 15 to 64 0.27, 0.06 as vectors, 96 0.4, 0.05; x + u * v of 12 to 33 0.6, 0.1
"""

MOVES_AT_ONCE = 4
"""unit: turns of a loop that are written one after the other where each puts elements in places that it loads
why: such turns are a dozen instructions, of which two go round the loop; passes that would find out are not run
from: sorts of 10,000 f32, i32 and bf16 take 1.15, 1.09 and 1.19 of the time once, 1.0, 1.0 and 1.05 four times (Zen 5)
"""

COUNTS_AT_ONCE = 2
"""unit: turns of a loop that are written one after the other where each counts in several places
why: such turns are long already
from: the code of a sort of f32 takes 7.3 ms with one, 8.9 with two, 9.7 with four, of 8.2 before (Zen 5, busy)
"""

MOVED_OPERATIONS = 14
"""unit: operations of a turn that moves elements, at most, for which it is written several times
why: code takes long for longer turns, and these gain little
from: moves by a byte of f32 have 10, of rows with -0.0 14, which take 1.24 of the time before once, 1.14 four times
"""

COUNTED_PLACES = 4
"""unit: places that a turn of a loop counts in, each named by what it loads, for which LLVM is kept from unrolling it
why: the counts of a radix sort, whose turns are long; the code is a tenth smaller and takes the same time
from: benchmarks/ops.py, group sorting, beside the state before, 1 thread of a busy Zen 5
"""

MASKED_TURNS = 511
"""unit: turns of a loop of dear functions whose last vector has a mask
why: masks cost each turn something; in longer loops the turns that fill no vector are few
from: exp and sum of rows of 30 f32 took 1.3 ns an element, 0.36 with masks; of 60 0.51 and 0.32 (AVX-512)
"""

HALF_REGISTER = 16
"""unit: bytes of a half of an AVX register
why: moves within it are cheap, those from one to the other dear, and LLVM looks long for better ones
from: transforms of 64 points, vectors of 8 f32: 25 ms of code generation woven across halves, 9 apart
"""

AVX512_BYTES = 64
"""unit: bytes of a register of AVX-512
why: one instruction takes any elements of two registers, and what weaves names it, as LLVM looks long for others
from: the function of fft c64 [4096]: 40 us of code generation less for each of 80 orders
"""

SHARED_RADIX = 8
"""unit: radix of the passes of a transform that share a butterfly
why: a smaller one is no more than the jump behind it; of odd ones results and constants fill the registers
from: calls beside one butterfly for each pass, Zen 5: 8 0.98 to 1.02, 4 up to 1.07 (128 points), 3 1.03, 7 1.07
"""

TURNED_LANES = 4
"""unit: turns of both loops of a copy that exchanges two axes, at least, for which it is turned in registers
why: fewer elements side by side are not worth a vector
from: copies of 4 x 128 and 4 x 16 compile in 0.5 of the time and take as long
"""

TURNED_BYTES = 64
"""unit: bytes of a vector of such a copy, at most, and of a row of the result that is written in one turn
why: a line that is written in parts may have left the first-level cache in between, where rows share its sets
from: f32 1024 x 1024, one core of a Zen 5: lines in one vector 190 us, in two that follow each other 260, apart 360
"""

TURNED_VECTORS = 16
"""unit: vectors of such a block that are held at once, at most
why: more do not fit the registers of AVX; a row's other pieces are then read in a later turn
from: i8 of 1024 x 1024 by AVX-512 holds 16 of its 64, f32 all 16
"""

TURNED_ELEMENTS = 65536
"""unit: elements of such a copy, at most
why: the function that turns them asks nobody whether to go on
from: 16 us at 16 GB/s, memory's; loops over the items of a grid are of 256 to 4096
"""

PIECES = 8
"""unit: vectors of a loop beside tiles that are written one after the other, at most
why: such a loop is as wide as a tile, and LLVM would write its vectors out
from: tiles are up to four vectors wide
"""
