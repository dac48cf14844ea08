"""Thresholds of the frontend. Each has its unit, why it is there, and where its value is from."""

from __future__ import annotations

SIZE_ELEMENTS = 8
"""unit: elements of an integer argument
why: so short a one may hold sizes of shapes: its elements get symbols
from: chosen, not measured
"""

LOWEST_VALUE = -(1 << 63)
"""unit: value of an integer argument
why: shape arithmetic on arguments must also hold for values that cannot be sizes
from: reasoning; the lowest i64
"""

SHAPE_ELEMENTS = 64
"""unit: elements of an integer tensor
why: so small a one may be a shape, or what one is computed from: its elements are followed as dims
from: chosen, not measured; shapes have a few dims
"""

FRAMES_OF_A_CALL = 12
"""unit: frames of Python's stack per function of the model
why: a callee is imported when a call needs it, by recursion
from: chosen, not measured
"""

OWN_BYTES = 1 << 16
"""unit: bytes of a constant
why: a larger one stays in MLIR's memory and keeps that alive, a smaller one is copied out of it
from: chosen, not measured
"""

I32_TERMS = 1 << 16
"""unit: terms of a sum of products of 8-bit integers, less their zero points
why: so many, at most 255 * 128 each, fit into i32; longer sums are computed in floating point
from: reasoning: 2**16 * 255 * 128 is less than 2**31
"""

MOST_NESTED = 48
"""unit: regions of ops around each other
why: each is a level of recursion in passes and of indentation in a kernel's text, of which Python takes 100
from: reasoning; command buffers take 32 (abi.MAX_NESTING), the rest are loops inside kernels
"""

FRAMES_OF_A_REGION = 12
"""unit: frames of Python's stack per region around an op
why: regions are imported by recursion
from: chosen, not measured
"""

MOST_BRACES = 1000
"""unit: open brackets of any kind, or minus signs in a row, in a model's text
why: MLIR parses by recursion in native code: it crashed at 4000
from: measured with jaxlib 0.10 and a stack of 8 MB
"""

MESSAGE_ELEMENTS = 16
"""unit: elements of an array in the message of a check
why: each is read from memory by itself when the check fails or not; of a larger array the message has the shape
from: chosen, not measured
"""

SHOWN_LINE = 160
"""unit: characters of a line of the model in a message
why: a constant of weights is one line
from: chosen, not measured
"""

SHOWN_ELEMENTS = 16
"""unit: elements of a constant
why: so many are printed by aotc dump --source; weights would fill screens
from: chosen, not measured
"""

TILE_ROWS = 8
"""unit: rows of a tile of a ragged product, at least
why: of fewer, more matrices are copied for no less work
from: chosen, not measured
"""

MOST_TILE_ROWS = 128
"""unit: rows of a tile of a ragged product, at most
why: what is beyond the end of a group is multiplied in vain, half a tile of each group on average
from: measured on a CPU: 512 rows in 8 groups with 512 x 512 take 5.2, 4.8 and 5.5 ms with tiles of 32, 64 and 128
"""

CONTEXT_MODEL = 1 << 18
"""unit: bytes of a model's text or bytecode
why: of a larger one the constants would stay in memory, and making a context (2 ms) is little of its time
from: chosen: with CONTEXT_USES at most 16 MB stay, and those only of models that are mostly constants
"""

CONTEXT_USES = 64
"""unit: models
why: so many small ones are read in one context, which keeps their constants and types
from: chosen, not measured
"""

MOST_REWRITTEN = 1 << 26
"""unit: bytes of bytecode
why: the child hands back the module that is parsed in place of the file; of larger ones that would be a copy more
from: chosen, not measured
"""
