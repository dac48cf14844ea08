"""Thresholds that several modules of the frontend read."""

from __future__ import annotations

# Elements of an integer argument: so short a one may hold sizes of shapes; its elements get symbols.
SIZE_ELEMENTS = 8

# Elements of an integer tensor: so small a one may be a shape, or what one is computed from; its elements are followed
# as dims. Shapes have a few dims.
SHAPE_ELEMENTS = 64

# Regions of ops around each other: each is a level of recursion in passes and of indentation in a kernel's text, of
# which Python takes 100. Command buffers take 32 (abi.MAX_NESTING), the rest are loops inside kernels.
MOST_NESTED = 48

# Characters of a line of the model in a message: a constant of weights is one line.
SHOWN_LINE = 160
