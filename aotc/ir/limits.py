"""Thresholds that several modules of the IRs, or of the stages, read."""

from __future__ import annotations

# Bytes of a private buffer: the largest that lowering puts on a thread's stack; larger ones are scratch.
PRIVATE_BYTES = 2048

# Findings of one check: more are left out; the first ones explain the rest.
FINDINGS = 20

# Elements: between a row of sums in shared memory and the next; a warp's lanes have 8 rows, which fall on different
# banks. CUDA C++ Programming Guide, shared memory.
ROWS_APART = 8

# Elements of a vector of a Fourier transform, at most: memory between its passes has room for one behind the last
# point. A vector of 512 bits of f32.
TRANSFORM_LANES = 16
