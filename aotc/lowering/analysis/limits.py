"""Bounds of the compiler's own work while it lowers; decisions about the program are in ``analysis/cost.py``."""

from __future__ import annotations

REGION_FRAMES = 20_000
"""unit: frames of Python's stack
why: lowering recurses over the ops of a region, and fusion bounds how many of them depend on each other
from: chosen, not measured
"""

SWEEPS = 8
"""unit: sweeps of canonicalize over a program
why: rewrites that make new ones possible; a program where nothing changes any more needs fewer
from: chosen, not measured
"""

IDENTITY_OPS = 16
"""unit: ops
why: so many are looked at between an operand of a product and the comparison that makes it a part of the identity
from: chosen, not measured
"""

CORNER = 8
"""unit: elements of each dim
why: so many are compared with a description of a constant before all are; other constants differ there
from: chosen, not measured
"""

NESTED_CONDITIONS = 4
"""unit: ops
why: the elementwise ops between a choice of an update and the broadcast of its condition; vmap of a branch makes one
from: chosen, not measured
"""

RECENT_OPS = 16
"""unit: ops
why: so many of the last ones are looked at for an equal one before a new one is made; cse finds the rest
from: chosen, not measured
"""

EXACT_EXPONENT = 14
"""unit: binary exponent of a divisor
why: dividing by a power of two is multiplying by its inverse as long as that is a normal number, also in f16
from: IEEE 754: the smallest normal f16 is 2^-14
"""

ALTERNATION_PERIOD = 4
"""unit: iterations
why: states that rotate through as many buffers are in the first one again; a longer period needs more commands
from: chosen: two states swap in 2, a stencil with three older states rotates in 4
"""

ALTERNATED_OPS = 256
"""unit: ops of the copies of a loop's body
why: each is a command of the bundle
from: chosen, not measured
"""

ALTERNATED_LOOPS = 16
"""unit: loops of a function
why: for each of them the function's buffer owners are found up to four times
from: chosen, not measured
"""

SPECIALIZATIONS = 64
"""unit: copies of the functions of a module for given sizes
why: each is compiled in full
from: chosen, not measured
"""

CONFLICT_WINDOW = 2048
"""unit: places of a command buffer
why: the check of a schedule does not look for conflicts further apart, so that long graphs take linear time
from: chosen, not measured
"""

SPREAD_COMMANDS = 2048
"""unit: commands of a graph
why: which of them need which takes the square of their number in time and memory; a longer graph shares what it can
from: chosen: a tenth of a second
"""

RELIEVED = 256
"""unit: values of a function
why: so many are made a second time or moved away to keep a limit on memory; each is a look at all ops
from: chosen, not measured
"""

NAMED_BUFFERS = 5
"""unit: buffers
why: so many are named where a limit on memory cannot be kept
from: chosen, not measured
"""

BANKS = 32
"""unit: words of shared memory
why: threads of a warp that touch different words at this distance wait for each other
from: all of NVIDIA's GPUs
"""

LONGEST_ROW = 1 << 31
"""unit: elements
why: a row of unknown length is sorted in as many steps as one of this length takes
from: positions in a row are i32
"""

NUMBER_STEPS = 8
"""unit: ops on scalars
why: a number is 1 / sqrt(depth) or the like; a longer chain is not followed by recursion
from: chosen, not measured
"""

BANK_BYTES = 4
"""unit: bytes of a bank of a GPU's shared memory
why: neighbours of so many bytes are in different banks
from: NVIDIA's documentation
"""

LEAST_LANES = 4
"""unit: threads that turn a pair of columns by Jacobi's method, at least
why: with fewer, a warp for 16 columns of f32 would have nothing to do for some of its threads
from: reasoning
"""

MATRIX_SAMPLES = 4096
"""unit: elements of a constant matrix
why: by so many it is told from others of its shape: one that has the same is packed as wide, and nothing else follows
from: chosen, not measured; to compare all elements takes as long as to read the model
"""

TILE_ROWS = 4
"""unit: rows of a tile
why: of more its operands' strides, and its terms, may be arguments; of so few the memory decides, and steps are fetched
from: 11 to 14 rows of 32, 32 to 256 terms, AVX-512: 0.98 to 1.03 of the time, on average 1.01
"""

VECTOR_ELEMENTS = 16
"""unit: elements
why: sizes that are multiples of so many are written so in kernels that are given them: rows of vectors
from: f32 in the widest vectors
"""

MOST_BESIDE = 4
"""unit: elements
why: a size may be written as another one and so many more, as padding makes it; of larger ones that is chance
from: chosen, not measured
"""
