"""Thresholds that several modules of the frontend read."""

from __future__ import annotations

# Elements of an integer argument, of rank 0 or 1, up to which its elements become symbols: it may contain sizes of
# shapes.
SIZE_ELEMENTS = 8

# Elements of an integer tensor up to which its elements are tracked as dims: it may be a shape, or a shape may be
# computed from it. Shapes have few dims.
SHAPE_ELEMENTS = 64

# Depth of nested regions, at most. Each level is a level of recursion in passes and of indentation in a kernel's text,
# for which Python's limit is 100. Command buffers allow 32 (abi.MAX_NESTING); deeper levels are loops within kernels.
MOST_NESTED = 48
