"""Thresholds of the IRs: of their texts and of what checks them. Each has its unit, why, and where it is from."""

from __future__ import annotations

PRIVATE_BYTES = 2048
"""unit: bytes of a private buffer
why: the largest that lowering puts on a thread's stack; larger ones are scratch
from: chosen, not measured
"""

INLINE_ELEMENTS = 16
"""unit: elements of a constant
why: so many are written out in the text, more stand beside it under a digest
from: chosen, not measured
"""

FINDINGS = 20
"""unit: findings of one check
why: more are left out: the first ones explain the rest
from: chosen, not measured
"""

GUARD_BYTES = 4096
"""unit: bytes
why: what guarded code leaves untouched behind each block of memory: the pages of the runtime's machine lie within it
from: the smallest page of the processors; where pages are larger, some guards are none
"""

SAMPLES = 3
"""unit: assignments of sizes to symbols
why: a program with symbols is checked under so many; overlaps that hold for one only show in another
from: chosen, not measured
"""

SPACE_BYTES = 1 << 57
"""unit: bytes
why: so far apart the verifier of a plan puts memories, that no arena reaches the next
from: reasoning: twice the largest tensor
"""

ROWS_APART = 8
"""unit: elements
why: between a row of sums in shared memory and the next: a warp's lanes have 8 rows, which fall on different banks
from: CUDA C++ Programming Guide, shared memory
"""

MOST_HELD = 128
"""unit: registers of a thread
why: queries and sums of single warps beside what else they have; f32 of 128 elements take so many
from: the linker's log
"""

SAMPLED_BYTES = 1024
"""unit: bytes of a constant
why: about so many, spread over it, tell constants apart that are compared byte by byte otherwise
from: chosen, not measured
"""

COMPARED_BYTES = 16 << 20
"""unit: bytes of a constant
why: so many are compared at a time, for which as much memory is needed
from: chosen, not measured
"""

TRANSFORM_LANES = 16
"""unit: elements of a vector of a Fourier transform, at most
why: memory between its passes has room for one behind the last point
from: a vector of 512 bits of f32
"""
