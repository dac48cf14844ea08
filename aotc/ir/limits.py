"""Limits that several modules of the IRs, or of compiler stages, read."""

from __future__ import annotations

# Bytes of a local buffer up to which lowering puts it on a thread's stack (private); larger buffers are scratch memory.
PRIVATE_BYTES = 2048

# Findings that a verifier reports, at most: the first ones explain the rest.
FINDINGS = 20

# Padding elements between two rows of accumulators in shared memory. The lanes of a warp access 8 rows at a time, which
# the padding spreads over different banks. CUDA C++ Programming Guide, shared memory.
ROWS_APART = 8

# Elements of a vector of a Fourier transform, at most: a 512-bit vector of f32. The buffer between two passes has space
# for one vector after its last point.
TRANSFORM_LANES = 16
