"""Thresholds that several modules of embedded sources read."""

from __future__ import annotations

# Bytes of a constant: from here on its elements are looked for in the bundle; a reference takes 200 bytes, and what is
# shorter compresses.
LARGE_BYTES = 4096

# Bytes of a source after decompression, without the weights that it refers to: a thousand times what a large model
# takes; a bomb is refused before it fills the memory.
MOST_SOURCE_BYTES = 1 << 32
