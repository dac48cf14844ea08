"""Thresholds of embedded sources. Each has its unit, why it is there, and where its value is from."""

from __future__ import annotations

LARGE_BYTES = 4096
"""unit: bytes of a constant
why: from here on its elements are looked for in the bundle; a reference takes 200 bytes, and what is shorter compresses
from: chosen, not measured
"""

KEY_BYTES = 64
"""unit: bytes
why: constants whose first bytes are the same are compared whole
from: chosen, not measured
"""

BLOCK_BYTES = 1 << 20
"""unit: bytes
why: so much of an array is rearranged and compared at a time: it stays in the second cache
from: chosen, not measured
"""

MOST_WAYS = 64
"""unit: ways back from an array to what it was made of
why: layers of a model share theirs: three are usual, and a search has to end
from: ResNet50V2 and GPT-2, which have at most 4
"""

MOST_FOLDS = 4
"""unit: passes that fold
why: a constant is rearranged at most so often, one after the other
from: the table of passes has two
"""

SAMPLE_BYTES = 1 << 16
"""unit: bytes
why: whether elements that are nowhere else can be compressed is tried with so many of them, which takes 2 ms
from: chosen, not measured
"""

SQUEEZED = 0.75
"""unit: compressed size of a sample, over its own
why: random weights give 0.93, which is not worth 30 ms a megabyte; masks and tables give 0.01
from: zlib on random f32, i8 and on masks
"""

MOST_HEADS = 4
"""unit: numbers before the elements in an attribute of MLIR's bytecode
why: kind, type, size, and one for a later version
from: MLIR's BuiltinDialectBytecode and StableHLO's VhloBytecode
"""

MOST_SOURCE_BYTES = 1 << 32
"""unit: bytes of a source after decompression, without the weights that it refers to
why: a thousand times what a large model takes; a bomb is refused before it fills the memory
from: chosen, not measured
"""

LEAST_CACHE = 1 << 12
"""unit: bytes of a processor's second cache
why: block sizes are computed from it, and what a bundle says it was may be anything
from: chosen, not measured
"""

MOST_CACHE = 1 << 30
"""unit: bytes of a processor's second cache
why: as LEAST_CACHE
from: chosen, not measured
"""

FREE_SOURCE_BYTES = 1 << 26
"""unit: bytes of a source after decompression, whatever it has in the bundle
why: models of a few thousand ops without their weights take less
from: chosen, not measured
"""

SOURCE_RATIO = 100
"""unit: bytes of a source after decompression for each byte that it has in the bundle
why: bytecode compresses to a fifth, equal layers to a thirtieth; what a thousandth stands for is a bomb
from: chosen, not measured
"""

READER_SECONDS = 600
"""unit: seconds
why: a process that reads a model of unknown origin may not end; the largest models take seconds
from: chosen, not measured
"""

READER_IDLE_SECONDS = 60
"""unit: seconds
why: the process that reads models takes 150 MB, and half a second to start
from: chosen, not measured
"""

UNTRUSTED_SECONDS = 60
"""unit: seconds that reading an untrusted source may take
why: the largest models take seconds
from: chosen, not measured
"""

UNTRUSTED_BYTES = 1 << 30
"""unit: bytes of memory that reading an untrusted source may take, besides UNTRUSTED_RATIO times its size
why: a small model takes some megabytes, and a source of 100 kB that takes all memory is refused
from: chosen, not measured
"""

UNTRUSTED_RATIO = 16
"""unit: bytes of memory a byte of an untrusted source
why: MLIR's ops take more memory than their bytecode
from: chosen, not measured
"""

PIPE_BYTES = 1 << 20
"""unit: bytes of one read from a pipe, or write to one
why: a pipe holds as many at most, and a larger piece takes memory for nothing
from: Linux, /proc/sys/fs/pipe-max-size
"""
