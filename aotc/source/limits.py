"""Thresholds that several modules of embedded sources read."""

from __future__ import annotations

# Bytes of a constant, from which its elements are searched for in the bundle. A reference takes 200 bytes, and smaller
# constants compress well.
LARGE_BYTES = 4096

# Bytes of a decompressed source, without the weights that it references, at most. It is a thousand times the size of a
# large model; a decompression bomb is refused before it fills the memory.
MOST_SOURCE_BYTES = 1 << 32

# Bytes of constants that a source has as differences, at most: they compress to a thousandth, so a damaged record of a
# few kilobytes must not fill the memory. Models have tables of positions and of masks, of some megabytes.
DIFFERENCES_BYTES = 1 << 26
