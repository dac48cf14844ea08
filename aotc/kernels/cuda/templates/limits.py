"""Thresholds of templates. Each has its unit, why it is there, and where its value is from."""

from __future__ import annotations

GROUP_ROWS = 2048
"""unit: rows of a product
why: blocks take the tiles of so many, column by column: B is read from memory once for these, and A stays in L2
from: ncu, 4096^3 in bf16 on an H200: 145 MB read in tiles of 128 x 256, with 1024 rows 186 (128 x 128: 137 and 180)
"""

COPY_REGISTERS = 40
"""unit: registers of a thread of the warpgroup that copies
why: it gives the others back what it does not need
from: the kernel takes fewer than 40
"""

PRODUCT_REGISTERS = 232
"""unit: registers of a thread of two warpgroups that multiply
why: with COPY_REGISTERS they must fit a multiprocessor's 65,536: with 240 the two wait for ever
from: measured on an H200
"""

PRODUCT_REGISTERS_OF_ONE = 160
"""unit: registers of a thread of a warpgroup that multiplies alone
why: its tiles are smaller; two blocks may share a multiprocessor if these have no more than WIDE_COLUMNS
from: chosen, not measured
"""

STEP_REGISTERS = 56
"""unit: registers of a thread that multiplies
why: beside sums it has descriptors, places and sizes; the rest may hold what its epilogue reads
from: the linker's log: none is spilled
"""

MOST_AHEAD = 2
"""unit: times 32 columns of a warp's 16 rows
why: more are there no sooner, and each is moved from register to register in each turn
from: reasoning: a turn takes 800 to 1,600 cycles on an H200, what lies in its L2 comes in 500
"""

MOST_THREADS = 512
"""unit: threads of templates whose blocks stay, on a multiprocessor
why: those of a block that multiplies with one warpgroup have 160 or 40 registers each, and two blocks fit
from: registers of a multiprocessor
"""

WARP_ROWS = 32
"""unit: rows of a warp's part of a tile, of 64 columns
why: its sums, and what it multiplies, take two thirds of a thread's registers
from: measured on an H200; see WarpTiles
"""

WIDE_COLUMNS = 128
"""unit: columns of a tile of one warpgroup that multiplies
why: the sums of more do not fit PRODUCT_REGISTERS_OF_ONE
from: the linker's log: 72 bytes spilled with 256 columns
"""

COPY_REGISTERS_OF_ATTENTION = 24
"""unit: registers of a thread that copies for two warpgroups of attention
why: it gives the others back what it does not need
from: the linker's log
"""

ATTENTION_REGISTERS = 240
"""unit: registers of a thread of two warpgroups of attention
why: with COPY_REGISTERS_OF_ATTENTION they must fit a multiprocessor's 65,536; of one warpgroup all have enough
from: the linker's log: none is spilled
"""

COPY_REGISTERS_OF_THREE = 32
"""unit: registers of a thread that copies for three warpgroups of attention
why: as above
from: the linker's log
"""

ATTENTION_REGISTERS_OF_THREE = 160
"""unit: registers of a thread of three warpgroups of attention
why: as above
from: the linker's log: 32 bytes are spilled with keys of 64 elements, and it is the fastest for them
"""

HEADS_TOGETHER = 8
"""unit: heads whose tiles are done together, the longest first, where later rows have more terms
why: what they read of keys and values is in the L2 cache
from: 8192 terms of 128 take 4 MB a head; an H200 has 50 MB
"""

STAY_TERMS = 2048
"""unit: terms of attention up to which blocks stay and take one tile after the other
why: the next tile's keys are on their way while results are stored; with more terms it pays that any block takes it
from: measured on an H200: 1024 x 1024 x 64 takes 0.97 of the time, 4096 x 4096 x 128 takes 1.04
"""

COPIED_AT_ONCE = 8
"""unit: pieces of 16 bytes of keys or of values that a thread begins to copy before it looks for more
why: it is all of them where a block has eight warps; the places of the 64 of a block of one warp were spilled
from: the linker's log
"""

TOP_CHAINS = 4
"""unit: chains of comparisons by which a thread finds the highest score of a row
why: so many instructions are on their way at a time, of which each waits for the one before it
from: chosen, not measured
"""

STAGED_BYTES = 64
"""unit: bytes of a lane's sums that its warp puts down at a time
why: 16 rows of 128 bytes are the staging area of a warp
from: STAGING
"""

HELD_VALUES = 48
"""unit: registers of a thread for what an epilogue reads ahead, of 16 rows and 32 columns of a warp
why: they are on their way while the sums before them are stored, beside 128 sums of a tile of 256 columns
from: the linker's log: with three operands of 16 each none is spilled
"""
